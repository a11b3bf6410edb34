"""Runs tools on the server for chats and responses."""

from __future__ import annotations

from itertools import chain

import attrs
from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base import errors, readers, sse
from trioserve.api.base.answers import Success
from trioserve.api.base.app_state import NOT_RUNNING, Running
from trioserve.api.base.body import read_body_as
from trioserve.api.base.chat_request import RUN_TOOLS, ChatRequest
from trioserve.api.base.connection import current_request
from trioserve.api.base.fields import (
    RequestBody,
    field,
)
from trioserve.api.base.generation import pings_of, tools_to_run
from trioserve.api.base.http import json_response
from trioserve.api.base.service import current_responses
from trioserve.api.openapi import gives, takes
from trioserve.errors import InvalidRequestError, NotFoundError
from trioserve.server import RequestContext
from trioserve.server.dispatch import Mailbox, size_of
from trioserve.server.runs.events import RunAnswer, RunEvent, StepChunk, StepStarted
from trioserve.server.runs.params import RunParams
from trioserve.server.runs.run import AgentRun
from trioserve.server.server import Server
from trioserve.server.stream import ChatChunk, ChatCompletion, ChatStream
from trioserve.types import GenerationParams


async def open_run(
    server: Server, request: ChatRequest, params: GenerationParams, context: RequestContext
) -> AgentRun:
    """Start the run that a request asks for. It ends no later than the current request.

    Raises:
        InvalidRequestError: the server has no such tools, or does not allow an option of the run;
            `param` names the field.
        TrioServeError: the model cannot answer.
    """
    asked = request.run_tools
    assert asked is not None
    tools, max_steps = await tools_to_run(server, asked), asked.max_steps
    if max_steps is not None and max_steps > server.config.tool_max_steps:
        raise InvalidRequestError.at(
            f"{RUN_TOOLS}.max_steps",
            f"must be at most {server.config.tool_max_steps}, which --tool-max-steps sets.",
        )
    run = RunParams(
        max_steps=max_steps,
        # Without a stream, the client cannot see that a call waits.
        approve=asked.approval or ("ask" if request.stream else "none"),
        cwd=asked.cwd or None,
        runtime=asked.runtime or None,
    )
    try:
        server.tools.check(run.place)
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, param=f"{RUN_TOOLS}.{error.param}") from None
    opened = server.stream_run(
        request.messages, tools, params=params, chat=request.chat_params, run=run, context=context
    )
    return await current_request().resources.enter_async_context(opened)


async def respond_run(
    server: Server,
    request: ChatRequest,
    run: AgentRun,
    writer: sse.EventWriter[RunEvent],
    id_: str,
    on_error: sse.OnError = errors.last_event,
) -> Response:
    """Make the response that streams a run, which other requests can reach by its id."""
    current = current_request()
    streams: list[ChatStream] = []  # that of the step
    mailboxes: list[Mailbox] = []

    def follow(stream: ChatStream) -> None:
        streams[:], mailboxes[:] = [stream], [stream.mailbox]

    run.watch(follow)
    running = Running(streams, current.api_key, request.reasoning_control, run)
    current.resources.enter_context(current_responses().running(id_, running))
    return await sse.respond(
        current,
        sse.EventSource.of(run.__anext__),
        writer,
        pings_of(server, request, mailboxes),
        on_error,
    )


async def read_run(run: AgentRun) -> tuple[RunAnswer, ChatCompletion]:
    """Read a run to the end: what it has come to, and the last answer with the timings of all.

    Raises:
        TrioServeError: the model fails, or what is kept of its answer takes too much memory.
    """
    held, chunks = current_request().held, list[ChatChunk]()
    before = held.n_bytes
    run.watch(_hurry)
    async for event in run:
        if isinstance(event, StepStarted):
            chunks.clear()
            held.shrink_to(before)
        elif isinstance(event, StepChunk) and isinstance(event.chunk, ChatChunk):
            held.grow(2 * size_of(event.chunk.probs))  # as a value, and as JSON
            chunks.append(event.chunk)
    assert run.answer is not None
    answer = run.answer
    return answer, ChatCompletion(
        message=answer.message,
        tokens=tuple(chain.from_iterable(chunk.tokens for chunk in chunks)),
        probs=tuple(chain.from_iterable(chunk.probs for chunk in chunks)),
        prompt=answer.prompt,
        prompt_text="",
        finished=attrs.evolve(answer.finished, timings=answer.timings),
        chunks=tuple(chunks),
    )


def _hurry(stream: ChatStream) -> None:
    """Request output as soon as it is available."""
    stream.stream.is_paced = False


# -- routes


blueprint = Blueprint("runs", __name__)


@attrs.frozen(kw_only=True)
class ApproveRequest(RequestBody):
    """``POST …/{id}/approve``."""

    call_id: str = field(read=readers.name)
    approve: bool
    reason: str = ""


@attrs.frozen(kw_only=True)
class StopRequest(RequestBody):
    """``POST …/{id}/stop``."""

    call_id: str = field(read=readers.name)


@blueprint.post("/v1/chat/completions/<id_>/approve")
@blueprint.post("/v1/responses/<id_>/approve")
@takes(ApproveRequest)
@gives(Success)
async def approve(id_: str) -> Response:
    """Approve or deny a call that waits for approval. The model gets the `reason`."""
    asked = await read_body_as(ApproveRequest.parse)
    run = _find(id_)
    if asked.approve:
        run.approve(asked.call_id)
    else:
        run.deny(asked.call_id, asked.reason)
    return json_response({"success": True})


@blueprint.post("/v1/chat/completions/<id_>/stop")
@blueprint.post("/v1/responses/<id_>/stop")
@takes(StopRequest)
@gives(Success)
async def stop(id_: str) -> Response:
    """Stop a call that waits or runs. Its result tells the model that a person stopped it."""
    asked = await read_body_as(StopRequest.parse)
    _find(id_).stop(asked.call_id)
    return json_response({"success": True})


def _find(id_: str) -> AgentRun:
    """Find the run of an answer. Raises NotFoundError if none exists, or another client owns it."""
    response = current_responses().find(id_, current_request().api_key)
    if response is None or response.run is None:
        raise NotFoundError(NOT_RUNNING, param="id")
    return response.run
