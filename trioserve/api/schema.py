"""What requests may hold: one frozen class a route, made by `fields.structure`.

Names, aliases and defaults are llama-server's and OpenAI's. Fields that nobody knows are ignored,
as both do. A field that is known but has no effect here is refused (`_NEUTRAL`), unless its value
asks for what happens anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attrs

from trioserve.api import values
from trioserve.api.fields import convert, how, named, structure, types_of
from trioserve.api.values import Bias, Prompt
from trioserve.chat.prefill import Part
from trioserve.errors import InvalidRequestError, UnsupportedFieldError
from trioserve.types import Grammar, Options, SamplingParams

# -- fields that have no effect yet

_Neutral: TypeAlias = Callable[[Any], bool]


def _only(*values: Any) -> _Neutral:
    """Accept these values. True and 1 differ, as in JSON."""
    return lambda value: any(value == each and type(value) is type(each) for each in values)


#: Known fields without effect, and which of their values change nothing. Null never does.
_NEUTRAL: Mapping[str, _Neutral] = {
    "adapters": _only([]),
    "audio": _only(),
    "backend_sampling": _only(False),
    "best_of": _only(1),
    "function_call": _only("auto", "none"),
    "functions": _only([]),
    "grammar_lazy": _only(False),
    "grammar_triggers": _only([]),
    "image_data": _only([]),
    "lora": _only([]),
    "modalities": _only(["text"]),
    "n": _only(1),
    "n_cache_reuse": _only(0),
    "n_cmpl": _only(1),
    "n_indent": _only(0),
    "parallel_tool_calls": _only(True),
    "preserved_tokens": _only([]),
    "reasoning_budget_tokens": _only(-1),
    "reasoning_control": _only(False),
    "suffix": _only(""),
    "thinking_budget_tokens": _only(-1),
    "verbose": _only(False),
    "web_search_options": _only(),
}

#: The same, where a route differs.
_NEUTRAL_IN_CHAT: Mapping[str, _Neutral] = {
    **_NEUTRAL,
    "echo": _only(False),
    "tool_choice": _only("auto", "none"),
}


def refuse_unsupported(body: Mapping[str, Any], neutral: Mapping[str, _Neutral]) -> None:
    """Refuse fields that would be without effect.

    Raises:
        UnsupportedFieldError: naming the first one.
    """
    for name, is_neutral in neutral.items():
        value = body.get(name)
        if value is not None and not is_neutral(value):
            raise UnsupportedFieldError(
                f"'{name}' is not supported with this value; leave it out.", param=name
            )


# -- what all generating routes share

_SCALARS: Mapping[str, Any] = {
    name: type_
    for cls in (Options, SamplingParams)
    for name, type_ in types_of(cls).items()
    if type_ in (int, float, bool)
}
_READ_BY_ROUTE = frozenset({"max_tokens", "n_probs", "return_progress"})


def _settings(body: Mapping[str, Any]) -> dict[str, Any]:
    """Collect what `Server.options` takes as it is: the scalars, by their own names."""
    settings = {
        name: convert(body[name], type_, name)
        for name, type_ in _SCALARS.items()
        if name not in _READ_BY_ROUTE and body.get(name) is not None
    }
    if settings.get("dry_base", 1.0) < 1.0:
        del settings["dry_base"]  # llama-server takes its default then
    if settings.get("t_max_predict_ms", 0) < 0:
        settings["t_max_predict_ms"] = 0
    return settings


def _grammar(body: Mapping[str, Any]) -> Grammar | None:
    """Read what the output must look like, from the one field that says so."""
    given = {
        "grammar": body.get("grammar") or None,
        "json_schema": body.get("json_schema"),
        "response_format": body.get("response_format"),
    }
    grammars = [
        grammar
        for name, value in given.items()
        if value is not None and (grammar := values.grammar(name, value)) is not None
    ]
    if len(grammars) > 1:
        first, second = grammars[0].param, grammars[1].param
        raise InvalidRequestError(f"'{first}' and '{second}' exclude each other.", param=second)
    return grammars[0] if grammars else None


@attrs.frozen(kw_only=True)
class StreamOptions:
    """Options of a streamed response."""

    include_usage: bool = False


@attrs.frozen(kw_only=True)
class Generation:
    """The fields of every route that generates text."""

    stream: bool = False
    stream_options: StreamOptions = attrs.field(factory=StreamOptions)
    timeout: float | None = attrs.field(default=None, metadata=how(read=values.seconds))
    sse_ping_interval: float | None = None
    queue_comments: bool = False  # tell the place in the queue, in comments of the stream
    timings_per_token: bool = False
    return_progress: bool = False
    max_tokens: int | None = attrs.field(
        default=None,
        metadata=how("n_predict", "max_completion_tokens", "max_tokens", read=values.limit),
    )
    n_discard: int = 0  # read for `generation_settings`; a shift takes out half
    stop: tuple[str, ...] | None = attrs.field(default=None, metadata=how(read=values.words))
    samplers: tuple[str, ...] | None = attrs.field(default=None, metadata=how(read=values.samplers))
    dry_sequence_breakers: tuple[str, ...] | None = attrs.field(
        default=None, metadata=how(read=values.breakers)
    )
    logit_bias: tuple[Bias, ...] | None = attrs.field(
        default=None, metadata=how(read=values.biases)
    )
    grammar: Grammar | None = attrs.field(metadata=how(whole=_grammar))
    others: dict[str, Any] = attrs.field(metadata=how(whole=_settings))

    @property
    def n_probs(self) -> int:
        """How many candidates to report for each token."""
        return 0

    @property
    def wants_progress(self) -> bool:
        """Whether the engine is to report its progress in the prompt."""
        return self.stream and (self.return_progress or self.timings_per_token)

    def settings(self) -> dict[str, Any]:
        """What `Server.options` takes, except `logit_bias`."""
        settings = dict(self.others)
        for name in ("max_tokens", "stop", "samplers", "dry_sequence_breakers", "grammar"):
            if (value := getattr(self, name)) is not None:
                settings[name] = value
        if self.n_probs:
            settings["n_probs"] = self.n_probs
        if self.wants_progress:
            settings["return_progress"] = True
        return settings


# -- the routes


@attrs.frozen(kw_only=True)
class CompletionRequest(Generation):
    """``POST /v1/completions`` and, with `LlamaCompletionRequest`, ``POST /completion``."""

    prompts: tuple[Prompt, ...] = attrs.field(metadata=how("prompt", read=values.prompts))
    echo: bool = False
    logprobs: int = attrs.field(default=0, metadata=how("n_probs", "logprobs", read=values.count))

    @property
    def n_probs(self) -> int:
        """How many candidates to report for each token."""
        return self.logprobs

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> CompletionRequest:
        """Read a body. Raises InvalidRequestError, which names the field at fault."""
        refuse_unsupported(body, _NEUTRAL)
        return structure(cls, body)


@attrs.frozen(kw_only=True)
class LlamaCompletionRequest(CompletionRequest):
    """``POST /completion``, llama-server's own."""

    return_tokens: bool = False
    response_fields: tuple[str, ...] = ()

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> LlamaCompletionRequest:
        """Read a body. Raises InvalidRequestError, which names the field at fault."""
        refuse_unsupported(body, {**_NEUTRAL, "echo": _only(False)})
        return structure(cls, body)


