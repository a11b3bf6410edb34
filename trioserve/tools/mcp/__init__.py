"""The tools of MCP servers: programs that speak on standard input and output, and addresses.

`entries` reads which ones there are. `stdio` and `http` connect to one, `session` speaks the
protocol by the official SDK, `server` starts and stops it as calls need it, and `tools` makes a
`Tool` of each tool that it lists.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Protocol

import trio

from trioserve.config import Config
from trioserve.tools.tool import Tool

#: Seconds that a server's start may take longer because of MCP servers that are slow.
WAIT_SECONDS = 5.0


class McpServers(Protocol):
    """The tools of several servers."""

    @property
    def tools(self) -> Mapping[str, Tool]:
        """The tools by their names, as of now: servers may get others."""

    async def listed(self) -> None:
        """Wait until each server has listed its tools, or has failed to. Not longer than allowed.

        The tools of those that need longer come later.
        """

    def abilities(self) -> list[str]:
        """What they may do, in sentences for the log."""


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
    # The SDK takes most of a second to import.
    module = await trio.to_thread.run_sync(import_module, f"{__name__}.tools")
    async with module.open_servers(config, taken, wait_seconds) as servers:
        yield servers
