"""Values in requests that take more than one form, read from JSON. Each raises `MismatchError`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import attrs

from trioserve.api.base import limits
from trioserve.api.base.fields import (
    DATA,
    NAME,
    STRING,
    MismatchError,
    check_count,
    integer,
    integer_in,
    json_type,
    list_schema,
    number,
    object_schema,
    objects,
    strings,
    text,
)
from trioserve.chat.markers import media_marker, split_at
from trioserve.chat.messages import MAX_PARTS, parse_media_part, source_of
from trioserve.server.prompts.media import MixedPrompt
from trioserve.types import (
    MAX_OUTPUTS,
    MAX_SALT,
    MAX_SCALE,
    SAMPLER_LETTERS,
    GenerationParams,
    MediaSource,
)
from trioserve.whole_numbers import whole_number

#: A prompt before it is tokenized: text, or token ids and text mixed.
RawPrompt: TypeAlias = str | tuple[int | str, ...]

#: A prompt that may have media in it.
GivenPrompt: TypeAlias = RawPrompt | MixedPrompt

#: A token, or text that stands for its tokens, and what is added to their logits.
Bias: TypeAlias = tuple[int | str, float]

#: The longest timeout that a request may set, in seconds: a year.
MAX_SECONDS = 365 * 86400

#: The JSON of a `RawPrompt`.
RAW = {
    **STRING,
    "type": ["string", "array"],
    "items": {**STRING, "type": ["string", "integer"]},
    "maxItems": limits.MAX_PROMPT_TOKENS,
}
_PROMPT = {
    **RAW,
    "type": ["string", "array", "object"],
    "properties": {
        "prompt_string": STRING,
        "multimodal_data": list_schema(DATA, MAX_PARTS),
    },
    "description": "Text, token ids, or text with a marker for each of the media, which are in "
    "base64. It must fit into the context of the model.",
}
_PROMPTS = {"anyOf": [_PROMPT, list_schema(_PROMPT, limits.MAX_PROMPTS, minItems=1)]}


def _in_range_of(cls: type[attrs.AttrsInstance], name: str) -> Callable[[Any], int]:
    """Make a reader of whole numbers in the range that a field of a class has."""
    low, high = attrs.fields_dict(cls)[name].validator.bounds  # type: ignore[union-attr]
    return integer_in(low, high)


#: A maximum number of output tokens; -1: no limit.
max_tokens = _in_range_of(GenerationParams, "max_tokens")
draft_max = _in_range_of(GenerationParams, "draft_max")

#: A count.
count = integer_in(0)

#: A count; -1: no limit.
budget = integer_in(-1)


@json_type(
    {
        "type": "integer",
        "description": "The seed of the random numbers; -1: a new one. Of larger numbers, the "
        "lowest 32 bits count.",
    }
)
def seed(value: Any) -> int:
    """Read a seed. Clients send up to 64 bits, and llama.cpp takes 32."""
    given = integer(value)
    return given if given == -1 else given % 2**32


#: A number of candidates to report for each token.
probs = integer_in(0, limits.MAX_PROBS)

#: The number of outputs, or of answers in a run. Each route has its own maximum.
copies = integer_in(1, MAX_OUTPUTS)


@json_type(NAME)
def model_name(value: Any) -> str | None:
    """Read `model`. While there is one model, anything is taken for its name."""
    return value if isinstance(value, str) else None


@json_type({"anyOf": [NAME, object_schema("id", id=NAME)]})
def voice_name(value: Any) -> str:
    """Read `voice`: a name, or an object with it."""
    name = value.get("id") if isinstance(value, dict) else value
    if not isinstance(name, str) or not name:
        raise MismatchError("the name of a voice, or an object with the name as its 'id'")
    return name


@json_type({"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS})
def seconds(value: Any) -> float:
    """Read a length of time, in seconds."""
    if isinstance(value, int | float) and value is not True and 0 < value <= MAX_SECONDS:
        return value
    raise MismatchError(f"a number of seconds, more than 0 and at most {MAX_SECONDS}")


#: A length of time as Go writes it, which Ollama's clients send: ``1h30m``, ``-1s``. Without a
#: unit it is in seconds.
_AMOUNT = r"\d{1,12}(?:\.\d{0,12})?"
_DURATION = re.compile(rf"(-?)({_AMOUNT}|(?:{_AMOUNT}(?:h|ms|m|s|us|µs|ns))+)", re.ASCII)
_UNITS = {"h": 3600, "m": 60, "s": 1, "": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


@json_type(
    {
        "type": ["number", "string"],
        "description": "For how long the model stays in memory after the request, idle: seconds, "
        "or a duration such as 5m or 1h30m. Below 0: for ever.",
        "maxLength": 64,
        "examples": [300, "5m", 0, -1],
    }
)
def keep_alive(value: Any) -> float:
    """Read `keep_alive`, which Ollama has: seconds, or a duration in Go's form."""
    if not isinstance(value, str):
        return number(value)
    match = _DURATION.fullmatch(value[:65])
    if match is None:
        raise MismatchError("a number of seconds, or a duration such as '5m' or '1h30m'")
    parts = re.findall(r"([\d.]+)([a-zµ]*)", match[2])
    total = sum(float(amount) * _UNITS[unit] for amount, unit in parts)
    return -total if match[1] else total


