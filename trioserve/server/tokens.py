"""Work on text: from text to token ids and back, and where that work is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import trio

from trioserve.engine.backend import Vocab
from trioserve.errors import InvalidRequestError, ServerClosingError
from trioserve.server.admission import Admission
from trioserve.types import Prompt, TokenId

_T = TypeVar("_T")

#: Work on text up to this length (characters) is done on the event loop: it takes about 1 ms.
SHORT_TEXT = 4096

#: Text, or token ids with text between them.
PromptLike: TypeAlias = str | Sequence[TokenId | str] | Prompt


class Tokenizer:
    """Tokenizes on the event loop what is short, and in a thread what is long."""

    def __init__(self, vocab: Vocab, admission: Admission) -> None:
        self._vocab = vocab
        self._admission = admission
        self._worker = trio.CapacityLimiter(1)

    async def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> tuple[TokenId, ...]:
        """See `Server.tokenize`."""
        self._admission.check_open()
        work = partial(
            self._vocab.tokenize, text, add_special=add_special, parse_special=parse_special
        )
        return await self.run(work, len(text))

    async def prompt_of(
        self, prompt: PromptLike, *, add_special: bool = True, parse_special: bool = True
    ) -> Prompt:
        """Tokenize a prompt. Special tokens are added where it begins with text.

        Ids in it stay, and are not checked: the engine looks at those of a task.
        """
        if isinstance(prompt, Prompt):
            return prompt
        parts = (prompt,) if isinstance(prompt, str) else prompt
        if str not in map(type, parts):
            return Prompt(cast(Sequence[TokenId], parts))
        tokens: list[TokenId] = []
        for i, part in enumerate(parts):
            if isinstance(part, str):
                special = add_special and i == 0
                tokens += await self.tokenize(
                    part, add_special=special, parse_special=parse_special
                )
            else:
                tokens.append(part)
        return Prompt(tokens)

    def detokenize(self, tokens: Sequence[TokenId]) -> str:
        """See `Server.detokenize`. While draining too: running requests write their last event."""
        if self._admission.closed:
            raise ServerClosingError
        Prompt(tokens).check(self._vocab.n_tokens, "tokens")
        return self._vocab.detokenize(tokens).decode("utf-8", "replace")

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
        found: list[Any] = []
        for pair in biases:
            match pair:
                case (str(text), bias):
                    ids = await self.tokenize(text, add_special=False, parse_special=False)
                    found += ((each, bias) for each in ids)
                    continue
                case (int(token), _):
                    self.check_token(token, "logit_bias")
            found.append(pair)
        return tuple(found)

    def check_token(self, token: TokenId, param: str) -> None:
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

    async def run(self, work: Callable[[], _T], n_chars: int) -> _T:
        """Do short work here and long work in a thread; either way a checkpoint."""
        if n_chars <= SHORT_TEXT:
            await trio.lowlevel.checkpoint()
            self._admission.check_open()
            return work()
        return await self.run_in_thread(work)

    async def run_in_thread(self, work: Callable[[], _T]) -> _T:
        """Do work in the one thread that there is for it."""
        return await trio.to_thread.run_sync(work, limiter=self._worker)

    async def wait_idle(self) -> None:
        """Wait until no thread is in the vocabulary any more."""
        async with self._worker:
            pass
