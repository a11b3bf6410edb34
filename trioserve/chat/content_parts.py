"""Parts of a message that are no text: images, sound, video and documents.

In normal form such a part is ``{"type": "media", "media": MediaSource(...)}``. What a request
brings is decoded from base64 here; nothing is fetched, and nothing looks into a file. The model
gets documents as text. A PDF has to be decoded first, and a file with an address to be fetched:
until then it is a part ``{"type": "document", "document": DocumentSource(...)}``, which no template
sees.
"""

from __future__ import annotations

import binascii
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import attrs

from trioserve.errors import InvalidMediaError, InvalidRequestError, UnsupportedFieldError
from trioserve.types import DecodedDocument, DocumentSource, MediaKind, MediaSource


def document_part(
    data: bytes, *, name: str = "", about: str = "", param: str
) -> dict[str, Any] | None:
    """Make a content part of a file of text or a PDF; None: it is neither.

    Args:
        data: the file.
        name: as the model is told it.
        about: what the request says of it.
        param: the field that errors name.
    """
    if data.startswith(b"%PDF-"):
        return later(DocumentSource(data=data, name=name, about=about, param=param))
    text = _text_of(data)
    return None if text is None else text_part(write_document(text, name=name, about=about))


def later(source: DocumentSource) -> dict[str, Any]:
    """Make a content part of a file that is still to be read."""
    return {"type": "document", "document": source}


def _text_of(data: bytes) -> str | None:
    """Read text in UTF-8, or UTF-16 with its mark. None: it is no text."""
    encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def documents_in(message: Mapping[str, Any]) -> list[DocumentSource]:
    """The documents of a message in normal form that are still to be read."""
    content = message["content"]
    if isinstance(content, str):
        return []
    return [part["document"] for part in content if part["type"] == "document"]


def pages_of(source: DocumentSource, document: DecodedDocument) -> list[dict[str, Any]]:
    """Write the pages of a document for the model: the text of each, and its picture after it."""
    parts = [text_part(source.about)] if source.about else []
    for number, page in enumerate(document.pages, 1):
        name = f"{source.name or 'document'}, page {number}"
        has_text = bool(page.text.strip())
        parts.append(
            text_part(write_document(page.text, name=name) if has_text else f"File: {name}")
        )
        if page.image is not None:
            picture = MediaSource(kind="image", decoded=page.image, param=source.param)
            parts.append({"type": "media", "media": picture})
    return parts


