"""The fields of every request that generates text, and what they change in `GenerationParams`.

Names, aliases and defaults are llama-server's and OpenAI's. Unknown fields are ignored, as both do.
A known field that has no effect here is refused, unless its value asks for what happens anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, cast

import attrs

from trioserve.api.base import readers
from trioserve.api.base.fields import READERS, Only, RequestBody, field, json_type, named, types_of
from trioserve.api.base.grammars import read_grammar
from trioserve.api.base.readers import Bias
from trioserve.api.base.request_schemas import of_fields
from trioserve.types import GenerationParams, Grammar, SamplingParams

# -- fields without effect


#: Known fields without effect on all routes; see `RequestBody.unsupported`.
_UNSUPPORTED: Mapping[str, Only] = {
    "adapters": Only([]),
    "allowed_token_ids": Only([]),
    "audio": Only(),
    "bad_words": Only([]),
    "backend_sampling": Only(False, harmless="samplers run where the flags say, with one result"),
    "function_call": Only("auto", "none"),
    "functions": Only([]),
    "grammar_lazy": Only(False),
    "grammar_triggers": Only([]),
    "image_data": Only([]),
    "include_stop_str_in_output": Only(False),
    "modalities": Only(["text"]),
    "moderation": Only(),
    "n_cache_reuse": Only(0, harmless="the cache finds the longest beginning of a prompt"),
    "preserved_tokens": Only([]),
    "return_token_ids": Only(False),
    "return_tokens_as_token_ids": Only(False),
    "stop_token_ids": Only([]),
    "truncate_prompt_tokens": Only(),
    "use_beam_search": Only(False),
    "web_search_options": Only(harmless="only tools search the web"),
}

#: On routes that continue text. A chat's template tells where reasoning and calls are.
UNSUPPORTED: Mapping[str, Only] = {
    **_UNSUPPORTED,
    "parallel_tool_calls": Only(True, harmless="without tools, there are no calls"),
    "reasoning_budget_tokens": Only(-1),
    "reasoning_control": Only(False),
    "thinking_budget_tokens": Only(-1),
    "trioserve_run_tools": Only(False),
}
UNSUPPORTED_IN_LLAMA: Mapping[str, Only] = {
    **UNSUPPORTED,
    "best_of": Only(1),
    "echo": Only(False),
    "prompt_logprobs": Only(),
    "suffix": Only(""),
}
UNSUPPORTED_IN_CHAT: Mapping[str, Only] = {
    **_UNSUPPORTED,
    "best_of": Only(1),
    "suffix": Only(""),
}


#: Known fields that are taken without effect, because one machine with one model has no use for
#: them: what they are for, by name. None of them changes what an answer should say.
ACCEPTED: Mapping[str, str] = {
    "metadata": "labels of stored chats; others have none",
    "model": "there is one model, and answers have its name",
    "prediction": "expected text that would speed up the answer; the answer is the same without",
    "prompt_cache_key": "the cache finds prompts by their tokens",
    "prompt_cache_options": "flags configure the cache",
    "prompt_cache_retention": "the cache keeps what fits",
    "safety_identifier": "identifies an end user to a provider",
    "service_tier": "there is one tier",
    "store": "chats are stored; other answers of this route are not",
    "user": "like safety_identifier",
}


# -- the fields


#: Scalars that separate fields below read.
_WITH_FIELDS = frozenset({"max_tokens", "draft_max", "n_probs", "return_progress", "seed"})

#: The readers of the other numbers and booleans of `GenerationParams` and `SamplingParams`.
_SCALARS: Mapping[str, Callable[[Any], Any]] = {
    name: READERS[type_]
    for cls in (GenerationParams, SamplingParams)
    for name, type_ in types_of(cls).items()
    if type_ in (int, float, bool) and name not in _WITH_FIELDS
}


@json_type(
    properties={
        name: schema
        for cls in (GenerationParams, SamplingParams)
        for name, schema in of_fields(cls, _SCALARS).items()
    }
)
def _read_scalars(body: Mapping[str, Any]) -> dict[str, Any]:
    scalars = {
        name: named(read, body[name], name)
        for name, read in _SCALARS.items()
        if body.get(name) is not None
    }
    if scalars.get("dry_base", 1.0) < 1.0:
        del scalars["dry_base"]  # llama-server takes its default then
    if scalars.get("t_max_predict_ms", 0) < 0:
        scalars["t_max_predict_ms"] = 0
    return scalars


@cache
def _params_in(cls: type) -> tuple[str, ...]:
    """The fields of a request class that are fields of the parameters, too."""
    names = {*types_of(GenerationParams), *types_of(SamplingParams)} - {"return_progress"}
    return tuple(name for name in attrs.fields_dict(cls) if name in names)


@attrs.frozen(kw_only=True)
class StreamOptions:
    """Options of a streamed response."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # in each chunk


@attrs.frozen(kw_only=True, slots=False)  # without slots, a class can inherit from two of these
class GenerationRequest(RequestBody):
    """The fields of every route that generates text."""

    model: str | None = field(read=readers.model_name, default=None)
    stream: bool = False
    stream_options: StreamOptions = attrs.field(factory=StreamOptions)
    timeout: float | None = field(read=readers.seconds, default=None)
    keep_alive: float | None = field(read=readers.keep_alive, default=None)
    sse_ping_interval: float | None = field(read=readers.ping_interval, default=None)
    queue_comments: bool = False  # tell the place in the queue, in comments of the stream
    timings_per_token: bool = False
    verbose: bool | None = None  # None: as the log level says
    return_progress: bool = False
    max_tokens: int | None = field(
        "n_predict", "max_completion_tokens", "max_tokens", read=readers.max_tokens, default=None
    )
    draft_max: int | None = field("speculative.n_max", read=readers.draft_max, default=None)
    n: int = field("n_cmpl", "n", read=readers.copies, default=1)
    stop: tuple[str, ...] | None = field(read=readers.words, default=None)
    samplers: tuple[str, ...] | None = field(read=readers.samplers, default=None)
    dry_sequence_breakers: tuple[str, ...] | None = field(read=readers.breakers, default=None)
    logit_bias: tuple[Bias, ...] | None = field(read=readers.biases, default=None)
    lora: tuple[tuple[int, float], ...] | None = field(read=readers.lora, default=None)
    seed: int | None = field(read=readers.seed, default=None)
    cache_salt: str | None = field(read=readers.salt, default=None)
    grammar: Grammar | None = field(whole=read_grammar, default=None)
    scalars: dict[str, Any] = field(whole=_read_scalars, factory=dict)

    @property
    def asked_probs(self) -> tuple[int, str | None]:
        """The number of candidates to report for each token, and the field that sets it, if any."""
        return 0, None

    @property
    def n_probs(self) -> int:
        return self.asked_probs[0]

    #: `Config.max_logprobs` bounds their number.
    has_max_logprobs: ClassVar[bool] = True

    @property
    def n_copies(self) -> int:
        """The outputs of each prompt."""
        return self.n

    @property
    def wants_progress(self) -> bool:
        wants = self.return_progress or self.timings_per_token
        return self.stream and (wants or self.stream_options.continuous_usage_stats)

    def given_params(self) -> dict[str, Any]:
        """The fields of `GenerationParams` and `SamplingParams` that the request sets."""
        params = dict(self.scalars)
        for name in _params_in(cast(Any, type(self))):
            if (value := getattr(self, name)) is not None:
                params[name] = value
        if self.n_probs:
            params["n_probs"] = self.n_probs
        if self.wants_progress:
            params["return_progress"] = True
        return params
