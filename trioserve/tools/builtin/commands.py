"""`exec_shell_command` and `get_info`: a command and what it writes, and the system it runs on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import attrs
import msgspec

from trioserve.errors import InvalidRequestError
from trioserve.tools.process import CommandOutput
from trioserve.tools.runtime import Runtime
from trioserve.tools.tool import (
    Tool,
    ToolCallContext,
    ToolInfo,
    ToolResult,
    about,
    read_arguments,
    schema_of,
)

_MAX_SECONDS = 60
_MAX_BYTES = 16 * 2**10

#: Bytes of a command. The kernel takes no argument of 128 KiB.
_MAX_COMMAND = 100_000

#: Why a command was ended, for the model.
_LIMITS = {
    "memory": "used more memory than it may",
    "processes": "started more processes than it may",
    "output": "did not stop writing",
}

_INFO_SECONDS = 5.0
_MAX_INFO = 4096
_UNKNOWN = "unknown"


class ShellArguments(msgspec.Struct):
    """The arguments of `exec_shell_command`."""

    command: Annotated[str, about("Command line for sh")]
    timeout: Annotated[
        int, about(f"Seconds until it is ended (default: 10, maximum: {_MAX_SECONDS})", ge=1)
    ] = 10
    max_output_size: Annotated[
        int, about(f"Bytes of its output to return (default and maximum: {_MAX_BYTES})", ge=0)
    ] = _MAX_BYTES


@attrs.frozen
class _RuntimeTool(Tool):
    """A tool that works in a runtime, which a function finds."""

    _runtime_of: Callable[[ToolCallContext], Runtime]


class ExecShellCommand(_RuntimeTool):
    """Runs a command with the shell of a runtime."""

    info = ToolInfo(
        name="exec_shell_command",
        display_name="Execute shell command",
        description="Run a shell command. Returns what it writes, also to standard error.",
        parameters=schema_of(ShellArguments),
        writes=True,
        uses_cwd=True,
        streams=True,
    )

    async def call(self, arguments: Mapping[str, Any], context: ToolCallContext) -> ToolResult:
        """Run a command. When cancelled, it first kills the command and its children."""
        read = read_arguments(ShellArguments, arguments)
        _check(read.command)
        output = await self._runtime_of(context).run(
            ["sh", "-c", read.command],
            cwd=context.cwd,
            timeout=min(read.timeout, _MAX_SECONDS),
            max_output=min(read.max_output_size, _MAX_BYTES),
            on_output=context.on_output,
        )
        end = _end_of(output)
        context.on_output(end)
        return ToolResult.of_text(output.text + end)


def _check(command: str) -> None:
    try:
        size = len(command.encode())
    except UnicodeEncodeError:
        raise InvalidRequestError("is no valid text", param="command") from None
    if "\0" in command:
        raise InvalidRequestError("cannot have a NUL character", param="command")
    if size > _MAX_COMMAND:
        raise InvalidRequestError(f"is longer than {_MAX_COMMAND} bytes", param="command")


def _end_of(output: CommandOutput) -> str:
    """The end of the command, in llama-server's words."""
    words = "\n[output truncated]" if output.truncated else ""
    words += f"\n[exit code: {output.exit_code}]"
    if output.timed_out:
        words += " [exit due to timed out]"
    if output.limit_reached:
        words += f" [ended because it {_LIMITS[output.limit_reached]}]"
    return words


class GetInfo(_RuntimeTool):
    """Tells what the system is, and the current directory."""

    info = ToolInfo(
        name="get_info",
        display_name="Get runtime info",
        description="Tell the name and version of the operating system, and the current directory.",
        uses_cwd=True,
    )

    async def call(self, arguments: Mapping[str, Any], context: ToolCallContext) -> ToolResult:
        output = await self._runtime_of(context).run(
            ["sh", "-c", "uname -a && pwd"],
            cwd=context.cwd,
            timeout=_INFO_SECONDS,
            max_output=_MAX_INFO,
        )
        if output.exit_code:
            return ToolResult({"os": _UNKNOWN, "cwd": context.cwd or _UNKNOWN})
        system, _, cwd = output.text.rstrip("\n").partition("\n")
        return ToolResult({"os": system, "cwd": cwd})