def write_document(text: str, *, name: str = "", about: str = "") -> str:
    """Write a document for the model: in a fence that its text cannot close, below its name."""
    longest = max(map(len, re.findall("`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return "\n".join([*heading(name, about), fence, text.removesuffix("\n"), fence])


def heading(name: str, about: str) -> list[str]:
    """The lines that stand before a document: its name, and what is said about it."""
    return [f"File: {name}"] * bool(name) + [about] * bool(about)


def text_part(text: str) -> dict[str, Any]:
    """Make a content part of text."""
    return {"type": "text", "text": text}


#: Characters of base64 that are decoded at once. Meanwhile no other thread runs.
_PIECE = 2**20

#: The longest URL, in characters.
MAX_URL = 8192

#: What OpenAI's clients may ask for. How finely an image is seen is up to the model, so that all
#: are the same here.
DETAILS = ("auto", "low", "high", "original")

#: The kinds of files by the beginning of their media type.
_KINDS: Mapping[str, MediaKind] = {"image": "image", "audio": "audio", "video": "video"}


# -- in a program


@attrs.frozen
class Attachment:
    """A file in a message of a program: a path, or the bytes of one. See `Image`."""

    kind: ClassVar[MediaKind]
    file: str | os.PathLike[str] | bytes = attrs.field(repr=lambda file: repr(file)[:80])

    def source(self, param: str) -> MediaSource:
        """Say where the file is; `param` is what errors call it."""
        if isinstance(self.file, bytes):
            return MediaSource(kind=self.kind, data=self.file, param=param)
        return MediaSource(kind=self.kind, path=os.fspath(self.file), param=param)

    def as_part(self) -> dict[str, Any]:
        """Write it as a content part in JSON. Reads the file.

        Raises:
            InvalidMediaError: it cannot be read.
        """
        try:
            data = self.file if isinstance(self.file, bytes) else Path(self.file).read_bytes()
        except OSError as error:
            raise InvalidMediaError(f"{self.file!r} cannot be read: {error.strerror}.") from error
        encoded = binascii.b2a_base64(data, newline=False).decode()
        name, field = {
            "image": ("image_url", "url"),
            "audio": ("input_audio", "data"),
            "video": ("input_video", "data"),
        }[self.kind]
        return {"type": name, name: {field: encoded}}


class Image(Attachment):
    """An image in a message: a path, or the bytes of a file.

    >>> {"role": "user", "content": [Image("cat.png"), {"type": "text", "text": "What is it?"}]}
    """

    kind = "image"


class Audio(Attachment):
    """A recording in a message: a path, or the bytes of a file."""

    kind = "audio"


class Video(Attachment):
    """A video in a message: a path, or the bytes of a file. The model sees some of its frames."""

    kind = "video"


# -- in normal form


def media_part(source: MediaSource) -> dict[str, Any]:
    """Make a content part in normal form."""
    return {"type": "media", "media": source}


def has_media(content: object) -> bool:
    """Whether the content of a message in normal form has an image, sound or a video."""
    return isinstance(content, list) and any(part["type"] == "media" for part in content)


# -- as clients write them


def parse_media_part(kind: str, part: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """Read a content part whose `type` is `kind`. None: that is no type of media.

    Raises:
        UnsupportedFieldError: it is a file that the client has uploaded before.
        InvalidRequestError: something is missing or of the wrong type; `param` names it.
    """
    read = _READERS.get(kind)
    return None if read is None else read(part, path)


def source_of(text: object, kind: MediaKind | None, param: str) -> MediaSource:
    """Read where a file is: an http, https or file URL, a data URL, or base64.

    Args:
        text: as the client sent it.
        kind: what the client says it is.
        param: the field that errors name.

    Raises:
        InvalidMediaError: it is none of these, or the file is empty.
        InvalidRequestError: it is no text.
    """
    text = _text(text, param)
    scheme = text[:8].lower()
    if scheme.startswith(("http://", "https://", "file://")):
        if len(text) > MAX_URL:
            raise InvalidMediaError(
                f"'{param}' is a URL of {len(text)} characters, and {MAX_URL} are allowed.",
                param=param,
            )
        return MediaSource(kind=kind, url=text, param=param)
    if scheme.startswith("data:"):
        media_type, data = split_data_url(text, param)
        if media_type.partition("/")[0] not in _KINDS:
            raise InvalidMediaError(
                f"'{param}' is of the type {media_type!r:.80}; images, sound and videos can be "
                "given here.",
                param=param,
            )
        return MediaSource(kind=kind, data=data, param=param)
    return MediaSource(kind=kind, data=decode_base64(text, param), param=param)


def split_data_url(url: str, param: str) -> tuple[str, bytes]:
    """Split a data URL into its media type, in lower case and without parameters, and its data.

    Raises:
        InvalidMediaError: it is no data URL, or its data are not in base64.
    """
    head, comma, _ = url[:MAX_URL].partition(",")
    scheme, _, head_text = head.partition(":")
    media_type, *others = head_text.lower().split(";")
    if scheme.lower() != "data" or not comma or others[-1:] != ["base64"]:
        raise InvalidMediaError(
            f"'{param}' must be a data URL of the form 'data:image/png;base64,...'.", param=param
        )
    return media_type.strip(), decode_base64(url, param, start=len(head) + 1)


def decode_base64(text: str, param: str, *, start: int = 0) -> bytes:
    """Decode base64 from the character `start` on. White space and missing padding are fine.

    Raises:
        InvalidMediaError: it is something else, or nothing.
    """
    decoded, rest = [], ""
    try:
        for begin in range(start, len(text), _PIECE):
            piece = rest + "".join(text[begin : begin + _PIECE].split())
            n_whole = len(piece) // 4 * 4
            decoded.append(binascii.a2b_base64(piece[:n_whole], strict_mode=True))
            rest = piece[n_whole:]
        if rest:
            decoded.append(binascii.a2b_base64(rest + "=" * (4 - len(rest)), strict_mode=True))
    except ValueError:  # also of characters that are not ASCII
        raise InvalidMediaError(f"'{param}' is not valid base64.", param=param) from None
    if not any(decoded):
        raise InvalidMediaError(f"'{param}' is empty.", param=param)
    return b"".join(decoded)


def _image_url(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    path = f"{path}.image_url"
    given = _object(part.get("image_url"), "url", path)
    detail = given.get("detail")
    if detail is not None and detail not in DETAILS:
        raise InvalidRequestError(
            f"'{path}.detail' must be one of {', '.join(DETAILS)}.", param=f"{path}.detail"
        )
    return media_part(source_of(given.get("url"), "image", path))


def _input_audio(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    path = f"{path}.input_audio"
    given = _object(part.get("input_audio"), "data", path)
    return media_part(source_of(given.get("data", given.get("url")), "audio", path))


def _video(name: str, part: Mapping[str, Any], path: str) -> dict[str, Any]:
    path = f"{path}.{name}"
    given = _object(part.get(name), "url", path)
    return media_part(source_of(given.get("data", given.get("url")), "video", path))


def _input_video(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    return _video("input_video", part, path)


def _video_url(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    return _video("video_url", part, path)


def _file(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    path = f"{path}.file"
    return file_part(_object(part.get("file"), "file_data", path), path)


def file_part(given: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Read OpenAI's object of a file, with ``file_data``: a document, or media.

    Raises:
        UnsupportedFieldError: it is a file that the client has uploaded, or of no known type.
        InvalidMediaError: it is not valid base64.
        InvalidRequestError: something is of the wrong type. All name the field.
    """
    if given.get("file_id") is not None:
        raise UnsupportedFieldError(
            f"'{path}.file_id' is not supported: no files are kept here. Send 'file_data'.",
            param=f"{path}.file_id",
        )
    filename = "" if given.get("filename") is None else _text(given["filename"], f"{path}.filename")
    field = "file_data" if given.get("file_url") is None else "file_url"
    param, media_type = f"{path}.{field}", ""
    data = _text(given.get(field), param)
    if data[:5].lower() == "data:":
        media_type, content = split_data_url(data, param)
    else:
        source = source_of(data, None, param)
        if source.data is None:
            return later(DocumentSource(url=source.url, name=filename, param=param))
        content = source.data
    kind = _KINDS.get(media_type.partition("/")[0])
    if kind is None:
        if (part := document_part(content, name=filename, param=param)) is not None:
            return part
        if media_type.startswith("text/"):
            raise InvalidMediaError(f"'{param}' must be text in UTF-8 or UTF-16.", param=param)
        if media_type not in ("", "application/octet-stream"):
            raise UnsupportedFieldError(
                f"'{param}' is of the type {media_type!r:.80}; text, PDFs, images, sound and "
                "videos can be read.",
                param=param,
            )
    return media_part(MediaSource(kind=kind, data=content, param=param))


def _text(value: object, path: str) -> str:
    if isinstance(value, str):
        return value
    problem = "is missing" if value is None else "must be text"
    raise InvalidRequestError(f"'{path}' {problem}.", param=path)


def _object(value: object, name: str, path: str) -> Mapping[str, Any]:
    """Take an object, or a text, which stands for the object with nothing but `name`."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, str):
        return {name: value}
    problem = "is missing" if value is None else "must be an object"
    raise InvalidRequestError(f"'{path}' {problem}.", param=path)


_READERS = {
    "image_url": _image_url,
    "input_audio": _input_audio,
    "input_video": _input_video,
    "video_url": _video_url,
    "file": _file,
}
