"""Which tools a model may, must or must not call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs

from trioserve.errors import InvalidRequestError

Mode: TypeAlias = Literal["auto", "none", "required"]

MODES: tuple[Mode, ...] = ("auto", "none", "required")


@attrs.frozen
class ToolChoice:
    """Whether the answer calls tools, and which of them it may call; None: any."""

    mode: Mode = "auto"
    names: tuple[str, ...] | None = None


def parse_tool_choice(value: object, path: str = "tool_choice") -> ToolChoice:
    """Read OpenAI's ``tool_choice``: a mode, a function, or a mode and the tools it is about.

    Raises:
        InvalidRequestError: it is something else; `param` names what is wrong.
    """
    if value in MODES:
        return ToolChoice(value)
    match value:
        case {"type": "function"}:
            return ToolChoice("required", (_function_name(value, path),))
        case {"type": "allowed_tools", "allowed_tools": {} as allowed}:
            return _parse_allowed(allowed, f"{path}.allowed_tools")
    raise InvalidRequestError(
        f'\'{path}\' must be "auto", "none", "required", or an object that names functions.',
        param=path,
    )


def _parse_allowed(allowed: Mapping[str, Any], path: str) -> ToolChoice:
    mode = allowed.get("mode")
    if mode not in ("auto", "required"):
        path = f"{path}.mode"
        raise InvalidRequestError(f'\'{path}\' must be "auto" or "required".', param=path)
    return ToolChoice(mode, _function_names(allowed.get("tools"), f"{path}.tools"))


def _function_names(tools: object, path: str) -> tuple[str, ...]:
    if not isinstance(tools, list) or not tools:
        raise InvalidRequestError(f"'{path}' must be a list of tools, and not empty.", param=path)
    return tuple(_function_name(tool, f"{path}[{i}]") for i, tool in enumerate(tools))


def _function_name(tool: object, path: str) -> str:
    match tool:
        case {"function": {"name": str(name)}}:
            return name
    path = f"{path}.function.name"
    raise InvalidRequestError(f"'{path}' must be the name of a function.", param=path)


def choose(choice: str | ToolChoice, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """Read a choice: a `ToolChoice`, "auto", "none", "required", or the name of a function.

    Raises:
        InvalidRequestError: there are no tools to choose from, or none of that name.
    """
    if isinstance(choice, str):
        choice = ToolChoice(choice) if choice in MODES else ToolChoice("required", (choice,))
    declared = {name_of(tool) for tool in tools}
    for name in choice.names or ():
        if name not in declared:
            raise InvalidRequestError(
                f"'tool_choice' names the function {name!r:.80}, which is not in 'tools'.",
                param="tool_choice",
            )
    if choice.mode == "required" and not tools:
        raise InvalidRequestError(
            "'tool_choice' is \"required\", and there are no 'tools'.", param="tool_choice"
        )
    return choice


def name_of(tool: Mapping[str, Any]) -> str:
    """Give the name of a tool's function; empty if it has none."""
    function = tool.get("function", tool)
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""
