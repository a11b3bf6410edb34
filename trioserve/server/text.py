"""`Texts`: prompts that are continued."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from trioserve.errors import DeadlineExceededError, InvalidRequestError
from trioserve.server.core import Core
from trioserve.server.stream import Completion, Stream
from trioserve.types import (
    CancelReason,
    Chunk,
    Constraint,
    GenerationParams,
    Grammar,
    Prompt,
    SamplingParams,
    Task,
    ThinkingBudget,
    TokenId,
    TokenProbs,
)

#: Seconds that a grammar may take to compile, the wait for those before it included.
_COMPILE_TIMEOUT = 10.0

_OPTION_NAMES = frozenset(attrs.fields_dict(GenerationParams)) - {"sampling"}
_SAMPLING_NAMES = frozenset(attrs.fields_dict(SamplingParams))


class Texts(Core):
    """Continues prompts."""

    def options(
        self, settings: Mapping[str, Any], base: GenerationParams | None = None
    ) -> GenerationParams:
        """Make parameters from fields of `GenerationParams` and `SamplingParams`, by name.

        What is not set is as in `base`, or as the server's configuration says.

        Raises:
            InvalidRequestError: a setting is unknown, has the wrong type or is out of range.
        """
        base = base or self._defaults
        if not settings:
            return base
        for name in settings:
            if name not in _OPTION_NAMES and name not in _SAMPLING_NAMES:
                raise InvalidRequestError(f"'{name}' is not an option.", param=name)
        sampling = {name: value for name, value in settings.items() if name in _SAMPLING_NAMES}
        others = {name: value for name, value in settings.items() if name in _OPTION_NAMES}
        return attrs.evolve(base, sampling=attrs.evolve(base.sampling, **sampling), **others)

    @asynccontextmanager
    async def stream(
        self,
        prompt: str | Sequence[TokenId] | Prompt,
        options: GenerationParams | None = None,
        *,
        preserved_tokens: frozenset[TokenId] = frozenset(),
        budget: ThinkingBudget | None = None,
        on_cancel: CancelReason = CancelReason.CALLER,
        timeout: float | None = None,
        client: str = "",
        **settings: Any,
    ) -> AsyncIterator[Stream]:
        """Continue a prompt, token by token: ``async with server.stream("Once") as events:``.

        Leaving the block before the end, for whatever reason, cancels the request: its slot is
        free within a tick.

        Args:
            prompt: text, or token ids.
            options: how to continue; `settings` change single fields by name.
            preserved_tokens: control tokens whose names are a part of the output's text.
            budget: ends reasoning that takes too long.
            on_cancel: what the log gives as the reason when the block is cancelled.
            timeout: seconds from now after which the request is cancelled, wherever it is.
            client: whose request it is. In the queue, clients take turns.

        Raises:
            InvalidRequestError: the prompt or an option is wrong.
            QueueFullError: too many requests wait already.
            DeadlineExceededError: from the iteration, when `timeout` has passed.
            ServerClosingError: the server drains, or is closed.
        """
        self.check_generates()
        deadline = math.inf if timeout is None else trio.current_time() + timeout
        options = self.options(settings, options)
        tokens = await self.tokenize(prompt) if isinstance(prompt, str) else prompt
        prompt = tokens if isinstance(tokens, Prompt) else Prompt(tokens)
        weight = self._weights.get(client, 1.0)
        constraint = None
        if options.grammar is not None:
            self._admission.check(len(prompt))  # before work that may be for nothing
            constraint = await self._compile(options.grammar, deadline)
        task = Task(
            next(self._ids),
            prompt,
            options,
            client,
            weight,
            constraint,
            preserved_tokens=preserved_tokens,
            budget=budget,
            adapters=self.lora.choose(options.lora),
        )
        with self._request(task, on_cancel, deadline) as stream:
            yield stream

    async def _compile(self, grammar: Grammar, deadline: float) -> Constraint:
        """Compile a grammar in a thread. When cancelled, the thread goes on by itself.

        Raises:
            InvalidRequestError: the grammar cannot be used, or takes too long.
            DeadlineExceededError: the deadline of the request passes.
        """
        self._check_open()
        until = min(deadline, trio.current_time() + _COMPILE_TIMEOUT)
        with trio.move_on_at(until):
            return await trio.to_thread.run_sync(
                self._engine.compile,
                grammar,
                limiter=self._compiler,
                abandon_on_cancel=True,
            )
        if deadline <= until:
            raise DeadlineExceededError("The request's deadline has passed.")
        raise InvalidRequestError(
            f"'{grammar.param}' was not compiled within {_COMPILE_TIMEOUT:g} seconds.",
            param=grammar.param,
        )

    async def complete(
        self,
        prompt: str | Sequence[TokenId] | Prompt,
        options: GenerationParams | None = None,
        **settings: Any,
    ) -> Completion:
        """Continue a prompt, and return all of it at the end. Arguments are those of `stream`.

        Raises:
            TrioServeError: as `stream`, and when the request fails.
        """
        texts: list[str] = []
        tokens: list[TokenId] = []
        probs: list[TokenProbs] = []
        async with self.stream(prompt, options, **settings) as stream:
            async for event in stream:
                if isinstance(event, Chunk):
                    texts.append(event.text)
                    tokens += event.tokens
                    probs += event.probs
        assert stream.finished is not None
        return Completion(
            text="".join(texts),
            tokens=tuple(tokens),
            probs=tuple(probs),
            prompt=stream.prompt,
            finished=stream.finished,
        )
