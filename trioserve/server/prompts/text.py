"""Converts text and chats to the token ids of a prompt, and tokens to text.

Chats are rendered, and their prompts get divergence points. `PromptLog` writes
prompts to files.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import attrs
import trio

from trioserve.chat.markers import mark, media_marker
from trioserve.chat.messages import (
    MarkedMessages,
    Messages as ParsedMessages,
    documents_in,
    has_media,
    parse_messages,
)
from trioserve.chat.params import ChatParams
from trioserve.chat.template.continuation import find_divergence_points, render_continued
from trioserve.chat.template.render import ChatTemplate
from trioserve.chat.template.sandbox import Limits, OutOfTimeError
from trioserve.concurrency import check_cancelled
from trioserve.engine.backend import Vocab
from trioserve.errors import ConfigError, ContextLengthExceededError, InvalidRequestError
from trioserve.fair_limiter import SMALL, Workers
from trioserve.log import get_logger
from trioserve.server.limits.memory import MemoryReservation
from trioserve.server.model import LoadedModel
from trioserve.server.prompts.media import MediaPrompts, MixedPrompt, check_kinds
from trioserve.types import Prompt, TokenId
from trioserve.types.task import shared_length

_log = get_logger("trioserve")


def text_of(vocab: Vocab, prompt: Prompt) -> bytes:
    """Convert a prompt to text, with ``[image]``, ``[audio]`` or ``[video]`` for each chunk."""
    written, n_tokens = b"", 0
    for n_before, chunk in prompt.media:
        written += vocab.detokenize(prompt.tokens[n_tokens:n_before])
        written += f"[{chunk.kind}]".encode()
        n_tokens = n_before
    return written + vocab.detokenize(prompt.tokens[n_tokens:])


class PromptLog:
    """Writes each prompt to a separate file, named by the time and the number of the request.

    Args:
        directory: the folder of the files; it is created if it does not exist.

    Raises:
        ConfigError: the directory cannot be created.
    """

    def __init__(self, directory: str, vocab: Vocab) -> None:
        self._directory, self._vocab = Path(directory), vocab
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"log_prompts_dir: {directory} cannot be made: {error.strerror}"
            ) from error

    async def write(self, task_id: int, prompt: Prompt) -> None:
        """Write a prompt. An error is logged, and the request continues."""
        path = self._directory / f"{time.time_ns() // 1_000_000:012}-{task_id}.txt"

        def write_file() -> None:
            path.write_bytes(text_of(self._vocab, prompt))

        try:
            await trio.to_thread.run_sync(write_file)
        except OSError as error:
            _log.error("a prompt could not be written", file=str(path), error=error.strerror)


#: Text, or token ids with text between them.
PromptLike: TypeAlias = str | Sequence[TokenId | str] | Prompt

AnyPrompt: TypeAlias = PromptLike | MixedPrompt


def tokens_of(
    vocab: Vocab,
    parts: Sequence[TokenId | str],
    *,
    add_special: bool = True,
    parse_special: bool = True,
    is_fragment: bool = False,
    limit: int | None = None,
) -> Prompt:
    """Tokenize the text parts of a prompt. It may be slow.

    Raises:
        ContextLengthExceededError: there are more than `limit` tokens. The check runs from time to
            time, so there may be many more.
    """
    if not any(isinstance(part, str) for part in parts):
        return Prompt(cast(Sequence[TokenId], parts))
    tokens: list[TokenId] = []

    def check(n_more: int) -> None:
        n_tokens = len(tokens) + n_more
        if limit is not None and n_tokens > limit:
            raise ContextLengthExceededError(n_tokens, limit, at_least=True)
        check_cancelled()

    for i, part in enumerate(parts):
        if not isinstance(part, str):
            tokens.append(part)
            continue
        tokens += vocab.tokenize(
            part,
            add_special=add_special and i == 0,
            parse_special=parse_special,
            is_fragment=is_fragment,
            check=check,
        )
    return Prompt(tokens)


@attrs.define(eq=False, slots=False)
class Tokenizer:
    """Tokenizes short texts on the event loop, and long ones in a thread.

    A text that must fit into the context is rejected before it is tokenized if it is far too long:
    a token has at most `Vocab.max_token_bytes`. Otherwise it is rejected as soon as there are too
    many tokens.
    """

    _vocab: Vocab  # the model's vocabulary
    _workers: Workers  # the threads
    _n_ctx: int  # tokens in the context of a request

    @property
    def max_chars(self) -> int:
        """The length, in characters, of the longest text that may fit into the context."""
        return self._n_ctx * self._vocab.max_token_bytes

    async def prompt_of(
        self,
        prompt: PromptLike,
        *,
        add_special: bool = True,
        parse_special: bool = True,
        is_fragment: bool = False,
        fits: bool = False,
        aside: bool = False,
    ) -> Prompt:
        """Tokenize a prompt. Special tokens are added if it begins with text.

        Token ids in it are kept and not checked here: the engine checks those of a task.

        Args:
            add_special: see `Vocab.tokenize`.
            aside: whether the tokens are not for a prompt that the model continues.

        Raises:
            ContextLengthExceededError: it does not fit.
            InvalidRequestError: the text cannot be tokenized.
        """
        if isinstance(prompt, Prompt):
            return prompt
        parts = (prompt,) if isinstance(prompt, str) else prompt
        if fits and len(parts) > self._n_ctx:
            raise ContextLengthExceededError(len(parts), self._n_ctx)
        size = len(parts)
        if size <= SMALL:
            n_chars = sum(len(part) for part in parts if isinstance(part, str))
            # The longest token of a large vocabulary takes a tenth of a second to find.
            if fits and n_chars > self._n_ctx and n_chars > self.max_chars:
                n_tokens = -(-n_chars // self._vocab.max_token_bytes)
                raise ContextLengthExceededError(n_tokens, self._n_ctx, at_least=True)
            size += n_chars - isinstance(prompt, str)
        work = partial(
            tokens_of,
            self._vocab,
            parts,
            add_special=add_special,
            parse_special=parse_special,
            is_fragment=is_fragment,
            limit=self._n_ctx if fits else None,
        )
        return await self._workers.offload(work, size, aside=aside)

    def detokenize(self, tokens: Sequence[TokenId] | Prompt) -> str:
        """See `Server.detokenize`. While draining too: running requests write their last event."""
        if not isinstance(tokens, Prompt):
            tokens = Prompt(tokens)
            tokens.check(self._vocab.n_tokens, "tokens")
        return text_of(self._vocab, tokens).decode("utf-8", "replace")

    async def biases_of(self, biases: Any) -> Any:
        """Give each token of a text the bias of the text; biases of ids are kept.

        Takes pairs of a token id or text and its bias. Other values are returned unchanged.

        Raises:
            InvalidRequestError: an id is not in the vocabulary.
        """
        if isinstance(biases, Mapping):
            biases = tuple(biases.items())
        if not isinstance(biases, tuple):
            return biases
        size = len(biases)
        for pair in biases:
            match pair:
                case (str(text), _):
                    size += 64 + len(text)
        return await self._workers.offload(partial(self._biases_of, biases), size)

    def _biases_of(self, biases: tuple[Any, ...]) -> tuple[Any, ...]:
        found: list[Any] = []
        for pair in biases:
            match pair:
                case (str(text), bias):
                    ids = self._vocab.tokenize(
                        text, parse_special=False, check=lambda _: check_cancelled()
                    )
                    found += ((each, bias) for each in ids)
                    continue
                case (int(token), _) if not 0 <= token < self._vocab.n_tokens:
                    raise InvalidRequestError.at(
                        "logit_bias",
                        f"has token id {token}; the vocabulary ends at {self._vocab.n_tokens - 1}.",
                    )
            found.append(pair)
        return tuple(found)


#: Limits of a render on the event loop.
_QUICK = Limits(seconds=0.004, hurried=True)

Messages: TypeAlias = Sequence[Mapping[str, Any]]


@attrs.define(eq=False, slots=False)
class ChatPrompts:
    """Renders chats with the model's template, and tokenizes them."""

    _model: LoadedModel  # has the template
    _tokenizer: Tokenizer  # converts text to tokens
    _workers: Workers  # threads for long work
    media: MediaPrompts  # makes prompts with media

    def __attrs_post_init__(self) -> None:
        self._quick = self._model.template.with_limits(_QUICK)
        self._slow = self._model.template.with_limits(Limits(check=check_cancelled))
        self._is_slow = False  # whether the last render was slow

    async def parse(self, messages: Messages) -> ParsedMessages:
        """Check messages. Raises InvalidRequestError: one is malformed."""
        if isinstance(messages, ParsedMessages):
            return messages
        if n_chars(messages) <= SMALL:
            return parse_messages(messages)
        return await self._workers.offload(partial(parse_messages, messages))

    async def mark(
        self, messages: ParsedMessages, hold: MemoryReservation, *, marker: str | None = None
    ) -> MarkedMessages:
        """Read documents, and replace media with markers.

        Raises:
            InvalidMediaError: a document cannot be read.
            UnsupportedFieldError: the model does not support one of the media.
            TrioServeError: from reading documents.
        """
        if any(map(documents_in, messages)):
            messages = await self.media.read_documents(messages, hold)
        if not any(has_media(one["content"]) for one in messages):
            return MarkedMessages(messages)
        marked = await self._workers.offload(partial(mark, messages, marker), n_chars(messages))
        check_kinds(self._model.modalities, marked.media.values())
        return marked

    async def render(self, messages: Messages, chat: ChatParams) -> str:
        """Render messages whose media are markers."""
        cost = n_chars([messages, chat.tools, chat.template_kwargs])
        if cost <= SMALL and not self._is_slow:
            try:
                return self._render(self._quick, messages, chat)
            except OutOfTimeError:
                pass  # render again in a thread, with a longer limit
        return await self._workers.offload(partial(self._render_slowly, messages, chat))

    def _render_slowly(self, messages: Messages, chat: ChatParams) -> str:
        began = time.thread_time()
        try:
            return self._render(self._slow, messages, chat)
        finally:
            self._is_slow = time.thread_time() - began > _QUICK.seconds

    def _render(self, template: ChatTemplate, messages: Messages, chat: ChatParams) -> str:
        variables = self._model.variables_of(chat)
        part = chat.continue_final_message
        if part is not None:
            return render_continued(
                template, template.format, messages, part, tools=chat.tools, kwargs=variables
            )
        return template.render(
            messages,
            tools=chat.tools,
            add_generation_prompt=chat.add_generation_prompt,
            kwargs=variables,
        )

    async def render_marked(self, messages: Messages, chat: ChatParams) -> str:
        """See `Server.render`."""
        with self.media.memory.hold() as hold:
            marked = await self.mark(await self.parse(messages), hold, marker=media_marker())
        return await self.render(marked.messages, chat)

    async def chat_prompt(self, messages: Messages, chat: ChatParams) -> Prompt:
        """Make the prompt of a chat, which may be too long for the context."""
        with self.media.memory.hold() as hold:
            marked = await self.mark(await self.parse(messages), hold)
            text = await self.render(marked.messages, chat)
            return await self._tokenized(text, marked, hold, fits=False, aside=True)

    async def _tokenized(
        self,
        text: str,
        marked: MarkedMessages,
        hold: MemoryReservation,
        *,
        fits: bool,
        aside: bool = False,
        scope: str = "",
    ) -> Prompt:
        add_special = self._adds_special(text)
        if not marked.media:
            return await self._tokenizer.prompt_of(
                text, add_special=add_special, fits=fits, aside=aside
            )
        parts = await self._workers.offload(partial(marked.split, text), len(text))
        return await self.media.prompt_of(
            parts, hold, scope=scope, add_special=add_special, fits=fits, aside=aside
        )

    def _adds_special(self, text: str) -> bool:
        """True if the tokenizer must add BOS: most templates write it."""
        bos = self._model.info.bos_token
        return not (bos and text.startswith(bos))

    async def prompt_of(
        self,
        text: str,
        marked: MarkedMessages,
        chat: ChatParams,
        hold: MemoryReservation,
        scope: str,
    ) -> Prompt:
        """Make a prompt of a rendered chat, with the points at which others will diverge."""
        prompt = await self._tokenized(text, marked, hold, fits=True, scope=scope)
        if not self._model.keeps_checkpoints:
            return prompt
        find = partial(self._divergence_points, text, prompt, marked, chat)
        points = await self._workers.offload(find)
        return Prompt(prompt.tokens, media=prompt.media, divergence_points=points)

    def _divergence_points(
        self, text: str, prompt: Prompt, marked: MarkedMessages, chat: ChatParams
    ) -> tuple[int, ...]:
        messages = marked.messages
        n_given = len(messages) - (chat.continue_final_message is not None)
        places = find_divergence_points(
            self._slow,
            text,
            messages[:n_given],
            tools=chat.tools,
            kwargs=self._model.variables_of(chat),
        )
        return divergence_points_of(
            self._model.vocab,
            marked.pieces(text),
            prompt,
            places,
            add_special=self._adds_special(text),
        )


