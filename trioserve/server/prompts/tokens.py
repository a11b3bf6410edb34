"""Text becomes token ids, and token ids become text; `PromptLog` writes prompts to files."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import structlog
import trio

from trioserve.engine.backend import Vocab
from trioserve.errors import (
    ConfigError,
    ContextLengthExceededError,
    InvalidRequestError,
    ServerClosingError,
)
from trioserve.server.concurrency import SMALL, Stop, Workers
from trioserve.server.limits.admission import Admission
from trioserve.types import Prompt, TokenId

_log = structlog.stdlib.get_logger("trioserve")


def text_of(vocab: Vocab, prompt: Prompt) -> bytes:
    """Write a prompt as text, with ``[image]``, ``[audio]`` or ``[video]`` for each chunk."""
    written, n_tokens = b"", 0
    for n_before, chunk in prompt.media:
        written += vocab.detokenize(prompt.tokens[n_tokens:n_before])
        written += f"[{chunk.kind}]".encode()
        n_tokens = n_before
    return written + vocab.detokenize(prompt.tokens[n_tokens:])


class PromptLog:
    """Writes each prompt to a file of its own, named by the time and the number of the request.

    Args:
        directory: where to; it is made if it is not there.
        vocab: turns tokens into text.

    Raises:
        ConfigError: the directory cannot be made.
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
        """Write a prompt. When that fails, the log says so, and the request goes on."""
        path = self._directory / f"{time.time_ns() // 1_000_000:012}-{task_id}.txt"

        def write_file() -> None:
            path.write_bytes(text_of(self._vocab, prompt))

        try:
            await trio.to_thread.run_sync(write_file)
        except OSError as error:
            _log.error("a prompt could not be written", file=str(path), error=error.strerror)


#: Text, or token ids with text between them.
PromptLike: TypeAlias = str | Sequence[TokenId | str] | Prompt


def tokens_of(
    vocab: Vocab,
    parts: Sequence[TokenId | str],
    stop: Stop,
    *,
    add_special: bool = True,
    parse_special: bool = True,
    is_fragment: bool = False,
    limit: int | None = None,
) -> Prompt:
    """Tokenize what is text among the parts of a prompt. It may take long.

    Raises:
        ContextLengthExceededError: there are more than `limit` tokens, or many more: that is looked
            at now and then.
        AbandonedError: `stop` said so.
    """
    if not any(isinstance(part, str) for part in parts):
        return Prompt(cast(Sequence[TokenId], parts))
    tokens: list[TokenId] = []

    def enough(n_more: int) -> bool:
        n_tokens = len(tokens) + n_more
        if limit is not None and n_tokens > limit:
            raise ContextLengthExceededError(n_tokens, limit, at_least=True)
        return stop()

    for i, part in enumerate(parts):
        if not isinstance(part, str):
            tokens.append(part)
            continue

        tokens += vocab.tokenize(
            part,
            add_special=add_special and i == 0,
            parse_special=parse_special,
            is_fragment=is_fragment,
            stop=enough,
        )
    return Prompt(tokens)


class Tokenizer:
    """Tokenizes on the event loop what is short, and in a thread what is long.

    What is to fit into a context is refused before it is tokenized when it is far too long: a token
    stands for `Vocab.max_token_bytes` at most. Otherwise it is refused as soon as there are too
    many tokens.

    Args:
        vocab: of the model.
        admission: says whether the server is open.
        workers: the threads.
        n_ctx: tokens that the context of a request holds.
    """

    def __init__(self, vocab: Vocab, admission: Admission, workers: Workers, n_ctx: int) -> None:
        self._vocab = vocab
        self._admission = admission
        self._workers = workers
        self._n_ctx = n_ctx

    @property
    def max_chars(self) -> int:
        """The longest text, in characters, that may fit into the context."""
        return self._n_ctx * self._vocab.max_token_bytes

    async def tokenize(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = True,
        is_fragment: bool = False,
        fits: bool = False,
        aside: bool = False,
    ) -> tuple[TokenId, ...]:
        """Turn text into token ids. Arguments and errors are those of `prompt_of`."""
        prompt = await self.prompt_of(
            text,
            add_special=add_special,
            parse_special=parse_special,
            is_fragment=is_fragment,
            fits=fits,
            aside=aside,
        )
        return prompt.tokens

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
        """Tokenize a prompt. Special tokens are added where it begins with text.

        Ids in it stay, and are not checked: the engine looks at those of a task.

        Args:
            prompt: text or ids.
            add_special: see `Vocab.tokenize`.
            parse_special: likewise.
            is_fragment: likewise.
            fits: whether it has to fit into the context.
            aside: whether no prompt comes of it that somebody continues.

        Raises:
            ContextLengthExceededError: it does not fit.
            InvalidRequestError: the text cannot be tokenized.
            ServerClosingError: the server drains, or is closed.
        """
        self._admission.check_open()
        if isinstance(prompt, Prompt):
            return prompt
        parts = (prompt,) if isinstance(prompt, str) else prompt
        if fits and len(parts) > self._n_ctx:
            raise ContextLengthExceededError(len(parts), self._n_ctx)
        size = len(parts)
        if size <= SMALL:
            n_chars = sum(len(part) for part in parts if isinstance(part, str))
            if fits and n_chars > self.max_chars:
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
        if self._admission.closed:
            raise ServerClosingError
        if not isinstance(tokens, Prompt):
            tokens = Prompt(tokens)
            tokens.check(self._vocab.n_tokens, "tokens")
        return text_of(self._vocab, tokens).decode("utf-8", "replace")

    async def biases_of(self, biases: Any) -> Any:
        """Give each token of a text the bias of the text; biases of ids stay.

        Takes pairs of a token id or text and its bias. What is not such pairs stays as it is.

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

    def _biases_of(self, biases: tuple[Any, ...], stop: Stop) -> tuple[Any, ...]:
        found: list[Any] = []
        for pair in biases:
            match pair:
                case (str(text), bias):
                    ids = self._vocab.tokenize(text, parse_special=False, stop=lambda _: stop())
                    found += ((each, bias) for each in ids)
                    continue
                case (int(token), _):
                    self._check_token(token, "logit_bias")
            found.append(pair)
        return tuple(found)

    def _check_token(self, token: TokenId, param: str) -> None:
        """Check that an id is in the vocabulary.

        Raises:
            InvalidRequestError: it is not; `param` names the field.
        """
        n_tokens = self._vocab.n_tokens
        if not 0 <= token < n_tokens:
            raise InvalidRequestError(
                f"'{param}' has token id {token}; the vocabulary ends at {n_tokens - 1}.",
                param=param,
            )
