"""The parts of messages and results of ``/v1/responses``: texts and files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from trioserve.api.base.fields import one_of, optional, required, text
from trioserve.chat.messages import (
    MAX_PARTS,
    check_count,
    file_part,
    media_part,
    parse_media_part,
    source_of,
    text_part,
)
from trioserve.chat.uploads import upload_of
from trioserve.errors import InvalidRequestError, UnsupportedFieldError
from trioserve.types import MediaSource

Item: TypeAlias = Mapping[str, Any]

#: A part of a message in normal form.
Part: TypeAlias = dict[str, Any]

#: The types of text parts, and the field that holds their text.
INPUT: Mapping[str, str] = {"input_text": "text"}
OUTPUT: Mapping[str, str] = {"output_text": "text", "input_text": "text", "refusal": "refusal"}
THOUGHTS: Mapping[str, str] = {"reasoning_text": "text", "summary_text": "text", "text": "text"}

#: The types of parts that are files. They stand where `INPUT` does.
_FILES = ("input_image", "input_audio", "input_video", "input_file")

_DETAIL = one_of("auto", "low", "high", "original")


def read_content(item: Item, name: str, path: str, texts: Mapping[str, str]) -> str | list[Part]:
    """Read a field of an item at `path` that is text or a list of parts, with texts of some types.

    Raises:
        UnknownFileError: a part is a file that the client should have uploaded.
        UnsupportedFieldError: a part is of another type.
        InvalidRequestError: something is missing or of the wrong type, or a file is not valid
            base64. All name the field.
    """
    where = f"{path}.{name}"
    value = item.get(name)
    if isinstance(value, str):
        return value
    if value is None:
        if name in item:  # clients send null where there is no text
            return ""
        raise InvalidRequestError.at(where, "is required.")
    return read_parts(value, where, texts, instead="a string or ")


def read_parts(
    value: object, path: str, texts: Mapping[str, str], *, instead: str = ""
) -> list[Part]:
    """Read a list of parts. `instead` says what else it might be. Raises as `read_content`."""
    if not isinstance(value, list):
        raise InvalidRequestError.at(path, f"must be {instead}a list of parts.")
    check_count(len(value), MAX_PARTS, path, "parts")
    return [_read_part(part, f"{path}[{i}]", texts) for i, part in enumerate(value)]


def _read_part(part: object, path: str, texts: Mapping[str, str]) -> Part:
    if not isinstance(part, Mapping):
        raise InvalidRequestError.at(path, "must be an object.")
    kind = required(part, "type", text, path)
    if kind in texts:
        return text_part(required(part, texts[kind], text, path))
    known = [*texts, *(_FILES if texts is INPUT else ())]
    if kind not in known:
        raise UnsupportedFieldError.at(
            f"{path}.type", f"is {kind!r:.80}; it must be one of {', '.join(known)}."
        )
    if kind == "input_image":
        return image_part(part, path)
    if kind == "input_file":
        return file_part(part, path)
    if kind == "input_audio" and "audio_url" in part:
        url = required(part, "audio_url", text, path)
        return media_part(source_of(url, "audio", f"{path}.audio_url"))
    media = parse_media_part(kind, part, path)
    assert media is not None, kind
    return media


def image_part(part: Item, path: str) -> Part:
    """Read a part that is an image. Raises as `read_content`."""
    optional(part, "detail", _DETAIL, path)
    if part.get("file_id") is not None:
        data = upload_of(part, path).data
        return media_part(MediaSource(kind="image", data=data, param=f"{path}.file_id"))
    url = required(part, "image_url", text, path)
    return media_part(source_of(url, "image", f"{path}.image_url"))
