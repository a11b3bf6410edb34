"""The protocol, by the official SDK: what a client gets when it lists tools and calls one."""

from __future__ import annotations

from typing import Any

import mcp_types
import msgspec
import structlog
from mcp.server import Server
from mcp.server.context import ServerRequestContext

from trioserve._version import __version__
from trioserve.errors import TrioServeError
from trioserve.mcp_server.chats import Chatted
from trioserve.mcp_server.models import Models
from trioserve.mcp_server.report import Report
from trioserve.mcp_server.tools import TOOLS, ModelTool
from trioserve.server.concurrency import alongside
from trioserve.tools.arguments import read_arguments, schema_of

_log = structlog.stdlib.get_logger("trioserve.mcp")

_INSTRUCTIONS = (
    "Language models that run on this machine, or on a server of the user's. Calls may take a "
    "while: a model may have to be loaded first, and answers come at the speed of the machine."
)
_CUT = "[The answer ends here because the limit of its length was reached.]"

_Context = ServerRequestContext[Any, Any]


def mcp_server(models: Models) -> Server[Any]:
    """Make an MCP server that offers models. A call that the client cancels ends at once."""
    tools = {tool.name: tool for tool in TOOLS}

    async def list_tools(
        _context: _Context, _params: mcp_types.PaginatedRequestParams | None
    ) -> mcp_types.ListToolsResult:
        return mcp_types.ListToolsResult(tools=[_described(tool) for tool in TOOLS])

    async def call_tool(
        context: _Context, params: mcp_types.CallToolRequestParams
    ) -> mcp_types.CallToolResult:
        try:
            tool = tools.get(params.name)
            if tool is None:
                raise TrioServeError(f"There is no tool {params.name!r}.")
            arguments = read_arguments(tool.arguments, params.arguments or {})
            report = Report(context.session)
            async with alongside(report.run):
                result = await tool.call(models, arguments, report)
        except TrioServeError as error:
            _log.info("a call has failed", tool=params.name, error=error.message)
            return _said(error.message, is_error=True)
        return _answered(result)

    return Server(
        "trioserve",
        version=__version__,
        title="Local language models",
        instructions=_INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def _described(tool: ModelTool[Any]) -> mcp_types.Tool:
    return mcp_types.Tool(
        name=tool.name,
        title=tool.title,
        description=tool.description,
        input_schema=schema_of(tool.arguments),
        output_schema=schema_of(tool.result),
        annotations=mcp_types.ToolAnnotations(
            read_only_hint=True, destructive_hint=False, open_world_hint=False
        ),
    )


def _answered(result: msgspec.Struct) -> mcp_types.CallToolResult:
    """A result for programs, and as text for models: of a chat, the text only."""
    if isinstance(result, Chatted):
        texts = [result.text, _CUT] if result.finish_reason == "length" else [result.text]
    else:
        texts = [msgspec.json.encode(result).decode()]
    answer = _said(*texts)
    answer.structured_content = msgspec.to_builtins(result)
    return answer


def _said(*texts: str, is_error: bool = False) -> mcp_types.CallToolResult:
    return mcp_types.CallToolResult(
        content=[mcp_types.TextContent(text=text) for text in texts], is_error=is_error
    )
