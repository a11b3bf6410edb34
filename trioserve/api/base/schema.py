"""What requests may hold: one frozen class a route, made by `fields.structure`.

Names, aliases and defaults are llama-server's and OpenAI's. Fields that nobody knows are ignored,
as both do. A field that is known but has no effect here is refused (`trioserve.api.base.neutral`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import attrs

from trioserve.api.base import shapes, values
from trioserve.api.base.fields import convert, how, json_type, named, structure, types_of
from trioserve.api.base.json_types import of_fields
from trioserve.api.base.neutral import (
    NEUTRAL,
    NEUTRAL_IN_CHAT,
    NEUTRAL_IN_LLAMA,
    refuse_unsupported,
)
from trioserve.api.base.values import Bias, Prompt
from trioserve.chat.template.continuation import ContinueFinalMessage
from trioserve.chat.tool_choice import ToolChoice
from trioserve.errors import InvalidRequestError
from trioserve.types import GenerationParams, Grammar, SamplingParams

# -- what all generating routes share

_SCALARS: Mapping[str, Any] = {
    name: type_
    for cls in (GenerationParams, SamplingParams)
    for name, type_ in types_of(cls).items()
    if type_ in (int, float, bool)
}
_READ_BY_ROUTE = frozenset({"max_tokens", "n_probs", "return_progress"})


@json_type(
    properties={
        name: schema
        for cls in (GenerationParams, SamplingParams)
        for name, schema in of_fields(cls, _SCALARS.keys() - _READ_BY_ROUTE).items()
    }
)
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


@json_type(
    properties={
        "grammar": {"type": "string"},
        "json_schema": {"type": ["object", "boolean"]},
        "response_format": {"type": "object"},
    }
)
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
        if value is not None and (grammar := shapes.grammar(name, value)) is not None
    ]
    if len(grammars) > 1:
        first, second = grammars[0].param, grammars[1].param
        raise InvalidRequestError(f"'{first}' and '{second}' exclude each other.", param=second)
    return grammars[0] if grammars else None


#: Fields that `Server.options` takes as their readers make them.
_WITH_READERS = ("max_tokens", "stop", "samplers", "dry_sequence_breakers", "lora", "grammar")


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
    n: int = attrs.field(default=1, metadata=how("n_cmpl", "n", read=values.copies))
    stop: tuple[str, ...] | None = attrs.field(default=None, metadata=how(read=values.words))
    samplers: tuple[str, ...] | None = attrs.field(default=None, metadata=how(read=values.samplers))
    dry_sequence_breakers: tuple[str, ...] | None = attrs.field(
        default=None, metadata=how(read=values.breakers)
    )
    logit_bias: tuple[Bias, ...] | None = attrs.field(
        default=None, metadata=how(read=values.biases)
    )
    lora: tuple[tuple[int, float], ...] | None = attrs.field(
        default=None, metadata=how(read=values.lora)
    )
    grammar: Grammar | None = attrs.field(metadata=how(whole=_grammar))
    others: dict[str, Any] = attrs.field(metadata=how(whole=_settings))

    @property
    def n_probs(self) -> int:
        """How many candidates to report for each token."""
        return 0

    @property
    def n_copies(self) -> int:
        """How many times each prompt is continued."""
        return self.n

    @property
    def wants_progress(self) -> bool:
        """Whether the engine is to report its progress in the prompt."""
        return self.stream and (self.return_progress or self.timings_per_token)

    def settings(self) -> dict[str, Any]:
        """What `Server.options` takes, except `logit_bias`."""
        settings = dict(self.others)
        for name in _WITH_READERS:
            if (value := getattr(self, name)) is not None:
                settings[name] = value
        if self.n_probs:
            settings["n_probs"] = self.n_probs
        if self.wants_progress:
            settings["return_progress"] = True
        return settings


# -- the routes


@attrs.frozen(kw_only=True)
class TextRequest(Generation):
    """What the routes that continue text have in common."""

    logprobs: int = attrs.field(default=0, metadata=how("n_probs", "logprobs", read=values.count))

    @property
    def n_probs(self) -> int:
        """How many candidates to report for each token."""
        return self.logprobs


@attrs.frozen(kw_only=True)
class CompletionRequest(TextRequest):
    """``POST /v1/completions``."""

    prompts: tuple[Prompt, ...] = attrs.field(metadata=how("prompt", read=values.prompts))
    suffix: str = ""
    echo: bool = False
    best_of: int | None = attrs.field(default=None, metadata=how(read=values.copies))

    @property
    def n_copies(self) -> int:
        """How many times each prompt is continued; `best_of` are made to choose from."""
        return self.n if self.best_of is None else self.best_of

    @property
    def n_probs(self) -> int:
        """How many candidates to report for each token; a choice needs the token's own."""
        return self.logprobs or int(self.n_copies > self.n)

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> CompletionRequest:
        """Read a body. Raises InvalidRequestError, which names the field at fault."""
        refuse_unsupported(body, NEUTRAL)
        parsed = structure(cls, body)
        if parsed.best_of is not None:
            _check_best_of(parsed, parsed.best_of)
        for other, given in (("suffix", parsed.suffix), ("logprobs", parsed.logprobs)):
            if parsed.echo and given:
                raise InvalidRequestError(f"'echo' and '{other}' exclude each other.", param="echo")
        return parsed