def text_of(limit: int) -> Callable[[Any], str]:
    """Make a reader of strings of at most `limit` characters."""

    @json_type({"type": "string", "maxLength": limit})
    def read(value: Any) -> str:
        if not isinstance(value, str) or len(value) > limit:
            raise MismatchError(f"a string of at most {limit} characters")
        return value

    return read


salt = text_of(MAX_SALT)


@json_type(NAME)
def name(value: Any) -> str:
    """Read a name or an id."""
    return text(value)


@json_type(
    {
        "type": "number",
        "description": "Seconds of silence before a ping: at least "
        f"{limits.MIN_PING_INTERVAL:g}, or not more than 0 for none.",
    }
)
def ping_interval(value: Any) -> float:
    """Read `sse_ping_interval`."""
    interval = number(value)
    if 0 < interval < limits.MIN_PING_INTERVAL:
        raise MismatchError(f"at least {limits.MIN_PING_INTERVAL:g}, or not more than 0 for none")
    return interval


def strings_of(limit: int, length: int = limits.MAX_NAME) -> Callable[[Any], tuple[str, ...]]:
    """Make a reader of a list of at most `limit` strings, of at most `length` characters each."""
    return json_type(list_schema({**NAME, "maxLength": length}, limit))(
        lambda value: strings(value)
    )


_STOP = {"type": "string", "maxLength": limits.MAX_STOP_CHARS}


@json_type(list_schema(_STOP, limits.MAX_STOPS))
def stop_sequences(value: Any) -> tuple[str, ...]:
    """Read a list of strings that end the output; empty ones have no effect."""
    return tuple(word for word in strings(value) if word)


@json_type({**_STOP, "type": ["string", "array"], "items": _STOP, "maxItems": limits.MAX_STOPS})
def words(value: Any) -> tuple[str, ...]:
    """Read `stop`: a string or a list of them."""
    if not isinstance(value, str | list) or not all(isinstance(each, str) for each in value):
        raise MismatchError("a string or a list of strings")
    return stop_sequences([value] if isinstance(value, str) else value)


@json_type(
    {
        "type": ["string", "array"],
        "items": NAME,
        "maxItems": limits.MAX_SAMPLERS,
        "maxLength": limits.MAX_SAMPLERS,
    }
)
def samplers(value: Any) -> tuple[str, ...]:
    """Read `samplers`: a list of names, or a string of letters."""
    if not isinstance(value, str):
        return strings(value)
    if unknown := sorted(set(value) - set(SAMPLER_LETTERS)):
        raise MismatchError(f"made of the letters {''.join(SAMPLER_LETTERS)}, not {unknown[0]!r}")
    return tuple(SAMPLER_LETTERS[letter] for letter in value)


_BREAKER = {**NAME, "maxLength": limits.MAX_BREAKER_CHARS}


@json_type(list_schema(_BREAKER, limits.MAX_BREAKERS, minItems=1))
def breakers(value: Any) -> tuple[str, ...]:
    """Read `dry_sequence_breakers`: a list of strings, and not empty."""
    if not (given := strings(value)):
        raise MismatchError("a list of strings, and not empty")
    return given


@json_type(
    {
        "type": ["object", "array"],
        "items": list_schema(
            {"type": ["string", "number", "boolean"], "maxLength": limits.MAX_BIAS_CHARS}, 2
        ),
        "maxProperties": limits.MAX_BIASES,
        "maxItems": limits.MAX_BIASES,
        "description": f"From token to bias; at most {limits.MAX_TEXT_BIASES} tokens are given as "
        f"text, of at most {limits.MAX_BIAS_CHARS} characters.",
    }
)
def biases(value: Any) -> tuple[Bias, ...]:
    """Read `logit_bias`: ``{"15": -1.5, "word": false}`` or ``[[15, -1.5], ["word", false]]``."""
    expected = "an object from token to bias, or a list of [token, bias]"
    pairs: Any = value
    if isinstance(value, dict):
        pairs = [
            [key if (n := whole_number(key)) is None else n, bias] for key, bias in value.items()
        ]
    elif not isinstance(value, list):
        raise MismatchError(expected)
    biases: list[Bias] = []
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise MismatchError(expected)
        token, bias = pair
        token = token if isinstance(token, str) else integer(token)
        biases.append((token, -math.inf if bias is False else number(bias)))
    texts = [token for token, _ in biases if isinstance(token, str)]
    check_count(len(texts), limits.MAX_TEXT_BIASES, "biases of text")
    if any(len(text) > limits.MAX_BIAS_CHARS for text in texts):
        raise MismatchError(f"biases of text of at most {limits.MAX_BIAS_CHARS} characters")
    return tuple(biases)


