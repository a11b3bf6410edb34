"""The schemas of answers that several routes have in common, for `trioserve.api.openapi`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trioserve.api.base.answers import schema_of
from trioserve.api.base.fields import OBJECT, Schema, answer, or_null
from trioserve.api.base.output import Output
from trioserve.api.base.scores import TokenProbs
from trioserve.api.base.timings import Timings
from trioserve.api.base.usage import PromptUsage, Usage

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer"}
FIGURE: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}


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


def ref(type_: Any) -> Schema:
    """The schema of the type of an answer."""
    components: dict[str, Any] = {}
    schema: Schema = schema_of(type_, components)
    for name, one in components.items():
        answer(name, one)
    return schema


TIMINGS, USAGE, PROMPT_USAGE, TOKEN_PROBS, OUTPUT = map(
    ref, (Timings, Usage, PromptUsage, TokenProbs, Output)
)
SETTINGS = OBJECT
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
