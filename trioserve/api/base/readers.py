"""Values in requests that take more than one form, read from JSON. Each raises `MismatchError`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import attrs

from trioserve.api.base.fields import MismatchError, integer, json_type, number, objects, strings
from trioserve.types import MAX_SCALE, SAMPLER_LETTERS, GenerationParams
from trioserve.types.checks import INT32_MAX

#: A prompt before it is tokenized: text, or token ids and text mixed.
RawPrompt: TypeAlias = str | tuple[int | str, ...]

#: A token, or text that stands for its tokens, and what is added to their logits.
Bias: TypeAlias = tuple[int | str, float]

#: The most seconds that a request may give itself: a year.
MAX_SECONDS = 365 * 86400

#: Digits of a token id, where it is a key of an object. Python reads numbers up to some length.
_MAX_DIGITS = 20

#: Prompts that one request may hold.
MAX_PROMPTS = 256

_PROMPT = {"type": ["string", "array", "object"], "items": {"type": ["string", "integer"]}}
_PROMPTS = {"anyOf": [_PROMPT, {"type": "array", "items": _PROMPT, "minItems": 1}]}


def integer_in(low: int, high: int | None = INT32_MAX) -> Callable[[Any], int]:
    """Make a reader of whole numbers in a range; None: without an upper end."""
    bounds = {"minimum": low} if high is None else {"minimum": low, "maximum": high}
    expected = f"at least {low}" if high is None else f"between {low} and {high}"

    @json_type({"type": "integer", **bounds})
    def read(value: Any) -> int:
        given = integer(value)
        if given < low or (high is not None and given > high):
            raise MismatchError(expected)
        return given

    return read


def _in_range_of(cls: type[attrs.AttrsInstance], name: str) -> Callable[[Any], int]:
    """Make a reader of whole numbers in the range that a field of a class has."""
    low, high = attrs.fields_dict(cls)[name].validator.bounds  # type: ignore[union-attr]
    return integer_in(low, high)


#: How many tokens an output may have; -1: no limit.
max_tokens = _in_range_of(GenerationParams, "max_tokens")

#: How many of something.
count = integer_in(0)

#: How many of something; -1: no limit.
budget = integer_in(-1)

#: How many outputs there are to be. The routes know the upper end.
copies = integer_in(1, None)


@json_type({"type": "string"})
def model_name(value: Any) -> str | None:
    """Read `model`. While there is one model, anything is taken for its name."""
    return value if isinstance(value, str) else None


@json_type({"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS})
def seconds(value: Any) -> float:
    """Read a length of time, in seconds."""
    if isinstance(value, int | float) and value is not True and 0 < value <= MAX_SECONDS:
        return value
    raise MismatchError(f"a number of seconds, more than 0 and at most {MAX_SECONDS}")


@json_type({"type": ["string", "array"], "items": {"type": "string"}})
def words(value: Any) -> tuple[str, ...]:
    """Read `stop`: a string or a list; empty strings stop nothing."""
    if isinstance(value, str):
        return (value,) if value else ()
    try:
        return tuple(word for word in strings(value) if word)
    except MismatchError:
        raise MismatchError("a string or a list of strings") from None


@json_type({"type": ["string", "array"], "items": {"type": "string"}})
def samplers(value: Any) -> tuple[str, ...]:
    """Read `samplers`: a list of names, or a string of letters."""
    if not isinstance(value, str):
        return strings(value)
    if unknown := sorted(set(value) - set(SAMPLER_LETTERS)):
        raise MismatchError(f"made of the letters {''.join(SAMPLER_LETTERS)}, not {unknown[0]!r}")
    return tuple(SAMPLER_LETTERS[letter] for letter in value)


@json_type({"type": "array", "items": {"type": "string"}, "minItems": 1})
def breakers(value: Any) -> tuple[str, ...]:
    """Read `dry_sequence_breakers`: a list of strings, and not empty."""
    if not strings(value):
        raise MismatchError("a list of strings, and not empty")
    return strings(value)


@json_type({"type": ["object", "array"]})
def biases(value: Any) -> tuple[Bias, ...]:
    """Read `logit_bias`: ``{"15": -1.5, "word": false}`` or ``[[15, -1.5], ["word", false]]``."""
    expected = "an object from token to bias, or a list of [token, bias]"
    pairs: Any = value
    if isinstance(value, dict):
        if any(key.isdecimal() and len(key) > _MAX_DIGITS for key in value):
            raise MismatchError(expected)
        pairs = [[int(key) if key.isdecimal() else key, bias] for key, bias in value.items()]
    elif not isinstance(value, list):
        raise MismatchError(expected)
    biases: list[Bias] = []
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise MismatchError(expected)
        token, bias = pair
        token = token if isinstance(token, str) else integer(token)
        biases.append((token, -math.inf if bias is False else number(bias)))
    return tuple(biases)


@json_type(
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "id": {"type": "integer", "minimum": 0},
                "scale": {"type": "number"},
            },
            "required": ["id"],
        },
    }
)
def lora(value: Any) -> tuple[tuple[int, float], ...]:
    """Read ``lora``: ``[{"id": 0, "scale": 0.5}]``; without a scale it is 0."""
    expected = f"a list of objects with an 'id', from 0 on, and a 'scale', at most {MAX_SCALE:.0f}"
    try:
        pairs = [(integer(each.get("id")), number(each.get("scale", 0))) for each in objects(value)]
    except MismatchError:
        raise MismatchError(expected) from None
    if not all(id_ >= 0 and -MAX_SCALE <= scale <= MAX_SCALE for id_, scale in pairs):
        raise MismatchError(expected)
    return tuple(pairs)


@json_type(_PROMPTS)
def prompts(value: Any) -> tuple[RawPrompt, ...]:
    """Read `prompt`: one prompt or a list of them.

    A prompt is a string, a list of token ids, a list of ids and strings, or an object with a
    ``prompt_string``. A list of strings alone is a list of prompts.
    """
    if not isinstance(value, list):
        return (_prompt(value),)
    if not value:
        raise MismatchError("a prompt, and not empty")
    kinds = {type(each) for each in value}
    if kinds <= {int, str} and kinds != {str}:
        return (_prompt(value),)
    if len(value) > MAX_PROMPTS:
        raise MismatchError(f"at most {MAX_PROMPTS} prompts")
    return tuple(_prompt(each) for each in value)


def _prompt(value: Any) -> RawPrompt:
    if isinstance(value, dict) and isinstance(value.get("prompt_string"), str):
        if value.get("multimodal_data"):
            raise MismatchError("text; this model reads nothing else")
        return str(value["prompt_string"])
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(each) in (int, str) for each in value):
        if not value:
            raise MismatchError("a prompt, and not empty")
        return tuple(value)
    raise MismatchError(
        "a string, a list of token ids, a list of ids and strings, or a list of such prompts"
    )


@json_type(_PROMPT)
def content(value: Any) -> RawPrompt:
    """Read text, or a list of ids and strings, which may be empty."""
    if isinstance(value, list) and not value:
        return ()
    return _prompt(value)
