"""Requests with more than one prompt: all run at the same time, each as a task of its own."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from trioserve.api.connection import Request
from trioserve.api.generation import tokens_for
from trioserve.api.terms import Terms
from trioserve.api.values import Prompt
from trioserve.errors import TrioServeError
from trioserve.server import Server
from trioserve.stream import Completion, Stream
from trioserve.types import Options, TokenId

_PARAM = "prompt"


async def _tokenize(server: Server, prompts: Sequence[Prompt]) -> list[tuple[TokenId, ...]]:
    return [await tokens_for(server, prompt, param=_PARAM) for prompt in prompts]


async def open_all(
    request: Request, server: Server, prompts: Sequence[Prompt], options: Options, terms: Terms
) -> list[Stream]:
    """Start to continue all prompts. They end with the request, at the latest.

    Raises:
        TrioServeError: one of them cannot run.
    """
    streams = []
    for tokens in await _tokenize(server, prompts):
        stream = await request.resources.enter_async_context(
            server.stream(tokens, options, **terms.arguments())
        )
        stream.mailbox.on_stalled = request.abort
        streams.append(stream)
    return streams


async def complete_all(
    server: Server, prompts: Sequence[Prompt], options: Options, terms: Terms
) -> list[Completion]:
    """Continue all prompts to their end.

    Raises:
        TrioServeError: one of them failed; the others are cancelled.
    """
    done: dict[int, Completion] = {}
    failures: list[TrioServeError] = []

    async def complete(index: int, tokens: tuple[TokenId, ...]) -> None:
        try:
            done[index] = await server.complete(tokens, options, **terms.arguments())
        except TrioServeError as error:
            failures.append(error)  # raised below, outside of the nursery's group
            nursery.cancel_scope.cancel()

    tokenized = await _tokenize(server, prompts)
    async with trio.open_nursery() as nursery:
        for index, tokens in enumerate(tokenized):
            nursery.start_soon(complete, index, tokens)
    if failures:
        raise failures[0]
    return [done[index] for index in range(len(prompts))]
