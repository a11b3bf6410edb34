"""Runs tools on the server for chats and responses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import attrs

from trioserve.api.base import generation, readers, reply, sse
from trioserve.api.base.answers import Success
from trioserve.api.base.caller import Caller
from trioserve.api.base.chat_request import RUN_TOOLS, ChatRequest, RunToolsOptions
from trioserve.api.base.fields import RequestBody, field
from trioserve.api.base.generation import NOT_RUNNING, tools_to_run
from trioserve.api.base.models import Models
from trioserve.api.base.reply import Reply
from trioserve.api.base.routes import Routes, about_answer
from trioserve.api.openapi import gives, takes
from trioserve.errors import InvalidRequestError, NotFoundError
from trioserve.server import RequestContext
from trioserve.server.dispatch import size_of
from trioserve.server.model_server import ModelServer
from trioserve.server.runs.events import RunAnswer, RunEvent, StepChunk, StepStarted
from trioserve.server.runs.params import RunParams
from trioserve.server.runs.run import AgentRun
from trioserve.server.stream import ChatChunk, ChatCompletion, ChatStream
from trioserve.tools.tool import Tool
from trioserve.types import GenerationParams


async def open_run(
    server: ModelServer,
    request: ChatRequest,
    caller: Caller,
    params: GenerationParams,
    context: RequestContext,
    hosted: Sequence[Tool] = (),
) -> AgentRun:
    """Start the run that a request asks for. It ends no later than the request.

    `hosted` are tools that the server runs in place of the vendor's.

    Raises:
        InvalidRequestError: the server has no such tools, or does not allow an option of the run;
            `param` names the field.
        TrioServeError: the model cannot answer.
    """
    asked = request.run_tools or RunToolsOptions(tools=())
    names = {tool.info.name for tool in hosted}
    asked_for = await tools_to_run(server, asked)
    tools = [*(tool for tool in asked_for if tool.info.name not in names), *hosted]
    max_steps, chat = asked.max_steps, request.chat_params
    if hosted and request.parse_tool_calls:
        chat = attrs.evolve(chat, parse_tools=True)
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
        request.messages, tools, params=params, chat=chat, run=run, context=context
    )
    return await caller.open(opened)


async def run_reply(
    server: ModelServer,
    request: ChatRequest,
    caller: Caller,
    models: Models,
    run: AgentRun,
    writer: sse.EventWriter[RunEvent],
    id_: str,
    on_error: reply.OnError | None = None,
) -> Reply:
    """Answer with the events of a run, which other requests can reach by its id."""
    streams: list[ChatStream] = []  # that of the step
    models.responses.add(id_, request, caller, streams, run)
    return await generation.run_reply(server, request, caller, run, writer, on_error, streams)


async def read_run(run: AgentRun, caller: Caller) -> tuple[RunAnswer, ChatCompletion]:
    """Read a run to the end: what it has come to, and the last answer with the timings of all.

    Raises:
        TrioServeError: the model fails, or what is kept of its answer takes too much memory.
    """
    held, chunks = caller.held, list[ChatChunk]()
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


routes = Routes(of_model=True)


@attrs.frozen(kw_only=True)
class StopRequest(RequestBody):
    """``POST …/{id}/stop``."""

    call_id: str = field(read=readers.name)


@attrs.frozen(kw_only=True)
class ApproveRequest(StopRequest):
    """``POST …/{id}/approve``."""

    approve: bool
    reason: str = ""


@routes.post("/v1/chat/completions/<id_>/approve", "/v1/responses/<id_>/approve")
@about_answer
@takes(ApproveRequest)
@gives(Success)
async def approve(request: ApproveRequest, caller: Caller, models: Models, id_: str) -> Reply:
    """Approve or deny a call that waits for approval. The model gets the `reason` of a denial, and
    a tool that asks something that of an approval.
    """
    run = _find(models, caller, id_)
    if request.approve:
        run.approve(request.call_id, request.reason)
    else:
        run.deny(request.call_id, request.reason)
    return reply.json(Success(True))


@routes.post("/v1/chat/completions/<id_>/stop", "/v1/responses/<id_>/stop")
@about_answer
@takes(StopRequest)
@gives(Success)
async def stop(request: StopRequest, caller: Caller, models: Models, id_: str) -> Reply:
    """Stop a call that waits or runs. Its result tells the model that a person stopped it."""
    _find(models, caller, id_).stop(request.call_id)
    return reply.json(Success(True))


def _find(models: Models, caller: Caller, id_: str) -> AgentRun:
    """Find the run of an answer. Raises NotFoundError if none exists, or another client owns it."""
    response = models.responses.find(id_, caller.api_key)
    if response is None or response.run is None:
        raise NotFoundError(NOT_RUNNING, param="id")
    return response.run