def n_chars(value: Any) -> int:
    """Count the characters in a JSON value; stops once they are not few."""
    total = 0
    values = [value]
    while values and total <= SMALL:
        value = values.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, Sequence):
            values += value
        total += 8  # any value takes some time to render
    return total


#: A limit of the tokens in a message header: ``<|im_start|>user\n`` has three.
_HEADER = 6


def divergence_points_of(
    vocab: Vocab,
    pieces: Sequence[str],
    prompt: Prompt,
    places: Iterable[int],
    *,
    add_special: bool,
) -> tuple[int, ...]:
    """Count the cells of a prompt before some characters of its text.

    A character after the header of a message counts as the start of the header, because the last
    token of the header may merge with the text that follows. The end of the last media is also one:
    another question about them may follow.

    Args:
        pieces: the text; every second piece stands for media.
        places: the characters, as offsets in all pieces together.
        add_special: whether the prompt begins with a special token that the text does not have.
    """
    if len(pieces) == 1:
        return _points_in(vocab, pieces[0], prompt.tokens, places, add_special=add_special)
    points = {n_before + last.n_cells for n_before, last in prompt.spans[-1:]}
    n_chars = n_tokens = 0
    for place, piece in enumerate(pieces):
        begin, n_chars = n_chars, n_chars + len(piece)
        inside = [place - begin for place in places if begin < place <= n_chars]
        if place % 2 or not piece:
            continue
        special = add_special and place == 0
        tokens = vocab.tokenize(piece, add_special=special, check=lambda _: check_cancelled())
        start = _find(tokens, prompt.tokens, n_tokens)
        if start is None:
            continue  # a projector changed the text; the checkpoint is optional
        n_tokens = start + len(tokens)
        found = _points_in(vocab, piece, tokens, inside, add_special=special)
        n_media = sum(chunk.n_cells for n_before, chunk in prompt.media if n_before <= start)
        points.update(n_media + start + point for point in found)
    return tuple(sorted(points))


