"""The schemas of answers that several routes have in common, for `trioserve.api.openapi`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trioserve.api.base.fields import OBJECT, Schema, answer, or_null

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer"}
FIGURE: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
#: A file, or what another server has answered.
BYTES: Schema = {"type": "string", "format": "binary"}


def record(*optional: str, **fields: Mapping[str, Any]) -> Schema:
    """Describe an object that has these fields; some of them may be missing."""
    required = [name for name in fields if name not in optional]
    return {"type": "object", "properties": fields, "required": required}


def each(items: Mapping[str, Any]) -> Schema:
    """Describe a list."""
    return {"type": "array", "items": items}


def texts(*known: str) -> Schema:
    """Describe a text that has one of a few values."""
    return {"type": "string", "enum": list(known)}


def either(*kinds: Mapping[str, Any]) -> Schema:
    """Describe a value that has one of several forms."""
    return {"anyOf": list(kinds)}


SUCCESS = answer("Success", record("message", success=FLAG, message=TEXT))
HEALTH = answer("Health", record(status=TEXT))
INPUT_TOKENS = answer("InputTokens", record("object", input_tokens=COUNT, object=TEXT))

TIMINGS = answer(
    "Timings",
    record(
        "draft_n",
        "draft_n_accepted",
        cache_n=COUNT,
        prompt_n=COUNT,
        prompt_ms=FIGURE,
        prompt_per_token_ms=FIGURE,
        prompt_per_second=FIGURE,
        predicted_n=COUNT,
        predicted_ms=FIGURE,
        predicted_per_token_ms=FIGURE,
        predicted_per_second=FIGURE,
        draft_n=COUNT,
        draft_n_accepted=COUNT,
    ),
)
USAGE = answer(
    "Usage",
    record(
        completion_tokens=COUNT,
        prompt_tokens=COUNT,
        total_tokens=COUNT,
        prompt_tokens_details=record(cached_tokens=COUNT),
    ),
)
PROMPT_USAGE = answer("PromptUsage", record(prompt_tokens=COUNT, total_tokens=COUNT))

_CANDIDATE = {"id": COUNT, "token": TEXT, "bytes": each(COUNT), "logprob": FIGURE, "prob": FIGURE}
CANDIDATE = answer("Candidate", record("logprob", "prob", **_CANDIDATE))
TOKEN_PROBS = answer(
    "TokenProbs",
    record(
        *("logprob", "prob", "top_logprobs", "top_probs"),
        **_CANDIDATE,
        top_logprobs=each(CANDIDATE),
        top_probs=each(CANDIDATE),
    ),
)

#: How a request is continued, with all defaults.
SETTINGS = answer("GenerationSettings", OBJECT)

_OUTPUT: Mapping[str, Schema] = {
    "index": COUNT,
    "content": TEXT,
    "tokens": each(COUNT),
    "id_slot": COUNT,
    "stop": FLAG,
    "model": TEXT,
    "tokens_predicted": COUNT,
    "tokens_evaluated": COUNT,
    "generation_settings": SETTINGS,
    "prompt": TEXT,
    "has_new_line": FLAG,
    "truncated": FLAG,
    "stop_type": TEXT,
    "stopping_word": TEXT,
    "tokens_cached": COUNT,
    "timings": TIMINGS,
    "completion_probabilities": each(TOKEN_PROBS),
}
#: An output in llama-server's form. `response_fields` chooses fields, also by paths in others.
OUTPUT = answer(
    "Output",
    {"type": "object", "properties": _OUTPUT, "additionalProperties": True},
)

ARCHITECTURE = record(input_modalities=each(TEXT), output_modalities=each(TEXT))
GUIDANCE: Mapping[str, Schema] = {
    "is_toy": FLAG,
    "example_prompts": each(TEXT),
    "has_chat_template": or_null(FLAG),
    "context_advice": or_null(TEXT),
    "suggested_tools": each(TEXT),
}
PROPERTIES = answer(
    "Properties",
    {
        "type": "object",
        "properties": {
            "default_generation_settings": record(params=SETTINGS, n_ctx=COUNT),
            "total_slots": COUNT,
            "model_alias": TEXT,
            "model_path": TEXT,
            "chat_template": TEXT,
            "build_info": TEXT,
            "is_sleeping": FLAG,
            **GUIDANCE,
        },
        "additionalProperties": True,
    },
)
#: The groups are described on the page about operations.
METRICS = answer("Metrics", {**record(object=texts("metrics")), "additionalProperties": True})
