"""The fields of all APIs that switch thinking on and off, limit it and hide it.

Programs send the fields of one API to any other. So all routes for chats read all of them, and
`ThinkingRequest.thinking_params` makes one value: variables of the template, with
``enable_thinking``. Where that is false, the server also closes the reasoning at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import attrs

from trioserve.api.base import limits, readers
from trioserve.api.base.fields import (
    MAX_CHARS,
    NAME,
    MismatchError,
    Only,
    RequestBody,
    field,
    json_type,
    mapping,
)

_T = TypeVar("_T")

_HAS_NO_SUMMARY = "there is the reasoning itself"


@attrs.frozen(kw_only=True)
class ThinkingOptions:
    """``thinking``: whether the model thinks, how long, and who may read it; Anthropic's."""

    type: Literal["enabled", "disabled", "adaptive", "auto", "between_tools"]
    budget_tokens: int | None = field(read=readers.count, default=None)
    display: Literal["summarized", "omitted"] = "summarized"

    @property
    def is_on(self) -> bool:
        """True if the model thinks. With "between_tools", it only reports its progress."""
        return self.type not in ("disabled", "between_tools")

    @property
    def shown(self) -> bool:
        return not self.is_on or self.display == "summarized"


@attrs.frozen(kw_only=True)
class ReasoningOptions(RequestBody):
    """``reasoning``: OpenAI's in the Responses API, and OpenRouter's."""

    unsupported: ClassVar[Mapping[str, Only]] = {
        "context": Only("auto", harmless="the chat template decides what the model sees"),
        "generate_summary": Only("auto", harmless=_HAS_NO_SUMMARY),
        "mode": Only("standard", harmless="there is one mode"),
        "summary": Only("auto", harmless=_HAS_NO_SUMMARY),
    }
    effort: str | None = None
    enabled: bool | None = None
    max_tokens: int | None = field(read=readers.count, default=None)
    exclude: bool = False


#: Ollama's ``think``: whether the model thinks, or how much: "low", "medium", "high".
Think: TypeAlias = bool | str


@json_type({**NAME, "type": ["boolean", "string"]})
def _think(value: Any) -> Think:
    if not isinstance(value, bool | str) or value == "":
        raise MismatchError('true, false, or a level such as "high"')
    return value


@json_type(
    {
        "type": "object",
        MAX_CHARS: limits.MAX_TEMPLATE_KWARGS,
        "description": "Variables of the chat template: as JSON at most "
        f"{limits.MAX_TEMPLATE_KWARGS} characters, roughly.",
    }
)
def _template_kwargs(value: Any) -> dict[str, Any]:
    kwargs = mapping(value)
    if not isinstance(kwargs.get("enable_thinking", False), bool):
        raise MismatchError("an object in which 'enable_thinking' is true or false")
    return kwargs


def _first(*values: _T | None) -> _T | None:
    for each in values:
        if each is not None:
            return each
    return None


@attrs.frozen(kw_only=True, slots=False)
class ThinkingRequest(RequestBody):
    """The fields of every request for a chat that are about thinking."""

    thinking: ThinkingOptions | None = None
    enable_thinking: bool | None = None
    think: Think | None = field(read=_think, default=None)
    reasoning: ReasoningOptions = attrs.field(factory=ReasoningOptions)
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    reasoning_budget: int | None = field(
        "reasoning_budget_tokens", "thinking_budget_tokens", read=readers.budget, default=None
    )
    chat_template_kwargs: dict[str, Any] = field(read=_template_kwargs, factory=dict)

    #: The default of `thinks`.
    thinks_unasked: ClassVar[bool | None] = None

    #: The most tokens of thinking that is "enabled" without a number; -1: no limit.
    enabled_budget: ClassVar[int] = -1

    @property
    def effort(self) -> str | None:
        """The effort of thinking, by a name."""
        level = self.think if isinstance(self.think, str) else None
        variable = self.chat_template_kwargs.get("reasoning_effort")
        of_template = variable if isinstance(variable, str) else None
        return _first(self.reasoning.effort, self.reasoning_effort, level, of_template)

    @property
    def thinks(self) -> bool | None:
        """The switch of thinking; None: as the configuration has it.

        Of fields that contradict one another, the first in this order counts: the switches, the
        effort "none", the variables of the template, any other effort.
        """
        effort, variable = self.effort, self.chat_template_kwargs.get("thinking")
        return _first(
            None if self.thinking is None else self.thinking.is_on,
            self.enable_thinking,
            self.think if isinstance(self.think, bool) else None,
            self.reasoning.enabled,
            False if effort == "none" else None,
            self.chat_template_kwargs.get("enable_thinking"),
            variable if isinstance(variable, bool) else None,
            None if effort is None else True,
            self.thinks_unasked,
        )

    @property
    def budget(self) -> int:
        """The most tokens of thinking; -1: as the configuration has it."""
        options = self.thinking
        enabled = self.enabled_budget if options and options.type == "enabled" else None
        of_options = None if options is None else _first(options.budget_tokens, enabled)
        found = _first(self.reasoning_budget, of_options, self.reasoning.max_tokens)
        return -1 if found is None else found

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The variables of the template, with ``enable_thinking`` and ``reasoning_effort``."""
        variables = {**self.chat_template_kwargs}
        if (thinks := self.thinks) is not None:
            if isinstance(variables.get("thinking"), bool):
                del variables["thinking"]  # which may contradict
            variables["enable_thinking"] = thinks
        if (effort := self.effort) == "none":
            variables.pop("reasoning_effort", None)
        elif effort is not None:
            variables["reasoning_effort"] = effort
        return variables

    @property
    def thinking_params(self) -> dict[str, Any]:
        """The one value that all of these fields have: fields of `ChatParams`."""
        is_shown = self.include_reasoning and not self.reasoning.exclude
        return {
            "template_kwargs": self.template_kwargs,
            "reasoning_budget": self.budget,
            "reasoning_format": None if is_shown else "hidden",
        }