_ADAPTER = object_schema("id", id={"type": "integer", "minimum": 0}, scale={"type": "number"})


@json_type(list_schema(_ADAPTER, limits.MAX_ADAPTERS))
def lora(value: Any) -> tuple[tuple[int, float], ...]:
    """Read ``lora``: ``[{"id": 0, "scale": 0.5}]``; without a scale it is 0."""
    expected = f"a list of objects with an 'id', from 0 on, and a 'scale', at most {MAX_SCALE:.0f}"
    if isinstance(value, list):
        check_count(len(value), limits.MAX_ADAPTERS, "adapters")
    try:
        pairs = [(integer(each.get("id")), number(each.get("scale", 0))) for each in objects(value)]
    except MismatchError:
        raise MismatchError(expected) from None
    if not all(id_ >= 0 and -MAX_SCALE <= scale <= MAX_SCALE for id_, scale in pairs):
        raise MismatchError(expected)
    return tuple(pairs)


@json_type(_PROMPTS)
def prompts(value: Any) -> tuple[GivenPrompt, ...]:
    """Read `prompt`: one prompt or a list of them.

    A prompt is a string, a list of token ids, a list of ids and strings, or an object with a
    ``prompt_string`` and perhaps ``multimodal_data``. A list of strings alone is a list of prompts.

    Raises:
        InvalidRequestError: media cannot be read; `param` names them.
    """
    return one_or_many(value, any_prompt, "prompt", (limits.MAX_PROMPTS, "prompts"), "a prompt")


def one_or_many(
    value: Any,
    read: Callable[[Any, str], GivenPrompt],
    name: str,
    limits_of: tuple[int, str],
    expected: str,
) -> tuple[GivenPrompt, ...]:
    """Read a prompt or a list of them, in the field `name`; `read` takes one and its place.

    A list of token ids, or of ids and strings, is one. `limits_of` says how many of what there may
    be.
    """
    if not isinstance(value, list):
        return (read(value, name),)
    if not value:
        raise MismatchError(f"{expected}, and not empty")
    kinds = {type(each) for each in value}
    if kinds <= {int, str} and kinds != {str}:
        return (read(value, name),)
    check_count(len(value), *limits_of)
    return tuple(read(each, f"{name}[{i}]") for i, each in enumerate(value))


def joined(parts: Sequence[dict[str, Any]], path: str) -> GivenPrompt:
    """Put the parts of a text together, which may be media.

    Raises:
        MismatchError: a part is of another type.
        InvalidRequestError: media cannot be read; `param` names them.
    """
    check_count(len(parts), MAX_PARTS, "parts")
    found = [_part(part, f"{path}[{i}]") for i, part in enumerate(parts)]
    texts = [part for part in found if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(found) else MixedPrompt(found)


def _part(part: dict[str, Any], path: str) -> str | MediaSource:
    kind = part.get("type")
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    read = parse_media_part(kind, part, path) if isinstance(kind, str) else None
    if read is None or read["type"] != "media":
        raise MismatchError("made of parts of the types text, image_url, input_audio and video_url")
    source: MediaSource = read["media"]
    return source


def any_prompt(value: Any, path: str) -> GivenPrompt:
    """Read a prompt in which markers may stand for media, in base64.

    Raises:
        MismatchError: it is something else.
        InvalidRequestError: media cannot be read; `param` names them.
    """
    if not isinstance(value, dict) or value.get("multimodal_data") is None:
        return _prompt(value)
    text, data = value.get("prompt_string"), value["multimodal_data"]
    if not isinstance(text, str) or not isinstance(data, list):
        raise MismatchError("an object with a 'prompt_string' and a list of 'multimodal_data'")
    check_count(len(data), MAX_PARTS, "media")
    sources = [source_of(each, None, f"{path}.multimodal_data[{i}]") for i, each in enumerate(data)]
    parts = split_at(text, media_marker(), sources, f"{path}.prompt_string")
    return MixedPrompt(parts) if sources else text


def _prompt(value: Any) -> RawPrompt:
    if isinstance(value, dict) and isinstance(value.get("prompt_string"), str):
        if value.get("multimodal_data"):
            raise MismatchError("text; there is no place for media here")
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
