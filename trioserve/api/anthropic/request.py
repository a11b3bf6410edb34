"""The bodies of requests to Anthropic's routes, made by `fields.structure`.

Besides Anthropic's fields, they take those that all routes share, such as ``seed`` or ``timeout``.
Unknown fields are ignored. A field of Anthropic's that this server does not support is refused,
unless its value has no effect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from trioserve.api.anthropic.context import CompactionOptions, Edit, read_edits
from trioserve.api.anthropic.messages import continues_final_message, read_messages
from trioserve.api.anthropic.tools import Offer, read_offer
from trioserve.api.base import readers
from trioserve.api.base.fields import PART, SCHEMA, Only, PromptFields, field, mapping
from trioserve.api.base.generation_request import GenerationRequest
from trioserve.api.base.thinking import ThinkingRequest
from trioserve.chat.messages import NOT_HOSTED, Messages, Tools
from trioserve.chat.params import ChatParams, Mode, ToolChoice
from trioserve.errors import InvalidRequestError, ThreadsUnsupportedError
from trioserve.types import Grammar

#: The most tokens of an answer to a request that does not say; llama-server's number.
MAX_TOKENS = 4096

#: The most tokens of thinking where it is switched on without a number; llama-server's, too.
BUDGET_TOKENS = 10_000

#: Known fields without effect; see `RequestBody.unsupported`.
_UNSUPPORTED: Mapping[str, Only] = {
    "billing_policy": Only(harmless="nothing is billed"),
    "container": Only(harmless=NOT_HOSTED),
    "diagnostics": Only({"previous_message_id": None}, harmless="this server has no diagnostics"),
    "fallback_credit_token": Only(harmless="nothing is billed"),
    "fallbacks": Only([], harmless="the model that was asked answers"),
    "inference_geo": Only("global", harmless="there is one place"),
    "mcp_servers": Only([], harmless="the configuration names the MCP servers"),
    "n": Only(1),
    "n_cmpl": Only(1),
    "return_progress": Only(False, harmless="these streams have no place for it"),
    "speed": Only("standard", harmless="there is one speed"),
    "timings_per_token": Only(False, harmless="these streams have no place for them"),
    "trioserve_run_tools": Only(False),
    "user_profile_id": Only(harmless="there are no profiles"),
}

# -- tools


@attrs.frozen(kw_only=True)
class ToolChoiceOptions:
    """``tool_choice``: which tools the model calls, and whether several at once."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = field(read=readers.name, default=None)
    disable_parallel_tool_use: bool | None = None

    def __attrs_post_init__(self) -> None:
        if self.type == "tool" and self.name is None:
            raise InvalidRequestError.at("tool_choice.name", "is required.")

    def among(self, offer: Offer) -> ToolChoice:
        """The choice in the normal form: a toolset becomes the names of its functions."""
        if self.type == "tool" and self.name is not None:
            return ToolChoice("required", offer.named(self.name))
        return ToolChoice(_MODES[self.type])

    @property
    def parallel(self) -> bool | None:
        """The switch of calls at once; None: as the template of the model has it."""
        single = self.disable_parallel_tool_use
        return None if single is None else not single


_MODES: Mapping[str, Mode] = {"auto": "auto", "any": "required", "none": "none"}


# -- the form of the answer


@attrs.frozen(kw_only=True)
class OutputFormat:
    """``output_config.format``, or ``output_format`` as older clients have it."""

    type: Literal["json_schema"]
    schema: dict[str, Any] = field(read=mapping, schema=SCHEMA)


@attrs.frozen(kw_only=True)
class OutputConfig:
    """``output_config``."""

    effort: str | None = field(read=readers.name, default=None)
    format: OutputFormat | None = None


# -- the routes


def _no_thread(value: Any) -> None:
    if value is not None:
        raise ThreadsUnsupportedError.at(
            "thread", "is not supported; leave it out, and send the whole conversation."
        )


@attrs.frozen(kw_only=True, slots=False)
class CountTokensRequest(ThinkingRequest):
    """``POST /v1/messages/count_tokens``: the fields that the prompt is made of.

    The model does not think unless it is asked to: clients that do not ask read the first block as
    text.
    """

    thinks_unasked = False
    enabled_budget = BUDGET_TOKENS

    thread: None = field(read=_no_thread, schema={**PART, "not": {}}, default=None)
    model: str | None = field(read=readers.model_name, default=None)
    messages: Messages = field(whole=read_messages)
    continue_final_message: bool = field(whole=continues_final_message)
    offer: Offer = field(whole=read_offer)
    tool_choice: ToolChoiceOptions = attrs.field(factory=ToolChoiceOptions)
    output_config: OutputConfig = attrs.field(factory=OutputConfig)
    edits: tuple[Edit, ...] | None = field("context_management", read=read_edits, default=None)
    compaction: CompactionOptions | None = None

    def __attrs_post_init__(self) -> None:
        if self.compaction is not None and self.edits is not None:
            raise InvalidRequestError.at(
                "compaction", "and 'context_management' exclude each other."
            )

    @property
    def tools(self) -> Tools:
        """The tools that the model may call."""
        return self.offer.tools

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The variables of the template. This API's effort does not switch thinking on."""
        effort = self.output_config.effort
        return super().template_kwargs | ({} if effort is None else {"reasoning_effort": effort})

    @property
    def chat_params(self) -> ChatParams:
        return ChatParams(
            **self.thinking_params,
            tools=self.tools,
            tool_choice=self.tool_choice.among(self.offer),
            parallel_tool_calls=self.tool_choice.parallel,
            add_generation_prompt=not self.continue_final_message,
            continue_final_message="auto" if self.continue_final_message else None,
            parse_tools=bool(self.tools),
        )


@attrs.frozen(kw_only=True)
class Metadata:
    """``metadata``: the id of an end user. It has no effect here."""

    user_id: str | None = field(read=readers.name, default=None)


@attrs.frozen(kw_only=True, slots=False)
class MessagesRequest(CountTokensRequest, GenerationRequest):
    """``POST /v1/messages``."""

    unsupported = _UNSUPPORTED
    prompt_fields = PromptFields(head=("system", "tools"), turns=("messages",))
    metadata: Metadata = attrs.field(factory=Metadata)
    max_tokens: int | None = field(read=readers.max_tokens, default=MAX_TOKENS)
    stop: tuple[str, ...] | None = field(
        "stop_sequences", read=readers.stop_sequences, default=None
    )
    output_format: OutputFormat | None = None
    grammar: Grammar | None = attrs.field(init=False)

    @grammar.default
    def _grammar(self) -> Grammar | None:
        path, given = "output_config.format", self.output_config.format
        if given is None:
            path, given = "output_format", self.output_format
        if given is None:
            return None
        return Grammar("json_schema", json.dumps(given.schema), param=f"{path}.schema")

    @property
    def wants_progress(self) -> bool:
        """True for streams: their first event has counts."""
        return self.stream
