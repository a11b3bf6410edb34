"""``GET /tools`` and ``POST /tools``: the tools that the server runs, and calls of them.

llama-server's page calls tools by these when its model wants to; the answer goes back into the
chat as the page sees fit. `trioserve_run_tools` in a chat has the server do all of that.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
from msgspec import UNSET, UnsetType
from werkzeug.http import parse_options_header

from trioserve.api.base import errors, readers, sse
from trioserve.api.base.answers import Answer
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import RequestBody, field
from trioserve.api.base.reply import Json, KeepAlive, Pieces, Reply, long_json
from trioserve.api.base.routes import Query, Routes, only_if
from trioserve.api.openapi import gives, takes
from trioserve.concurrency import Bell, alongside
from trioserve.errors import InvalidRequestError, PermissionDeniedError, TrioServeError
from trioserve.server.observers.observer import ToolRecord, observed_tool
from trioserve.tools.tool import Tool, ToolCallContext, ToolInfo, ToolResult

if TYPE_CHECKING:
    from trioserve.api.service import AppState

routes = Routes()

#: Headers with the arguments that are up to the client.
_IN_HEADERS = {"cwd": "X-Tool-Cwd", "runtime": "X-Tool-Runtime", "resp_type": "X-Resp-Type"}

#: Characters of output that are kept for a client that does not read; more are lost.
_MAX_UNWRITTEN = 2**20


@attrs.frozen(kw_only=True)
class CallRequest(RequestBody):
    """``POST /tools``."""

    tool: str = field(read=readers.name)
    params: dict[str, Any] = attrs.Factory(dict)
    stream: bool = False


def _check(app: AppState) -> None:
    """Raise PermissionDeniedError if an app has no tools."""
    if not app.config.has_tools:
        raise PermissionDeniedError(
            "This feature is disabled. Start the server with --tools or --mcp-servers-config."
        )


# -- the list


class _Permissions(Answer):
    write: bool


class _Tool(Answer):
    tool: str
    display_name: str
    type: str
    permissions: _Permissions
    uses_cwd: bool
    streams: bool
    definition: Mapping[str, Any]
    mcp_server: str | UnsetType = UNSET


@routes.get("/tools")
@only_if(_check)
@gives(list[_Tool])
async def tools(query: Query, caller: Caller, app: AppState) -> Reply:
    """List the tools that the server runs for clients and models."""
    return _json([_described(tool.info) for tool in app.tools.tools.values()], caller)


def _described(info: ToolInfo) -> _Tool:
    permissions, mcp_server = _Permissions(info.writes), info.mcp_server or UNSET
    told = {"tool": info.name, "type": info.kind, "permissions": permissions}
    return _Tool.like(info, **told, mcp_server=mcp_server)


# -- a call


@routes.post("/tools")
@only_if(_check)
@takes(CallRequest)
@gives(dict[str, Any])
async def call(request: CallRequest, caller: Caller, app: AppState) -> Reply:
    """Call a tool, and answer with its result; with `stream`, with its output as it comes.

    The header `X-Tool-Cwd` names the folder that the tool works in, and `X-Tool-Runtime` the
    container or the host. A client that leaves ends the call.
    """
    kind, _ = parse_options_header(caller.headers.get("Content-Type", ""))
    if kind != "application/json":  # a page of another site can send other types
        raise InvalidRequestError("The Content-Type must be application/json.")
    tool = app.tools.find(request.tool, streams=request.stream)
    running = _StreamedCall(app, caller, tool, _arguments(tool, request.params))
    if not request.stream:
        result = await running.run()
        return _json(result.answer, caller)
    await caller.open(alongside(running.run_streamed))
    return Pieces(
        pieces=running.events(),
        headers=dict(sse.HEADERS),
        content_type=sse.CONTENT_TYPE,
        keep_alive=KeepAlive.every(app.config.sse_ping_interval),
    )


def _arguments(tool: Tool, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments, without those that a model has made up: for built-in tools, see above."""
    if tool.info.kind == "mcp":
        return params
    return {name: value for name, value in params.items() if name not in _IN_HEADERS}


class _StreamedCall:
    """One call, and its output on the way to the client."""

    def __init__(
        self, app: AppState, caller: Caller, tool: Tool, arguments: Mapping[str, Any]
    ) -> None:
        self._app = app
        self._tool = tool
        self._arguments = arguments
        self._record = ToolRecord(tool.info.name, tool.info.kind, context=caller.context())
        self._context = ToolCallContext(
            cwd=_header(caller, "cwd") or None,
            runtime=_header(caller, "runtime") or None,
            response_type=_header(caller, "resp_type"),
            on_output=self._add,
            count=caller.held.change,
        )
        self._output: list[str] = []  # that is not written yet
        self._n_unwritten = 0
        self._end: dict[str, Any] | None = None  # the last event
        self._news = Bell()

    async def run(self) -> ToolResult:
        """Call the tool. Raises as `ClientToolCalls.run`."""
        with observed_tool(self._app.observers, self._record):
            return await self._app.tool_calls.run(
                self._tool, self._arguments, self._context, self._record
            )

    async def run_streamed(self) -> None:
        """Call the tool, and keep its output for `events`."""
        end: dict[str, Any] = {"done": True}
        try:
            result = await self.run()
            end["result"] = result.answer
            if result.is_error:
                end["error"] = result.answer["error"]
        except TrioServeError as error:
            end["error"] = error.public or error.message
        except Exception as error:  # the status is sent: an event has to say it
            end["error"] = errors.unexpected(error).message
        self._end = end
        self._news.ring()

    def _add(self, text: str) -> None:
        if self._n_unwritten > _MAX_UNWRITTEN:
            return  # the client does not read; the result has the text for the model
        self._n_unwritten += len(text)
        self._output.append(text)
        self._news.ring()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Write the output as it arrives, and an event at the end."""
        while True:
            await self._news.wait()
            if self._output:
                text = "".join(self._output)
                self._output, self._n_unwritten = [], 0
                yield sse.event({"chunk": text})
            if self._end is not None and not self._output:
                yield sse.event(self._end)
                return


def _header(caller: Caller, field: str) -> str:
    """The value of one of the headers. Pages send Latin-1, and others UTF-8."""
    value = caller.headers.get(_IN_HEADERS[field], "").strip()
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeDecodeError:
        return value


def _json(value: Any, caller: Caller) -> Json:
    size = _size(value)
    caller.held.grow(size)
    return long_json(lambda: value, size // 32)


def _size(value: Any) -> int:
    """Count the characters of an answer, roughly."""
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_size, value))
    return len(value) if isinstance(value, str) else 8
