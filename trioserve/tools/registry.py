"""`ToolRegistry`: all tools that a server has, built in and from MCP servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from fnmatch import fnmatchcase
from importlib import import_module
from types import MappingProxyType

import trio

from trioserve.concurrency import check_cancelled
from trioserve.config import Config
from trioserve.errors import InvalidRequestError, ToolRuntimeError, UnknownToolError
from trioserve.tools.tool import Tool, ToolCallContext, ToolSource


class ToolRegistry:
    """The tools of a server. Of two with the same name, it has that of the first source."""

    def __init__(self, sources: Sequence[ToolSource] = ()) -> None:
        self._sources = tuple(sources)

    async def listed(self) -> None:
        """Wait until the tools of MCP servers are there. Those that need too long come later."""
        for source in self._sources:
            await source.listed()

    @property
    def tools(self) -> Mapping[str, Tool]:
        """The tools, by name, built-in ones first. Those of MCP servers may come and go."""
        tools: dict[str, Tool] = {}
        for source in self._sources:
            tools.update((name, tool) for name, tool in source.tools.items() if name not in tools)
        return MappingProxyType(tools)

    def find(self, name: str, *, streams: bool = False) -> Tool:
        """Find a tool; if required, one that reports its output while it runs.

        Raises:
            UnknownToolError: no tool has this name, or it does not stream.
        """
        found = (source.tools[name] for source in self._sources if name in source.tools)
        tool = next(found, None)
        if tool is None:
            raise UnknownToolError(f'unknown tool "{name}"', param="tool")
        if streams and not tool.info.streams:
            raise UnknownToolError(f'tool "{name}" does not support stream = true', param="stream")
        return tool

    def check(self, context: ToolCallContext) -> None:
        """Look whether built-in tools can be called so.

        Raises:
            InvalidRequestError: they cannot; the `param` is "cwd" or "runtime".
        """
        try:
            for source in self._sources:
                source.check(context)
        except ToolRuntimeError as error:
            raise InvalidRequestError(error.message, param="runtime") from None

    def abilities(self) -> list[str]:
        """Sentences for the log about what the server may now do. Empty without tools."""
        return [sentence for source in self._sources for sentence in source.abilities()]


def select(tools: Mapping[str, Tool], patterns: Iterable[str]) -> dict[str, Tool]:
    """The tools with names that patterns such as ``weather_*`` match, in their order.

    With many tools and patterns, call it in a thread.

    Raises:
        InvalidRequestError: a name is that of no tool. The `param` is "tools".
    """
    wanted = dict.fromkeys(patterns)
    wild = [pattern for pattern in wanted if set("*?[") & set(pattern)]
    for pattern in wanted:
        if pattern not in tools and pattern not in wild:
            raise InvalidRequestError(f"This server has no tool {pattern!r}.", param="tools")
    selected: dict[str, Tool] = {}
    for name, tool in tools.items():
        check_cancelled()
        if name in wanted or any(fnmatchcase(name, pattern) for pattern in wild):
            selected[name] = tool
    return selected


@asynccontextmanager
async def open_registry(config: Config) -> AsyncIterator[ToolRegistry]:
    """Open the tools that a configuration allows, and close them at the end.

    All that they have started has ended when the block is left.

    Raises:
        ConfigError: the description of MCP servers cannot be read.
        ToolRuntimeError: the tools cannot run where they are to run.
    """
    async with AsyncExitStack() as stack:
        sources: list[ToolSource] = []
        if config.builtin_tools:
            # Imported when it is needed, because it does not run on every system.
            from trioserve.tools.builtin.tools import open_builtin_tools

            sources.append(await stack.enter_async_context(open_builtin_tools(config)))
        if config.has_web_tools:
            from trioserve.tools.web.tools import open_web_tools

            sources.append(await stack.enter_async_context(open_web_tools(config)))
        if config.has_mcp_servers:
            taken = {name for source in sources for name in source.tools}
            # The SDK takes most of a second to import.
            module = await trio.to_thread.run_sync(import_module, "trioserve.tools.mcp.tools")
            sources.append(await stack.enter_async_context(module.open_mcp_servers(config, taken)))
        yield ToolRegistry(sources)
