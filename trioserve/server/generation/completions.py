"""Prompts that are continued, each any number of times."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

import attrs
import trio

from trioserve.engine import Engine
from trioserve.engine.backend import Vocab
from trioserve.errors import DeadlineExceededError, InvalidRequestError
from trioserve.server.concurrency import all_of
from trioserve.server.context import RequestContext
from trioserve.server.generation.requests import Requests
from trioserve.server.limits.cache_sharing import CacheSharing
from trioserve.server.limits.memory import Hold
from trioserve.server.model import AdapterScales
from trioserve.server.prompts.media import AnyPrompt, MediaPrompts, MixedPrompt
from trioserve.server.prompts.tokens import PromptLog, Tokenizer
from trioserve.server.stream import Completion, Stream
from trioserve.types import (
    Constraint,
    GenerationParams,
    Grammar,
    Prompt,
    Task,
    ThinkingBudget,
    TokenId,
)

_T = TypeVar("_T")

#: Stands for a seed that is drawn anew for each output, as -1 does.
RANDOM_SEED = 2**32 - 1


def check_copies(n: int, n_slots: int, *, param: str = "n") -> None:
    """Refuse more outputs of a prompt than can run at the same time.

    Raises:
        InvalidRequestError: there are fewer slots.
    """
    if n > n_slots:
        raise InvalidRequestError(
            f"'{param}' must be between 1 and {n_slots}, the number of slots.", param=param
        )


def copies_of(params: GenerationParams, n: int) -> list[GenerationParams]:
    """Make the parameters of `n` outputs of one prompt: a seed counts up, as in llama-server.

    Only the first may have a slot of its choice.
    """
    seed = params.sampling.seed
    copies = [params]
    for i in range(1, n):
        sampling = params.sampling
        if seed not in (-1, RANDOM_SEED):
            sampling = attrs.evolve(sampling, seed=(seed + i) % 2**32)
        copies.append(attrs.evolve(params, sampling=sampling, id_slot=-1))
    return copies


def best_of(outputs: Sequence[Completion], n_copies: int, n: int) -> list[Completion]:
    """Keep, of the outputs of each prompt, the `n` whose tokens are most probable on average.

    Those of one prompt stand together, `n_copies` of them. They need `n_probs`.
    """
    if n_copies == n:
        return list(outputs)
    best = []
    for start in range(0, len(outputs), n_copies):
        best += sorted(outputs[start : start + n_copies], key=_mean_logprob, reverse=True)[:n]
    return best


def _mean_logprob(output: Completion) -> float:
    logprobs = [each.chosen.logprob for each in output.probs]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf


#: Seconds that a grammar may take to compile, the wait for those before it included.
_COMPILE_TIMEOUT = 10.0


def control_tokens(vocab: Vocab) -> frozenset[TokenId]:
    """Find the tokens that have a name, and stand for no text."""
    pairs = zip(vocab.pieces, vocab.names, strict=True)
    return frozenset(token for token, (piece, name) in enumerate(pairs) if name and not piece)


class Completions:
    """Continues prompts with an engine.

    Args:
        engine: makes the text.
        requests: where a request is opened.
        tokenizer: turns prompts into tokens.
        media: makes prompts that are more than text.
        adapters: the LoRA adapters.
        sharing: says who may share what is computed.
        special: whether the names of all control tokens are a part of the text.
        prompt_log: gets all prompts.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Requests,
        tokenizer: Tokenizer,
        media: MediaPrompts,
        adapters: AdapterScales,
        sharing: CacheSharing,
        *,
        special: bool = False,
        prompt_log: PromptLog | None = None,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._tokenizer = tokenizer
        self._media = media
        self._adapters = adapters
        self._sharing = sharing
        self._prompt_log = prompt_log
        self._shown = control_tokens(engine.vocab) if special else frozenset()
        self._compiler = trio.CapacityLimiter(4)  # one that is tried out holds up no other

    @asynccontextmanager
    async def stream(
        self,
        prompts: Sequence[AnyPrompt],
        params: GenerationParams,
        context: RequestContext,
        *,
        n: int = 1,
    ) -> AsyncIterator[list[Stream]]:
        """Continue each prompt `n` times, all at the same time. Otherwise like `Server.stream`.

        The outputs of one prompt stand together, in the order of their seeds.
        """
        check_copies(n, self._engine.n_slots)
        context.check_time()
        async with AsyncExitStack() as stack:
            hold = stack.enter_context(self._media.hold(context.client))
            made = [await self._prompt_of(prompt, context, hold) for prompt in prompts]
            yield [
                await stack.enter_async_context(self.open(each, copy, context))
                for each in made
                for copy in copies_of(params, n)
            ]

    async def _prompt_of(self, prompt: AnyPrompt, context: RequestContext, hold: Hold) -> Prompt:
        if not isinstance(prompt, MixedPrompt):
            return await self._tokenizer.prompt_of(prompt, fits=True)
        self.check_room(context)
        return await self._media.prompt_of(
            prompt.parts, hold, add_special=True, deadline=context.deadline
        )

    def check_room(self, context: RequestContext) -> None:
        """Look whether a request can be let in, before the work on its prompt.

        Raises:
            QueueFullError: too many requests wait already.
            ServerClosingError: the server drains, or is closed.
        """
        admission = self._requests.admission
        admission.check_open()
        admission.check(0, context.client)

    async def complete(
        self,
        prompts: Sequence[AnyPrompt],
        params: GenerationParams,
        context: RequestContext,
        *,
        n: int = 1,
    ) -> list[Completion]:
        """Continue each prompt `n` times, and return all at the end. `best_of` chooses from them.

        Raises:
            TrioServeError: one of them failed; the others are cancelled.
        """
        async with self.stream(prompts, params, context, n=n) as streams:
            return await all_of([stream.read for stream in streams])

    @asynccontextmanager
    async def open(
        self,
        prompt: Prompt,
        params: GenerationParams,
        context: RequestContext,
        *,
        preserved_tokens: frozenset[TokenId] = frozenset(),
        budget: ThinkingBudget | None = None,
        operation: str = "text_completion",
    ) -> AsyncIterator[Stream]:
        """Run one task.

        Args:
            prompt: what is continued.
            params: how.
            context: who asks, and until when.
            preserved_tokens: control tokens whose names are a part of the output's text.
            budget: ends reasoning that takes too long.
            operation: what observers are told that it is.
        """
        adapters = self._adapters.choose(params.lora)
        root = self._sharing.root(adapters, context.client, params.cache_salt)
        constraint = None
        if params.grammar is not None:
            self._requests.admission.check(len(prompt), context.client)  # not to work for nothing
            constraint = await self._compile(params.grammar, root.owner, context.deadline)
        task = Task(
            self._requests.new_id(),
            prompt,
            params,
            context.client,
            self._requests.weight_of(context.client),
            constraint,
            preserved_tokens=preserved_tokens | self._shown,
            special=bool(self._shown),
            budget=budget,
            root=root,
        )
        if self._prompt_log is not None:
            await self._prompt_log.write(task.id, prompt)
        with self._requests.open(task, context, operation) as stream:
            yield stream

    async def _compile(self, grammar: Grammar, owner: str, deadline: float) -> Constraint:
        """Compile a grammar in a thread. When cancelled, the thread goes on by itself.

        Raises:
            InvalidRequestError: the grammar cannot be used, or takes too long.
            DeadlineExceededError: the deadline of the request passes.
        """
        self._requests.admission.check_open()
        until = min(deadline, trio.current_time() + _COMPILE_TIMEOUT)
        with trio.move_on_at(until):
            return await trio.to_thread.run_sync(
                self._engine.compile,
                grammar,
                owner,
                limiter=self._compiler,
                abandon_on_cancel=True,
            )
        if deadline <= until:
            raise DeadlineExceededError("The request's deadline has passed.")
        raise InvalidRequestError(
            f"'{grammar.param}' was not compiled within {_COMPILE_TIMEOUT:g} seconds.",
            param=grammar.param,
        )

    async def wait_idle(self) -> None:
        """Wait until no grammar is being compiled any more."""
        threads = [object() for _ in range(int(self._compiler.total_tokens))]
        for thread in threads:
            await self._compiler.acquire_on_behalf_of(thread)
        for thread in threads:
            self._compiler.release_on_behalf_of(thread)
