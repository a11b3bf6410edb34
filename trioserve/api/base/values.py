"""Values in requests that take more than one form, read from JSON. Each raises `MismatchError`."""

from __future__ import annotations

import math
from typing import Any, TypeAlias, cast

import attrs

from trioserve.api.base.fields import (
    MismatchError,
    integer,
    json_type,
    mapping,
    number,
    objects,
    strings,
)
from trioserve.chat.template.continuation import ContinueFinalMessage
from trioserve.chat.tool_choice import MODES, ToolChoice
from trioserve.errors import InvalidRequestError
from trioserve.types import MAX_SCALE, SAMPLER_LETTERS

#: A prompt before it is tokenized: text, or token ids and text mixed.
Prompt: TypeAlias = str | tuple[int | str, ...]

#: A token, or text that stands for its tokens, and what is added to their logits.
Bias: TypeAlias = tuple[int | str, float]


@attrs.frozen
class File:
    """A file beside the one with a gap."""

    name: str
    text: str


#: The name of a file that has none, as in llama-server.
_NO_NAME = "tmp"

_INT32_MAX = 2**31 - 1

#: The most seconds that a request may give itself: a year.
MAX_SECONDS = 365 * 86400

#: Prompts that one request may hold.
MAX_PROMPTS = 256

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "examples": ["system", "user", "assistant", "tool"]},
        "content": {"type": ["string", "array", "null"], "items": _TEXT_PART},
        "reasoning_content": {"type": ["string", "null"]},
        "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
        "tool_call_id": {"type": ["string", "null"]},
    },
    "required": ["role"],
}
_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
_PROMPT = {"type": ["string", "array", "object"], "items": {"type": ["string", "integer"]}}
_PROMPTS = {"anyOf": [_PROMPT, {"type": "array", "items": _PROMPT, "minItems": 1}]}


@json_type({"type": "integer", "minimum": -1, "maximum": _INT32_MAX})
def limit(value: Any) -> int:
    """Read a number of tokens, where -1 is no limit."""
    if not -1 <= integer(value) <= _INT32_MAX:
        raise MismatchError(f"between -1 and {_INT32_MAX}")
    return integer(value)


@json_type({"type": "integer", "minimum": 0, "maximum": _INT32_MAX})
def count(value: Any) -> int:
    """Read how many of something."""
    if not 0 <= integer(value) <= _INT32_MAX:
        raise MismatchError(f"between 0 and {_INT32_MAX}")
    return integer(value)


@json_type({"type": "integer", "minimum": -1, "maximum": _INT32_MAX})
def budget(value: Any) -> int:
    """Read how many of something, or that there is no limit."""
    if not -1 <= integer(value) <= _INT32_MAX:
        raise MismatchError(f"between -1 and {_INT32_MAX}")
    return integer(value)


@json_type({"type": "integer", "minimum": 1, "maximum": _INT32_MAX})
def copies(value: Any) -> int:
    """Read how many outputs there are to be."""
    if not 1 <= integer(value) <= _INT32_MAX:
        raise MismatchError("at least 1")
    return integer(value)


