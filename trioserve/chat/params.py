"""`ChatParams`: what a chat adds to the parameters of a generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from trioserve.chat.template.continuation import ContinueFinalMessage
from trioserve.chat.tool_choice import ToolChoice


def _none_if_empty(value: Sequence[Any] | None) -> Sequence[Any] | None:
    return value or None


def _empty_if_none(value: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return value or {}


@attrs.frozen(kw_only=True)
class ChatParams:
    """How messages become a prompt, and how the output becomes a message."""

    #: Functions that the model may call, in OpenAI's form.
    tools: Sequence[Mapping[str, Any]] | None = attrs.field(default=None, converter=_none_if_empty)
    #: "auto", "none", "required", or the name of the function to call.
    tool_choice: str | ToolChoice = "auto"
    #: Whether an answer may have several calls; None: where the template shows several.
    parallel_tool_calls: bool | None = None
    #: Whether the prompt ends with the head of an answer.
    add_generation_prompt: bool = True
    #: The part of the last message, the assistant's, that the model continues: "content",
    #: "reasoning_content" or "auto". The prompt ends with it, and the answer is the rest.
    continue_final_message: ContinueFinalMessage | None = None
    #: Variables of the template, such as ``enable_thinking``, beside those of the configuration.
    template_kwargs: Mapping[str, Any] = attrs.field(default=None, converter=_empty_if_none)
    #: Where reasoning goes, as in llama-server; None: as the configuration says.
    reasoning_format: str | None = None
    #: The most tokens of reasoning. 0: it ends at once; -1: as the configuration says.
    reasoning_budget: int = -1
    #: The last words of reasoning whose budget is used up; None: as the configuration says.
    reasoning_message: str | None = None
    #: Whether `Server.end_reasoning` may end the reasoning.
    reasoning_control: bool = False
    #: Whether tool calls are taken out of the text.
    parse_tools: bool = True
