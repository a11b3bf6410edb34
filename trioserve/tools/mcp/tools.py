"""`McpServers`: the tools of the MCP servers that a configuration names."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import attrs
import trio

from trioserve.concurrency import alongside
from trioserve.config import Config
from trioserve.errors import ToolError
from trioserve.log import get_logger
from trioserve.tools.mcp.entries import Entry, read_entries
from trioserve.tools.mcp.listing import ListedTool, Listing
from trioserve.tools.mcp.server import McpServer
from trioserve.tools.tool import Tool, ToolCallContext, ToolInfo, ToolResult, ToolSource

#: The longest name of a function that OpenAI's clients allow.
MAX_NAME = 64

#: Seconds that a server's start may take longer because of MCP servers that are slow.
WAIT_SECONDS = 5.0

#: Lines of the log about tools of one server that are skipped.
_MAX_WARNINGS = 100

_log = get_logger("trioserve.tools")


def function_name(server: str, tool: str) -> str:
    """``SERVER_TOOL``, as llama-server names it, with ``_`` for invalid characters.

    A name that is too long is cut, and ends with a checksum of the whole, so that it stays the only
    one of its kind.
    """
    whole = f"{server}_{tool}"
    name = re.sub(r"[^a-zA-Z0-9_-]", "_", whole)
    if len(name) <= MAX_NAME:
        return name
    checksum = f"_{crc32(whole.encode('utf-8', 'surrogatepass')):08x}"
    return name[: MAX_NAME - len(checksum)] + checksum


class McpTool(Tool):
    """A tool of an MCP server."""

    def __init__(self, server: McpServer, listed: ListedTool) -> None:
        self._server = server
        self._name = listed.name
        name = function_name(server.entry.name, listed.name)
        # Without hints, the protocol's defaults apply: the tool may be destructive.
        self._reads_only = listed.reads_only
        self.info = ToolInfo(
            name=name,
            description=listed.description,
            parameters={"properties": {}, **listed.parameters},
            display_name=listed.title or name,
            kind="mcp",
            mcp_server=server.entry.name,
            writes=not self._reads_only,
            streams=True,
        )

    async def call(self, arguments: Mapping[str, Any], context: ToolCallContext) -> ToolResult:
        """Call it. The server is started if it does not run. Its output is its progress.

        A server that has ended, or takes too long, is an error for the model to read.
        """
        try:
            return await self._server.call(
                self._name, arguments, context, may_repeat=self._reads_only
            )
        except ToolError as error:
            name = self._server.entry.name
            return ToolResult.of_error(f"The MCP server {name!r} has failed: {error}.")


class McpServers(ToolSource):
    """The tools of several servers.

    Args:
        entries: the servers.
        taken: names that their tools cannot have.
        deadline: until when `listed` waits.
    """

    def __init__(self, entries: Sequence[Entry], taken: Collection[str], deadline: float) -> None:
        #: By the names of servers: it was tried to list their tools.
        self.tried = {entry.name: trio.Event() for entry in entries}
        self._deadline = deadline
        self._taken = frozenset(taken)
        self._tools: dict[str, Sequence[McpTool]] = {entry.name: () for entry in entries}
        self._by_name: Mapping[str, McpTool] = {}
        self._warned: defaultdict[str, set[str]] = defaultdict(set)

    @property
    def tools(self) -> Mapping[str, Tool]:
        """The tools by their names, as of now: servers may get others."""
        return self._by_name

    async def listed(self) -> None:
        """Wait until each server has listed its tools, or has failed to; or for the deadline."""
        with trio.move_on_at(self._deadline):
            for event in self.tried.values():
                await event.wait()

    def abilities(self) -> list[str]:
        if not self._tools:
            return []
        names = ", ".join(self._tools)
        return [f"The model and clients may call the tools of these MCP servers: {names}."]

    def describe(self, server: McpServer, listing: Listing) -> None:
        """Replace the tools of a server. Of two servers, the one named first keeps a name."""
        name = server.entry.name
        for tool_name, problem in listing.problems:
            self._warn(name, tool_name, problem)
        self._tools[name] = tools = [McpTool(server, tool) for tool in listing.tools]
        _log.info("MCP server", server=name, tools=len(tools))
        by_name: dict[str, McpTool] = {}
        for server_name, of_server in self._tools.items():
            for own in of_server:
                if own.info.name in self._taken or own.info.name in by_name:
                    self._warn(server_name, own.info.name, "there is another tool with this name")
                else:
                    by_name[own.info.name] = own
        self._by_name = by_name

    def _warn(self, server: str, tool: str, problem: str) -> None:
        """Log, once, why a tool is not there."""
        warned = self._warned[server]
        if tool not in warned and len(warned) < _MAX_WARNINGS:
            warned.add(tool)
            _log.warning("MCP tool skipped", server=server, tool=tool, problem=problem)


@asynccontextmanager
async def open_mcp_servers(
    config: Config, taken: Collection[str] = (), *, wait_seconds: float = WAIT_SECONDS
) -> AsyncIterator[McpServers]:
    """List the tools of the servers that a configuration names, and call them when asked to.

    The servers that run are ended when the block is left.

    Args:
        config: names them.
        taken: names that their tools cannot have.
        wait_seconds: how long `McpServers.listed` waits, from now.

    Raises:
        ConfigError: the description of the servers cannot be read.
    """
    entries = await trio.to_thread.run_sync(entries_of, config)
    servers = McpServers(entries, taken, trio.current_time() + wait_seconds)
    async with alongside() as nursery:
        for entry in entries:
            server = McpServer(entry, servers.describe, nursery)
            nursery.start_soon(server.discover, servers.tried[entry.name].set)
        yield servers


def entries_of(config: Config) -> list[Entry]:
    """Read the servers that a configuration names. Blocks. Raises ConfigError."""
    folder = Path(config.tools_dir[0] if config.tools_dir else ".").resolve()
    entries = read_entries(config.mcp_servers(), folder, os.environ)
    return [attrs.evolve(entry, roots=config.tools_dir) for entry in entries]
