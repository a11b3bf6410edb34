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
