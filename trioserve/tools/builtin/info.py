"""`get_info`: the system that tools run on, and the directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trioserve.tools.runtime.runtime import Runtime
from trioserve.tools.tool import Tool, ToolCallContext, ToolInfo, ToolResult

_TIMEOUT = 5.0
_MAX_BYTES = 4096

_UNKNOWN = "unknown"


class GetInfo(Tool):
    """Tells what the system is, and the current directory."""

    NAME = "get_info"

    def __init__(self, runtime_of: Callable[[ToolCallContext], Runtime]) -> None:
        """Tell it of the runtime that this finds."""
        self._runtime_of = runtime_of
        self._info = ToolInfo(
            name=self.NAME,
            display_name="Get runtime info",
            description="Tell the name and version of the operating system, and the current "
            "directory.",
            uses_cwd=True,
        )

    @property
    def info(self) -> ToolInfo:
        """What it is."""
        return self._info

    async def call(self, arguments: Mapping[str, Any], context: ToolCallContext) -> ToolResult:
        """Ask the system."""
        output = await self._runtime_of(context).run(
            ["sh", "-c", "uname -a && pwd"],
            cwd=context.cwd,
            timeout=_TIMEOUT,
            max_output=_MAX_BYTES,
        )
        if output.exit_code:
            return ToolResult({"os": _UNKNOWN, "cwd": context.cwd or _UNKNOWN})
        system, _, cwd = output.text.rstrip("\n").partition("\n")
        return ToolResult({"os": system, "cwd": cwd})
