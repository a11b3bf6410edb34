"""The parameters of a chat beside those of a generation: `ChatParams`, and the choice of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs

from trioserve.chat.messages import MAX_TOOLS, check_count
from trioserve.errors import InvalidRequestError

#: The part of the final message to continue. "auto": its reasoning, if it has nothing else.
ContinueFinalMessage: TypeAlias = Literal["auto", "content", "reasoning_content"]

Mode: TypeAlias = Literal["auto", "none", "required"]

MODES: tuple[Mode, ...] = ("auto", "none", "required")


@attrs.frozen
class ToolChoice:
    """A choice of tools: a mode, and the names of the functions that may be called; None: any."""

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
        case {"type": "auto" | "none" | "required" as mode}:
            return ToolChoice(mode)
        case {"type": "function" | "custom"}:
            return ToolChoice("required", (_function_name(value, path),))
        case {"type": "allowed_tools", "allowed_tools": {} as allowed}:
            return _parse_allowed(allowed, f"{path}.allowed_tools")
    raise InvalidRequestError.at(
        path, 'must be "auto", "none", "required", or an object that names functions.'
    )


def _parse_allowed(allowed: Mapping[str, Any], path: str) -> ToolChoice:
    mode = allowed.get("mode")
    if mode not in ("auto", "required"):
        path = f"{path}.mode"
        raise InvalidRequestError.at(path, 'must be "auto" or "required".')
    return ToolChoice(mode, _function_names(allowed.get("tools"), f"{path}.tools"))


def _function_names(tools: object, path: str) -> tuple[str, ...]:
    if not isinstance(tools, list) or not tools:
        raise InvalidRequestError.at(path, "must be a list of tools, and not empty.")
    check_count(len(tools), MAX_TOOLS, path, "tools")
    return tuple(_function_name(tool, f"{path}[{i}]") for i, tool in enumerate(tools))


def _function_name(tool: object, path: str) -> str:
    match tool:
        case {"function": {"name": str(name)}} | {"custom": {"name": str(name)}}:
            return name
    is_custom = isinstance(tool, Mapping) and tool.get("type") == "custom"
    path = f"{path}.{'custom' if is_custom else 'function'}.name"
    raise InvalidRequestError.at(path, "must be the name of a function.")


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
            raise InvalidRequestError.at(
                "tool_choice", f"names the function {name!r:.80}, which is not in 'tools'."
            )
    if choice.mode == "required" and not tools:
        raise InvalidRequestError.at("tool_choice", "is \"required\", and there are no 'tools'.")
    return choice


def name_of(tool: Mapping[str, Any]) -> str:
    """Give the name of a tool's function; empty if it has none."""
    function = tool.get("function", tool)
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""


def _none_if_empty(value: Sequence[Any] | None) -> Sequence[Any] | None:
    return value or None


def _empty_if_none(value: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return value or {}


@attrs.frozen(kw_only=True)
class ChatParams:
    """The parameters for making a prompt of messages, and a message of the output."""

    #: Functions that the model may call, in OpenAI's form.
    tools: Sequence[Mapping[str, Any]] | None = attrs.field(default=None, converter=_none_if_empty)
    #: "auto", "none", "required", or the name of the function to call.
    tool_choice: str | ToolChoice = "auto"
    #: Allow several calls in an answer; None: where the template shows several.
    parallel_tool_calls: bool | None = None
    #: End the prompt with the head of an answer.
    add_generation_prompt: bool = True
    #: The part of the last message, the assistant's, that the model continues: "content",
    #: "reasoning_content" or "auto". The prompt ends with it, and the answer is the rest.
    continue_final_message: ContinueFinalMessage | None = None
    #: Variables of the template, such as ``enable_thinking``, beside those of the configuration.
    template_kwargs: Mapping[str, Any] = attrs.field(default=None, converter=_empty_if_none)
    #: The place of reasoning, as in llama-server; None: as the configuration says.
    reasoning_format: str | None = None
    #: The most tokens of reasoning. 0: it ends at once; -1: as the configuration says.
    reasoning_budget: int = -1
    #: The last words of reasoning whose budget is used up; None: as the configuration says.
    reasoning_message: str | None = None
    #: Allow `ChatStream.end_reasoning`.
    reasoning_control: bool = False
    #: Take tool calls out of the text.
    parse_tools: bool = True
