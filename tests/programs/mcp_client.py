"""A client for the MCP conformance suite: ``python -m tests.programs.mcp_client URL``.

It calls each tool of the server at the address, as trioserve calls those of its MCP servers.
"""

from __future__ import annotations

import sys

import trio

from trioserve.tools.mcp.entries import HttpEntry
from trioserve.tools.mcp.session import McpSession, with_session

#: Arguments for tools that need some.
_ARGUMENTS = {"add_numbers": {"a": 5, "b": 3}}


async def _call_all(session: McpSession) -> None:
    for tool in (await session.list_tools()).tools:
        result = await session.call(tool.name, _ARGUMENTS.get(tool.name, {}), print)
        print(f"{tool.name}: {result}")


if __name__ == "__main__":
    trio.run(with_session, HttpEntry(name="suite", url=sys.argv[1]), _call_all)
