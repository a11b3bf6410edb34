"""The keyword arguments of `Server`: the fields of the parameter classes, with their types.

``server.chat(messages, tools=[...], temperature=0, client="anna")`` sets a field of `ChatParams`,
one of `SamplingParams` and one of `RequestContext`. The defaults are those of the configuration.
A test compares these types with the classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from trioserve.chat.params import ChatParams, ContinueFinalMessage, ToolChoice
from trioserve.server.context import ANYONE, RequestContext, refuse, take_fields
from trioserve.types import Grammar, TokenId


class ContextFields(TypedDict, total=False):
    """The fields of `RequestContext` that a program may set."""

    client: str
    keep_alive: float | None
    request_id: str
    traceparent: str
    tracestate: str


class TemplateFields(TypedDict, total=False):
    """The fields of `ChatParams` without `tools`."""

    tool_choice: str | ToolChoice
    parallel_tool_calls: bool | None
    add_generation_prompt: bool
    continue_final_message: ContinueFinalMessage | None
    template_kwargs: Mapping[str, Any]
    reasoning_format: str | None
    reasoning_budget: int
    reasoning_message: str | None
    reasoning_control: bool
    parse_tools: bool


class CompletionFields(ContextFields, total=False):
    """The fields of `SamplingParams` and `GenerationParams`, and those of the context."""

    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    typical_p: float
    repeat_last_n: int
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    adaptive_target: float
    adaptive_decay: float
    dynatemp_range: float
    dynatemp_exponent: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    ignore_eos: bool
    min_keep: int
    min_tokens: int
    samplers: Sequence[str]
    #: Pairs of a token id and its bias, or a mapping from ids or text to biases.
    logit_bias: Sequence[tuple[TokenId, float]] | Mapping[TokenId | str, float]
    max_tokens: int
    draft_max: int
    stop: str | Sequence[str]
    n_keep: int
    n_discard: int
    n_indent: int
    cache_prompt: bool
    cache_salt: str
    id_slot: int
    lora: Sequence[tuple[int, float]]
    priority: int
    n_probs: int
    prompt_logprobs: int | None
    post_sampling_probs: bool
    t_max_predict_ms: float
    return_progress: bool
    skip_special_tokens: bool
    grammar: Grammar | None


class RenderFields(TemplateFields, total=False):
    """The fields of `ChatParams`."""

    tools: Sequence[Mapping[str, Any]] | None


class ChatFields(CompletionFields, RenderFields, total=False):
    """The fields of a chat."""


class TranscriptionFields(ContextFields, total=False):
    """The fields of `TranscriptionParams`, and those of the context."""

    translate: bool
    language: str | None
    prompt: str
    temperature: float
    max_tokens: int | None
    skip_silence: bool
    timed: bool
    words: bool
    logprobs: bool


class SpeechFields(ContextFields, total=False):
    """The fields of `SpeechParams`, and those of the context."""

    voice: str
    language: str
    speed: float
    seed: int
    top_k: int
    top_p: float
    priority: int
    param: str


def take_context(fields: dict[str, Any], base: RequestContext = ANYONE) -> RequestContext:
    """Take the fields of the context of a call. Its deadline is a cancel scope of the caller."""
    refuse({name: fields[name] for name in _OF_APIS & fields.keys()})
    return take_fields(RequestContext, fields, base)


def only_context(fields: Mapping[str, Any], base: RequestContext = ANYONE) -> RequestContext:
    """Make the context of a call that has no other fields."""
    given = {**fields}
    context = take_context(given, base)
    refuse(given)
    return context


def only_chat(fields: Mapping[str, Any], base: ChatParams | None = None) -> ChatParams:
    """Make the parameters of a chat that is rendered, and not answered."""
    given = {**fields}
    chat = take_fields(ChatParams, given, base)
    refuse(given)
    return chat


#: Fields of `RequestContext` that only the APIs set.
_OF_APIS = frozenset({"arrived", "deadline", "has_begun", "limited_as", "on_cancel"})