@json_type({"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS})
def seconds(value: Any) -> float:
    """Read a length of time, in seconds."""
    wanted = f"a number of seconds, more than 0 and at most {MAX_SECONDS}"
    try:
        if 0 < number(value) <= MAX_SECONDS:
            return number(value)
    except MismatchError:
        pass  # said below, with what is wanted
    raise MismatchError(wanted)


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
    wanted = "an object from token to bias, or a list of [token, bias]"
    if isinstance(value, dict):
        pairs: list[Any] = [
            [int(key) if key.isdecimal() else key, bias] for key, bias in value.items()
        ]
    elif isinstance(value, list):
        pairs = value
    else:
        raise MismatchError(wanted)
    biases: list[Bias] = []
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise MismatchError(wanted)
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
    wanted = "a list of objects with an 'id', from 0 on, and a 'scale', at most 1000000"
    try:
        pairs = [(integer(each.get("id")), number(each.get("scale", 0))) for each in objects(value)]
    except MismatchError:
        raise MismatchError(wanted) from None
    if not all(id_ >= 0 and -MAX_SCALE <= scale <= MAX_SCALE for id_, scale in pairs):
        raise MismatchError(wanted)
    return tuple(pairs)


@json_type(_PROMPTS)
def prompts(value: Any) -> tuple[Prompt, ...]:
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


def _prompt(value: Any) -> Prompt:
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


@json_type({"type": "array", "items": _MESSAGE, "minItems": 1})
def messages(value: Any) -> tuple[dict[str, Any], ...]:
    """Check messages as llama-server does; the template has the last word."""
    if not isinstance(value, list) or not value:
        raise MismatchError("a list of messages, and not empty")
    for message in objects(value):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise MismatchError("a list of messages that each have a 'role'")
        if content is None and not (role == "assistant" and message.get("tool_calls")):
            raise MismatchError(f"complete: the message of role '{role}' has no 'content'")
        if isinstance(content, list):
            _check_parts(content)
        elif content is not None and not isinstance(content, str):
            raise MismatchError("messages whose 'content' is a string or a list of parts")
    return tuple(value)


def _check_parts(parts: list[Any]) -> None:
    for part in objects(parts):
        if part.get("type") != "text":
            raise MismatchError(
                f"text: content parts of type {part.get('type')!r} are not supported"
            )
        if not isinstance(part.get("text"), str):
            raise MismatchError("messages whose text parts have a 'text'")


@json_type({"type": "array", "items": _TOOL})
def tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Check `tools`: functions with names."""
    for tool in objects(value):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise MismatchError("a list of tools of type 'function'")
        if not isinstance(function.get("name"), str):
            raise MismatchError("a list of tools whose functions have a 'name'")
    return tuple(value)


@json_type({"anyOf": [{"enum": list(MODES)}, {"type": "object"}]})
def tool_choice(value: Any) -> ToolChoice:
    """Read `tool_choice`: a mode, a function, or a mode and the tools that it is about."""
    if value in MODES:
        return ToolChoice(value)
    if not isinstance(value, dict):
        raise MismatchError(_CHOICES)
    if value.get("type") == "function":
        return ToolChoice("required", _function_names([value]))
    allowed = value.get("allowed_tools")
    if value.get("type") != "allowed_tools" or not isinstance(allowed, dict):
        raise MismatchError(_CHOICES)
    if allowed.get("mode") not in ("auto", "required"):
        raise MismatchError('an object whose \'allowed_tools\' have the mode "auto" or "required"')
    return ToolChoice(allowed["mode"], _function_names(allowed.get("tools")))


_CHOICES = '"auto", "none", "required", or an object that names functions'


def _function_names(tools: Any) -> tuple[str, ...]:
    names = []
    for tool in objects(tools):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise MismatchError("an object whose functions have a 'name'")
        names.append(function["name"])
    if not names:
        raise MismatchError("an object that names functions, and at least one")
    return tuple(names)


@json_type({"enum": [True, False, "content", "reasoning_content"]})
def continue_final_message(value: Any) -> ContinueFinalMessage | None:
    """Read ``continue_final_message``: a boolean, or the part of the message that goes on."""
    if isinstance(value, bool):
        return "auto" if value else None
    if value not in ("content", "reasoning_content"):
        raise MismatchError('true, false, "content" or "reasoning_content"')
    return cast(ContinueFinalMessage, value)


def is_begun(messages: Any) -> bool:
    """Whether the last message is the assistant's, which the model then goes on with.

    Raises:
        InvalidRequestError: the one before it is, too.
    """
    roles = [
        message.get("role") if isinstance(message, dict) else None
        for message in (messages[-2:] if isinstance(messages, list) else ())
    ]
    if roles == ["assistant", "assistant"]:
        raise InvalidRequestError(
            "'messages' must not end with two messages of the assistant.", param="messages"
        )
    return roles[-1:] == ["assistant"]


@json_type({"type": "object"})
def template_kwargs(value: Any) -> dict[str, Any]:
    """Read `chat_template_kwargs`."""
    kwargs = mapping(value)
    if not isinstance(kwargs.get("enable_thinking", False), bool):
        raise MismatchError("an object in which 'enable_thinking' is true or false")
    return kwargs


@json_type(_PROMPT)
def content(value: Any) -> Prompt:
    """Read text, or a list of ids and strings, which may be empty."""
    if isinstance(value, list) and not value:
        return ()
    return _prompt(value)


@json_type({"type": "array", "items": {"type": "object"}})
def extra_files(value: Any) -> tuple[File, ...]:
    """Read `input_extra`: files, each with a text and perhaps a name."""
    files = []
    for each in objects(value):
        text, name = each.get("text"), each.get("filename", _NO_NAME)
        if not isinstance(text, str) or not isinstance(name, str):
            raise MismatchError("a list of objects with a 'text' and perhaps a 'filename'")
        files.append(File(name, text))
    return tuple(files)


@json_type({"type": "array", "items": {"type": "integer"}})
def tokens(value: Any) -> tuple[int, ...]:
    """Read a list of token ids."""
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise MismatchError("a list of token ids")
    return tuple(value)