def _find(tokens: Sequence[TokenId], within: Sequence[TokenId], start: int) -> int | None:
    """Find tokens in other tokens: projectors add their own around media."""
    first, n_tokens = tokens[:1], len(tokens)
    for place in range(start, len(within) - n_tokens + 1):
        if first == within[place : place + 1] and tokens == within[place : place + n_tokens]:
            return place
    return None


def _points_in(
    vocab: Vocab,
    text: str,
    tokens: Sequence[TokenId],
    places: Iterable[int],
    *,
    add_special: bool,
) -> tuple[int, ...]:
    """Count the tokens of a text before some of its characters."""
    points = set()
    for place in places:
        n_before = _count(vocab, text, tokens, place, add_special=add_special)
        header = tokens[max(0, n_before - _HEADER) : n_before]
        after_control = [i for i, token in enumerate(header, 1) if not vocab.pieces[token]]
        points.add(n_before - (len(header) - after_control[-1] if after_control else 0))
    return tuple(sorted(points))


def _count(
    vocab: Vocab,
    text: str,
    tokens: Sequence[TokenId],
    place: int,
    *,
    add_special: bool,
) -> int:
    """Count the tokens before a character; tokenizes the shorter side if that is enough."""
    if place * 2 > len(text):
        tail = vocab.tokenize(text[place:], check=lambda _: check_cancelled())
        n_before = len(tokens) - len(tail)
        if tuple(tokens[n_before:]) == tail:
            return n_before
    head = vocab.tokenize(text[:place], add_special=add_special, check=lambda _: check_cancelled())
    return shared_length(list(head), list(tokens))
