"""MCP servers for the tests, which are called as a server does it."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from trioserve import Config
from trioserve.tools.mcp.tools import McpServers, open_mcp_servers
from trioserve.tools.tool import ToolCallContext, ToolResult

ODD_SERVER = str(Path(__file__).parent / "odd_mcp_server.py")


def odd(*arguments: object, **fields: Any) -> dict[str, Any]:
    """An entry of a server that behaves oddly."""
    return {"command": sys.executable, "args": ["-S", ODD_SERVER, *map(str, arguments)], **fields}


def config_of(**entries: Any) -> Config:
    """A configuration with MCP servers by their names."""
    return Config(mcp_servers_json=json.dumps({"mcpServers": entries}))


@asynccontextmanager
async def opened(
    wait_seconds: float = 30.0, taken: Collection[str] = (), **entries: Any
) -> AsyncIterator[McpServers]:
    """The tools of servers that are ended at the end."""
    config = config_of(**entries)
    async with open_mcp_servers(config, taken, wait_seconds=wait_seconds) as servers:
        await servers.listed()
        yield servers


async def call(servers: McpServers, name: str, **arguments: Any) -> ToolResult:
    """Call a tool."""
    return await servers.tools[name].call(arguments, ToolCallContext())


def pids_in(file: Path) -> list[int]:
    """The processes of a server that logs them, one for each of its starts."""
    return [int(line) for line in file.read_text().split()]
