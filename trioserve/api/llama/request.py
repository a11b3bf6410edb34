"""What requests to llama-server's own routes may hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import attrs

from trioserve.api.base import limits, readers
from trioserve.api.base.fields import (
    MismatchError,
    field,
    json_type,
    objects,
    strings,
    structure,
)
from trioserve.api.base.generation_request import TextRequest
from trioserve.api.base.neutral import NEUTRAL_IN_LLAMA, refuse_unsupported
from trioserve.api.base.readers import AnyPrompt, RawPrompt
from trioserve.server.infill import File


@json_type({"type": "array", "items": {"type": "string"}, "maxItems": limits.MAX_RESPONSE_FIELDS})
def _response_fields(value: Any) -> tuple[str, ...]:
    if isinstance(value, list):
        limits.check_count(len(value), limits.MAX_RESPONSE_FIELDS, "names")
    return strings(value)


@attrs.frozen(kw_only=True, slots=False)
class LlamaRequest(TextRequest):
    """What the routes that continue a prompt have in common."""

    has_max_logprobs: ClassVar[bool] = False
    return_tokens: bool = False
    response_fields: tuple[str, ...] = field(read=_response_fields, default=())

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Read a body. Raises InvalidRequestError, which names the field at fault."""
        refuse_unsupported(body, NEUTRAL_IN_LLAMA)
        return structure(cls, body)


@attrs.frozen(kw_only=True, slots=False)
class LlamaCompletionRequest(LlamaRequest):
    """``POST /completion``."""

    prompts: tuple[AnyPrompt, ...] = field("prompt", read=readers.prompts)


# -- /infill


#: The name of a file that has none, as in llama-server.
_NO_NAME = "tmp"


@json_type({"type": "array", "items": {"type": "object"}, "maxItems": limits.MAX_EXTRA_FILES})
def _extra_files(value: Any) -> tuple[File, ...]:
    """Read `input_extra`: files, each with a text and perhaps a name."""
    files = []
    if isinstance(value, list):
        limits.check_count(len(value), limits.MAX_EXTRA_FILES, "files")
    for each in objects(value):
        text, name = each.get("text"), each.get("filename", _NO_NAME)
        if not isinstance(text, str) or not isinstance(name, str):
            raise MismatchError("a list of objects with a 'text' and perhaps a 'filename'")
        files.append(File(name, text))
    return tuple(files)


@attrs.frozen(kw_only=True, slots=False)
class InfillRequest(LlamaRequest):
    """``POST /infill``: text with a gap. `prompt` is what the gap begins with."""

    input_prefix: RawPrompt = field(read=readers.content)
    input_suffix: RawPrompt = field(read=readers.content)
    input_extra: tuple[File, ...] = field(read=_extra_files, default=())
    prompt: str = ""


# -- tokens


@json_type({"type": "array", "items": {"type": "integer"}, "maxItems": limits.MAX_TOKENS})
def _token_ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, list):
        limits.check_count(len(value), limits.MAX_TOKENS, "token ids")
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise MismatchError("a list of token ids")
    return tuple(value)


@json_type(
    {
        "type": ["string", "array"],
        "items": {"type": ["string", "integer"]},
        "maxLength": limits.MAX_TEXT,
        "maxItems": limits.MAX_TOKENS,
    }
)
def _text(value: Any) -> RawPrompt:
    """Read text, or a list of ids and strings."""
    if isinstance(value, list):
        limits.check_count(len(value), limits.MAX_TOKENS, "token ids")
    content = readers.content(value)
    parts = (content,) if isinstance(content, str) else content
    if sum(len(part) for part in parts if isinstance(part, str)) > limits.MAX_TEXT:
        raise MismatchError(f"text of at most {limits.MAX_TEXT} characters")
    return content


@attrs.frozen(kw_only=True)
class TokenizeRequest:
    """``POST /tokenize``."""

    model: str | None = field(read=readers.model_name, default=None)
    content: RawPrompt = field(read=_text, default="")
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


@attrs.frozen(kw_only=True)
class DetokenizeRequest:
    """``POST /detokenize``."""

    model: str | None = field(read=readers.model_name, default=None)
    tokens: tuple[int, ...] = field(read=_token_ids, default=())
