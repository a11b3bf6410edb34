"""Values in requests that take more than one form, read from JSON. Each raises `MismatchError`."""

from __future__ import annotations

import json
import math
from typing import Any, TypeAlias, cast

from trioserve.api.fields import MismatchError, integer, mapping, number, objects, strings
from trioserve.chat.prefill import Part
from trioserve.errors import InvalidRequestError
from trioserve.types import SAMPLER_LETTERS, Grammar

#: A prompt before it is tokenized: text, or token ids and text mixed.
Prompt: TypeAlias = str | tuple[int | str, ...]

#: A token, or text that stands for its tokens, and what is added to their logits.
Bias: TypeAlias = tuple[int | str, float]

_INT32_MAX = 2**31 - 1

#: The most seconds that a request may give itself: a year.
MAX_SECONDS = 365 * 86400

#: Prompts that one request may hold.
MAX_PROMPTS = 256


def limit(value: Any) -> int:
    """Read a number of tokens, where -1 is no limit."""
    if not -1 <= integer(value) <= _INT32_MAX:
        raise MismatchError(f"between -1 and {_INT32_MAX}")
    return integer(value)


def count(value: Any) -> int:
    """Read how many of something."""
    if not 0 <= integer(value) <= _INT32_MAX:
        raise MismatchError(f"between 0 and {_INT32_MAX}")
    return integer(value)


def seconds(value: Any) -> float:
    """Read a length of time, in seconds."""
    wanted = f"a number of seconds, more than 0 and at most {MAX_SECONDS}"
    try:
        if 0 < number(value) <= MAX_SECONDS:
            return number(value)
    except MismatchError:
        pass  # said below, with what is wanted
    raise MismatchError(wanted)


def words(value: Any) -> tuple[str, ...]:
    """Read `stop`: a string or a list; empty strings stop nothing."""
    if isinstance(value, str):
        return (value,) if value else ()
    try:
        return tuple(word for word in strings(value) if word)
    except MismatchError:
        raise MismatchError("a string or a list of strings") from None


def samplers(value: Any) -> tuple[str, ...]:
    """Read `samplers`: a list of names, or a string of letters."""
    if not isinstance(value, str):
        return strings(value)
    if unknown := sorted(set(value) - set(SAMPLER_LETTERS)):
        raise MismatchError(f"made of the letters {''.join(SAMPLER_LETTERS)}, not {unknown[0]!r}")
    return tuple(SAMPLER_LETTERS[letter] for letter in value)


def breakers(value: Any) -> tuple[str, ...]:
    """Read `dry_sequence_breakers`: a list of strings, and not empty."""
    if not strings(value):
        raise MismatchError("a list of strings, and not empty")
    return strings(value)


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


def tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Check `tools`: functions with names."""
    for tool in objects(value):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise MismatchError("a list of tools of type 'function'")
        if not isinstance(function.get("name"), str):
            raise MismatchError("a list of tools whose functions have a 'name'")
    return tuple(value)


def go_on(value: Any) -> Part | None:
    """Read ``continue_final_message``: a boolean, or the part of the message that goes on."""
    if isinstance(value, bool):
        return "auto" if value else None
    if value not in ("content", "reasoning_content"):
        raise MismatchError('true, false, "content" or "reasoning_content"')
    return cast(Part, value)


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


def template_kwargs(value: Any) -> dict[str, Any]:
    """Read `chat_template_kwargs`."""
    kwargs = mapping(value)
    if not isinstance(kwargs.get("enable_thinking", False), bool):
        raise MismatchError("an object in which 'enable_thinking' is true or false")
    return kwargs


def content(value: Any) -> Prompt:
    """Read text, or a list of ids and strings, which may be empty."""
    if isinstance(value, list) and not value:
        return ()
    return _prompt(value)


def tokens(value: Any) -> tuple[int, ...]:
    """Read a list of token ids."""
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise MismatchError("a list of token ids")
    return tuple(value)


def grammar(name: str, value: Any) -> Grammar | None:
    """Read ``grammar``, ``json_schema`` or ``response_format``; None where any text will do."""
    if name == "grammar":
        if not isinstance(value, str):
            raise InvalidRequestError("'grammar' must be text, in GBNF.", param=name)
        return Grammar("gbnf", value, param=name)
    if name == "json_schema":
        return _schema(value, name)
    if not isinstance(value, dict) or value.get("type") not in _FORMATS:
        kinds = ", ".join(_FORMATS)
        raise InvalidRequestError(
            f"'response_format' must be an object with a type: {kinds}.", param=name
        )
    if value["type"] == "text":
        return None
    if value["type"] == "json_object":
        schema = value.get("schema")
        return Grammar("json_object", param=name) if schema is None else _schema(schema, name)
    inner = value.get("json_schema", value)
    if not isinstance(inner, dict) or "schema" not in inner:
        raise InvalidRequestError(
            "'response_format' of type json_schema needs 'json_schema' with a 'schema'.",
            param=name,
        )
    return _schema(inner["schema"], name)


_FORMATS = ("text", "json_object", "json_schema")


def _schema(value: Any, param: str) -> Grammar:
    if not isinstance(value, dict | bool):
        raise InvalidRequestError(f"The schema in '{param}' must be an object.", param=param)
    return Grammar("json_schema", json.dumps(value), param=param)
