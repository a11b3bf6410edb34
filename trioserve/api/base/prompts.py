"""Requests with more than one output: all run at the same time, each as a task of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import attrs
import trio

from trioserve.api.base.connection import Request
from trioserve.api.base.generation import copies_of, tokens_for
from trioserve.api.base.readers import RawPrompt
from trioserve.api.base.terms import Terms
from trioserve.errors import TrioServeError
from trioserve.server import Server
from trioserve.server.stream import Completion, Stream
from trioserve.types import GenerationParams, Prompt

_T = TypeVar("_T")


@attrs.frozen
class Job:
    """What one output continues, and how."""

    prompt: Prompt
    options: GenerationParams


async def jobs_for(
    server: Server, prompts: Sequence[RawPrompt], options: GenerationParams, n_copies: int
) -> list[Job]:
    """Tokenize prompts. Those of one prompt stand together, in the order of their seeds."""
    made = [Prompt(await tokens_for(server, prompt)) for prompt in prompts]
    return [Job(prompt, copy) for prompt in made for copy in copies_of(options, n_copies)]


async def open_all(
    request: Request, server: Server, jobs: Sequence[Job], terms: Terms
) -> list[Stream]:
    """Start all jobs. They end with the request, at the latest.

    Raises:
        TrioServeError: one of them cannot run.
    """
    streams = []
    for job in jobs:
        stream = await request.resources.enter_async_context(
            server.stream(job.prompt, job.options, **terms.arguments())
        )
        request.sends(stream.mailbox)
        streams.append(stream)
    return streams


async def complete_all(server: Server, jobs: Sequence[Job], terms: Terms) -> list[Completion]:
    """Do all jobs to their end.

    Raises:
        TrioServeError: one of them failed; the others are cancelled.
    """
    arguments = terms.arguments()
    return await all_of(
        [partial(server.complete, job.prompt, job.options, **arguments) for job in jobs]
    )


async def all_of(calls: Sequence[Callable[[], Awaitable[_T]]]) -> list[_T]:
    """Make calls at the same time, and return what they return.

    Raises:
        TrioServeError: one of them failed; the others are cancelled.
    """
    done: dict[int, _T] = {}
    failures: list[TrioServeError] = []

    async def make(index: int, call: Callable[[], Awaitable[_T]]) -> None:
        try:
            done[index] = await call()
        except TrioServeError as error:
            failures.append(error)  # raised below, outside of the nursery's group
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for index, call in enumerate(calls):
            nursery.start_soon(make, index, call)
    if failures:
        raise failures[0]
    return [done[index] for index in range(len(calls))]