@attrs.frozen
class Ending:
    """How the prompt of a chat ends: with the head of an answer, or with one to go on with."""

    add_generation_prompt: bool = True
    go_on: Part | None = None


def _ending(body: Mapping[str, Any]) -> Ending:
    """Read ``add_generation_prompt`` and ``continue_final_message``.

    Without the second, a last message of the assistant's goes on, as in llama-server.
    """
    given = body.get("add_generation_prompt")
    add = True if given is None else convert(given, bool, "add_generation_prompt")
    value = body.get("continue_final_message")
    go_on = named(values.go_on, value, "continue_final_message") if value is not None else None
    if value is None and values.is_begun(body.get("messages")):
        return Ending(False, "auto")
    if go_on is not None and given:
        raise InvalidRequestError(
            "'continue_final_message' and 'add_generation_prompt' exclude each other.",
            param="continue_final_message",
        )
    return Ending(add and go_on is None, go_on)


@attrs.frozen(kw_only=True)
class ChatRequest(Generation):
    """``POST /v1/chat/completions``."""

    messages: tuple[dict[str, Any], ...] = attrs.field(metadata=how(read=values.messages))
    tools: tuple[dict[str, Any], ...] = attrs.field(default=(), metadata=how(read=values.tools))
    tool_choice: str = "auto"
    ending: Ending = attrs.field(metadata=how(whole=_ending))
    chat_template_kwargs: dict[str, Any] = attrs.field(
        factory=dict, metadata=how(read=values.template_kwargs)
    )
    reasoning_format: str = "auto"
    reasoning_effort: str | None = None
    logprobs: bool = False
    top_logprobs: int | None = attrs.field(default=None, metadata=how(read=values.count))

    @property
    def n_probs(self) -> int:
        """How many candidates to report for each token. llama-server's default is 20."""
        if not self.logprobs:
            return 0
        return 20 if self.top_logprobs is None else max(1, self.top_logprobs)

    @property
    def offered_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools that the model may call."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The variables of the template; ``reasoning_effort`` "none" switches thinking off."""
        if self.reasoning_effort is None:
            return self.chat_template_kwargs
        if self.reasoning_effort == "none":
            return {**self.chat_template_kwargs, "enable_thinking": False}
        return {**self.chat_template_kwargs, "reasoning_effort": self.reasoning_effort}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> ChatRequest:
        """Read a body. Raises InvalidRequestError, which names the field at fault."""
        refuse_unsupported(body, _NEUTRAL_IN_CHAT)
        parsed = structure(cls, body)
        if parsed.top_logprobs is not None and not parsed.logprobs:
            raise InvalidRequestError(
                "'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs"
            )
        return parsed


@attrs.frozen(kw_only=True)
class TemplateRequest:
    """``POST /apply-template``."""

    messages: tuple[dict[str, Any], ...] = attrs.field(metadata=how(read=values.messages))
    tools: tuple[dict[str, Any], ...] = attrs.field(default=(), metadata=how(read=values.tools))
    chat_template_kwargs: dict[str, Any] = attrs.field(
        factory=dict, metadata=how(read=values.template_kwargs)
    )
    ending: Ending = attrs.field(metadata=how(whole=_ending))


@attrs.frozen(kw_only=True)
class TokenizeRequest:
    """``POST /tokenize``."""

    content: Prompt = attrs.field(default="", metadata=how(read=values.content))
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


@attrs.frozen(kw_only=True)
class DetokenizeRequest:
    """``POST /detokenize``."""

    tokens: tuple[int, ...] = attrs.field(default=(), metadata=how(read=values.tokens))
