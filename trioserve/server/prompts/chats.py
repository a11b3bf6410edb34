"""The prompts of chats: rendered, tokenized, and marked where checkpoints are useful."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from trioserve.chat.markers import MarkedMessages, mark, media_marker
from trioserve.chat.messages import Messages as ParsedMessages, documents_in, parse_messages
from trioserve.chat.params import ChatParams
from trioserve.chat.template.budget import Limits, OutOfTimeError
from trioserve.chat.template.continuation import find_divergence_points, render_continued
from trioserve.chat.template.render import ChatTemplate
from trioserve.engine.backend import Vocab
from trioserve.server.concurrency import SMALL, Stop, Workers
from trioserve.server.limits.memory import MemoryReservation
from trioserve.server.model import LoadedModel
from trioserve.server.prompts.media import MediaPrompts, check_kinds
from trioserve.server.prompts.tokens import Tokenizer
from trioserve.types import Prompt, TokenId
from trioserve.types.task import shared_length

#: What a render may take on the event loop.
_QUICK = Limits(seconds=0.004, hurried=True)

Messages: TypeAlias = Sequence[Mapping[str, Any]]


class ChatPrompts:
    """Renders chats with the model's template, and makes prompts of them.

    Args:
        model: has the template.
        tokenizer: turns text into tokens.
        workers: do what takes long.
        media: makes prompts that are more than text.
    """

    def __init__(
        self, model: LoadedModel, tokenizer: Tokenizer, workers: Workers, media: MediaPrompts
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._workers = workers
        self.media = media
        self._quick = model.template.with_limits(_QUICK)
        self._is_slow = False  # the last render was

    async def parse(self, messages: Messages) -> ParsedMessages:
        """Check messages. Raises InvalidRequestError: one is malformed."""
        if isinstance(messages, ParsedMessages):
            return messages
        return await self._workers.offload(lambda _: parse_messages(messages), n_chars(messages))

    async def mark(
        self, messages: ParsedMessages, hold: MemoryReservation, *, marker: str | None = None
    ) -> MarkedMessages:
        """Read documents, and put markers in the place of media.

        Args:
            messages: in normal form.
            hold: counts what the images of documents take.
            marker: see `markers.mark`.

        Raises:
            InvalidMediaError: a document cannot be read.
            UnsupportedFieldError: the model does not take one of the media.
            TrioServeError: from reading documents.
        """
        if any(map(documents_in, messages)):
            messages = await self.media.read_documents(messages, hold)
        marked = await self._workers.offload(lambda _: mark(messages, marker), n_chars(messages))
        if marked.media:
            check_kinds(self._model.modalities, marked.media.values())
        return marked

    async def load(self, messages: Messages, hold: MemoryReservation) -> ParsedMessages:
        """Check messages, and load their media, for a chat that becomes several prompts.

        Raises:
            TrioServeError: as `parse` and `mark`, and from loading.
        """
        return await self.media.load_once(await self.parse(messages), hold)

    async def render(self, messages: Messages, chat: ChatParams) -> str:
        """Render messages whose media are marked."""
        cost = n_chars([messages, chat.tools, chat.template_kwargs])
        if cost <= SMALL and not self._is_slow:
            try:
                return await self._workers.offload(
                    lambda _: self._render(self._quick, messages, chat), cost
                )
            except OutOfTimeError:
                pass  # all is done again, where it may take its time
        return await self._workers.offload(lambda _: self._render_slowly(messages, chat))

    def _render_slowly(self, messages: Messages, chat: ChatParams) -> str:
        began = time.thread_time()
        try:
            return self._render(self._model.template, messages, chat)
        finally:
            self._is_slow = time.thread_time() - began > _QUICK.seconds

    def _render(self, template: ChatTemplate, messages: Messages, chat: ChatParams) -> str:
        variables = {**self._model.template_variables, **chat.template_kwargs}
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

    async def count_tokens(self, messages: Messages, chat: ChatParams) -> int:
        """See `Server.count_tokens`."""
        with self.media.memory.hold() as hold:
            marked = await self.mark(await self.parse(messages), hold)
            text = await self.render(marked.messages, chat)
            return len(await self._without_hints(text, marked, hold, fits=False, aside=True))

    async def _without_hints(
        self,
        text: str,
        marked: MarkedMessages,
        hold: MemoryReservation,
        *,
        fits: bool,
        aside: bool = False,
    ) -> Prompt:
        add_special = self._adds_special(text)
        if not marked.media:
            return await self._tokenizer.prompt_of(
                text, add_special=add_special, fits=fits, aside=aside
            )
        parts = await self._workers.offload(lambda _: marked.split(text), len(text))
        return await self.media.prompt_of(
            parts, hold, add_special=add_special, fits=fits, aside=aside
        )

    def _adds_special(self, text: str) -> bool:
        """Whether the tokenizer has to add BOS: most templates write it themselves."""
        bos = self._model.info.bos_token
        return not (bos and text.startswith(bos))

    async def prompt_of(
        self, text: str, marked: MarkedMessages, chat: ChatParams, hold: MemoryReservation
    ) -> Prompt:
        """Make a prompt of a rendered chat, with hints where a checkpoint is useful.

        Args:
            text: what the messages were rendered to.
            marked: the messages.
            chat: what they were rendered with.
            hold: counts what media take; it outlasts the prompt.
        """
        prompt = await self._without_hints(text, marked, hold, fits=True)
        if not self._model.keeps_checkpoints:
            return prompt
        find = partial(self._hints, text, prompt, marked, chat)
        hints = await self._workers.offload(find)
        return Prompt(prompt.tokens, media=prompt.media, divergence_points=hints)

    def _hints(
        self, text: str, prompt: Prompt, marked: MarkedMessages, chat: ChatParams, stop: Stop
    ) -> tuple[int, ...]:
        messages = marked.messages
        n_given = len(messages) - (chat.continue_final_message is not None)
        partings = find_divergence_points(
            self._model.template,
            text,
            messages[:n_given],
            tools=chat.tools,
            kwargs={**self._model.template_variables, **chat.template_kwargs},
        )
        return hints_of(
            self._model.vocab,
            marked.pieces(text),
            prompt,
            partings,
            stop,
            add_special=self._adds_special(text),
        )


def n_chars(value: Any) -> int:
    """Add up the text in a JSON value; stops counting when it is no longer short."""
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
        total += 8  # whatever it is, it takes some time to render
    return total


#: A header of a message has so many tokens at most: ``<|im_start|>user\n`` has three.
_HEADER = 6


def hints_of(
    vocab: Vocab,
    pieces: Sequence[str],
    prompt: Prompt,
    partings: Iterable[int],
    stop: Stop,
    *,
    add_special: bool,
) -> tuple[int, ...]:
    """Find out how many cells of a prompt come before some of the characters of its text.

    Where one of them stands after the header of a message, the header does not count: its last
    token may become one with what follows. Behind the last media, another question may be asked.

    Args:
        vocab: turns text into tokens.
        pieces: the text: each second piece stands for media.
        prompt: what was made of it.
        partings: the characters, counted through all pieces.
        stop: says whether nobody waits for this any more.
        add_special: whether the prompt begins with a special token that the text does not have.

    Raises:
        AbandonedError: `stop` said so.
    """
    if len(pieces) == 1:
        return _hints_of(vocab, pieces[0], prompt.tokens, partings, stop, add_special=add_special)
    hints = {n_before + last.n_cells for n_before, last in prompt.spans[-1:]}
    n_chars = n_tokens = 0
    for place, piece in enumerate(pieces):
        begin, n_chars = n_chars, n_chars + len(piece)
        inside = [parting - begin for parting in partings if begin < parting <= n_chars]
        if place % 2 or not piece:
            continue
        special = add_special and place == 0
        tokens = vocab.tokenize(piece, add_special=special, stop=lambda _: stop())
        start = _find(tokens, prompt.tokens, n_tokens)
        if start is None:
            continue  # a projector has changed the text; a checkpoint less does no harm
        n_tokens = start + len(tokens)
        found = _hints_of(vocab, piece, tokens, inside, stop, add_special=special)
        n_media = sum(chunk.n_cells for n_before, chunk in prompt.media if n_before <= start)
        hints.update(n_media + start + hint for hint in found)
    return tuple(sorted(hints))


def _find(tokens: Sequence[TokenId], within: Sequence[TokenId], start: int) -> int | None:
    """Find tokens in others: around media, projectors write tokens of their own."""
    first, n_tokens = tokens[:1], len(tokens)
    for place in range(start, len(within) - n_tokens + 1):
        if first == within[place : place + 1] and tokens == within[place : place + n_tokens]:
            return place
    return None


def _hints_of(
    vocab: Vocab,
    text: str,
    tokens: Sequence[TokenId],
    partings: Iterable[int],
    stop: Stop,
    *,
    add_special: bool,
) -> tuple[int, ...]:
    """Find out how many tokens of a text come before some of its characters."""
    hints = set()
    for parting in partings:
        n_before = _count(vocab, text, tokens, parting, stop, add_special=add_special)
        header = tokens[max(0, n_before - _HEADER) : n_before]
        after_control = [i for i, token in enumerate(header, 1) if not vocab.pieces[token]]
        hints.add(n_before - (len(header) - after_control[-1] if after_control else 0))
    return tuple(sorted(hints))


def _count(
    vocab: Vocab,
    text: str,
    tokens: Sequence[TokenId],
    parting: int,
    stop: Stop,
    *,
    add_special: bool,
) -> int:
    """Count the tokens before a character; tokenizes the shorter part, if that says it."""
    if parting * 2 > len(text):
        tail = vocab.tokenize(text[parting:], stop=lambda _: stop())
        n_before = len(tokens) - len(tail)
        if tuple(tokens[n_before:]) == tail:
            return n_before
    head = vocab.tokenize(text[:parting], add_special=add_special, stop=lambda _: stop())
    return shared_length(list(head), list(tokens))