def _check_best_of(wanted: CompletionRequest, best_of: int) -> None:
    if best_of < wanted.n:
        raise InvalidRequestError("'best_of' must be at least 'n'.", param="best_of")
    if best_of > wanted.n and wanted.stream:
        raise InvalidRequestError("'best_of' cannot be streamed.", param="best_of")
    if best_of > wanted.n and wanted.others.get("post_sampling_probs"):
        raise InvalidRequestError(
            "'best_of' goes by the probabilities before sampling, "
            "and 'post_sampling_probs' asks for others.",
            param="best_of",
        )


@attrs.frozen(kw_only=True)
class LlamaRequest(TextRequest):
    """What llama-server's own routes add."""

    return_tokens: bool = False
    response_fields: tuple[str, ...] = ()

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Read a body. Raises InvalidRequestError, which names the field at fault."""
        refuse_unsupported(body, NEUTRAL_IN_LLAMA)
        return structure(cls, body)


@attrs.frozen(kw_only=True)
class LlamaCompletionRequest(LlamaRequest):
    """``POST /completion``."""

    prompts: tuple[Prompt, ...] = attrs.field(metadata=how("prompt", read=values.prompts))


@attrs.frozen(kw_only=True)
class InfillRequest(LlamaRequest):
    """``POST /infill``: text with a gap. `prompt` is what the gap begins with."""

    input_prefix: Prompt = attrs.field(metadata=how(read=values.content))
    input_suffix: Prompt = attrs.field(metadata=how(read=values.content))
    input_extra: tuple[values.File, ...] = attrs.field(
        default=(), metadata=how(read=values.extra_files)
    )
    prompt: str = ""


@attrs.frozen
class Ending:
    """How the prompt of a chat ends: with the head of an answer, or with one to go on with.

    With `echo` the answer has what it goes on with, too.
    """

    add_generation_prompt: bool = True
    continue_final_message: ContinueFinalMessage | None = None
    echo: bool = False


@json_type(
    properties={
        "add_generation_prompt": {"type": "boolean"},
        "continue_final_message": {"enum": [True, False, "content", "reasoning_content"]},
    }
)
def _ending(body: Mapping[str, Any]) -> Ending:
    """Read ``add_generation_prompt``, ``continue_final_message`` and ``echo``.

    Without the second, a last message of the assistant's goes on, and is echoed, as in
    llama-server.
    """
    given = body.get("add_generation_prompt")
    add = True if given is None else convert(given, bool, "add_generation_prompt")
    value = body.get("continue_final_message")
    continue_final_message = (
        named(values.continue_final_message, value, "continue_final_message")
        if value is not None
        else None
    )
    echo = body.get("echo")
    echoes = value is None if echo is None else convert(echo, bool, "echo")
    if value is None and values.is_begun(body.get("messages")):
        return Ending(False, "auto", echoes)
    if continue_final_message is not None and given:
        raise InvalidRequestError(
            "'continue_final_message' and 'add_generation_prompt' exclude each other.",
            param="continue_final_message",
        )
    return Ending(
        add and continue_final_message is None,
        continue_final_message,
        echoes and continue_final_message is not None,
    )


def _variables(
    kwargs: Mapping[str, Any], effort: str | None, verbosity: str | None
) -> dict[str, Any]:
    """Make the variables of a template; an effort of "none" switches thinking off."""
    variables = dict(kwargs)
    if verbosity is not None:
        variables["verbosity"] = verbosity
    if effort == "none":
        variables["enable_thinking"] = False
    elif effort is not None:
        variables["reasoning_effort"] = effort
    return variables


@attrs.frozen(kw_only=True)
class ChatRequest(Generation):
    """``POST /v1/chat/completions``."""

    messages: tuple[dict[str, Any], ...] = attrs.field(metadata=how(read=values.messages))
    tools: tuple[dict[str, Any], ...] = attrs.field(default=(), metadata=how(read=values.tools))
    tool_choice: ToolChoice = attrs.field(factory=ToolChoice, metadata=how(read=values.tool_choice))
    parallel_tool_calls: bool | None = None
    parse_tool_calls: bool = True
    ending: Ending = attrs.field(metadata=how(whole=_ending))
    chat_template_kwargs: dict[str, Any] = attrs.field(
        factory=dict, metadata=how(read=values.template_kwargs)
    )
    reasoning_format: str | None = None
    reasoning_budget: int = attrs.field(
        default=-1,
        metadata=how("reasoning_budget_tokens", "thinking_budget_tokens", read=values.budget),
    )
    reasoning_budget_message: str | None = None
    reasoning_control: bool = False
    reasoning_effort: str | None = None
    verbosity: str | None = None
    logprobs: bool = False
    top_logprobs: int | None = attrs.field(default=None, metadata=how(read=values.count))
    n_candidates: int = attrs.field(default=0, metadata=how("n_probs", read=values.count))

    @property
    def n_probs(self) -> int:
        """How many candidates to report for each token. llama-server's default is 20."""
        if not self.logprobs:
            return self.n_candidates
        return 20 if self.top_logprobs is None else max(1, self.top_logprobs)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The variables of the template."""
        return _variables(self.chat_template_kwargs, self.reasoning_effort, self.verbosity)

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> ChatRequest:
        """Read a body. Raises InvalidRequestError, which names the field at fault."""
        refuse_unsupported(body, NEUTRAL_IN_CHAT)
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
    reasoning_effort: str | None = None
    verbosity: str | None = None
    ending: Ending = attrs.field(metadata=how(whole=_ending))

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The variables of the template."""
        return _variables(self.chat_template_kwargs, self.reasoning_effort, self.verbosity)


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
