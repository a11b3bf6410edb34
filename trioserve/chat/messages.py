"""The messages and tools of a request, checked and brought into the one form templates get.

A message in normal form is a dict with

* ``role``: text,
* ``content``: text, or a list of ``{"type": "text", "text": …}`` and of
  ``{"type": "media", "media": MediaSource(…)}``; and, until `trioserve.server` has read them, of
  ``{"type": "document", "document": DocumentSource(…)}``,
* on an assistant's message, when it has any, ``tool_calls``: a list of ``{"id", "type":
  "function", "function": {"name", "arguments"}}`` with the arguments as JSON text, and
  ``reasoning_content``: text,
* on a tool's message ``tool_call_id`` and ``name``, when given,
* all other fields from the client that are not null: some templates use extra fields.

Data in a request is decoded from base64 here; nothing is fetched, and no file is parsed. The model
gets documents as text: a PDF has to be decoded first, and a file at an address has to be fetched.
"""

from __future__ import annotations

import binascii
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs

from trioserve.chat.data_urls import MAX_URL, UNTYPED, decode_base64, split_data_url
from trioserve.chat.uploads import upload_of
from trioserve.errors import InvalidMediaError, InvalidRequestError, UnsupportedFieldError
from trioserve.left_out import leave_out
from trioserve.types import DecodedDocument, DocumentSource, MediaKind, MediaSource

#: The roles that every client may use. Others must be known to the model's template.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

#: The most messages and tools of a chat, and the most parts or calls of a message.
MAX_MESSAGES = 10_000
MAX_TOOLS = 1024
MAX_PARTS = 1024

#: Why a tool that a provider's servers run is left out.
NOT_HOSTED = "this server has no such tool"

#: Characters of the arguments of a call, as JSON.
MAX_ARGUMENTS = 2**20

#: The argument of a function that stands for a custom tool, which takes one text.
INPUT_ARGUMENT = "input"

Message = dict[str, Any]
Tool = dict[str, Any]


class Messages(tuple[Message, ...]):
    """Messages in normal form: the result of `parse_messages`, which it also accepts."""

    __slots__ = ()


class Tools(tuple[Tool, ...]):
    """Checked tools: the result of `parse_tools`, which it also accepts."""

    __slots__ = ()


def parse_messages(messages: object, path: str = "messages") -> Messages:
    """Bring OpenAI's chat messages into normal form.

    Raises:
        UnsupportedFieldError: a content part is of a kind that is not known, or a call not of a
            function.
        InvalidMediaError: an image, sound or a video is not where the message says.
        InvalidRequestError: something is missing or of the wrong type.
        All name the field in `param`, such as ``messages[2].content[0].text``.
    """
    if isinstance(messages, Messages):
        return messages
    given = _list(messages, path, "messages", MAX_MESSAGES)
    if not given:
        raise InvalidRequestError.at(path, "must not be empty.")
    return Messages(_parse_message(message, f"{path}[{i}]") for i, message in enumerate(given))


def parse_tools(tools: object, path: str = "tools") -> Tools:
    """Check OpenAI's list of tools. A function without parameters gets an empty schema.

    Tools that OpenAI's servers run are left out: they are neither functions nor the client's.

    Raises:
        UnsupportedFieldError: a tool is a custom one, which a chat cannot call.
        InvalidRequestError: something is missing or of the wrong type; `param` names it.
    """
    if isinstance(tools, Tools):
        return tools
    given = () if tools is None else _list(tools, path, "tools", MAX_TOOLS)
    parsed = (_parse_tool(tool, f"{path}[{i}]") for i, tool in enumerate(given))
    return Tools(tool for tool in parsed if tool is not None)


def _parse_tool(tool: object, path: str) -> Tool | None:
    if not isinstance(tool, Mapping):
        raise InvalidRequestError.at(path, "must be an object.")
    kind = _text(tool, "type", path, filled=True)
    if kind == "custom":
        raise UnsupportedFieldError.at(
            f"{path}.type", 'is "custom"; the Responses API has custom tools.'
        )
    if kind != "function":
        leave_out(f"tools of type {kind}", NOT_HOSTED)
        return None
    path = f"{path}.function"
    function = _mapping(tool.get("function"), path)
    _text(function, "name", path, filled=True)
    if function.get("description") is not None:
        _text(function, "description", path)
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    parameters = _mapping(parameters, f"{path}.parameters")
    kept = {key: value for key, value in function.items() if value is not None}
    return {**tool, "function": {**kept, "parameters": dict(parameters)}}


def _parse_message(message: object, path: str) -> Message:
    given = _mapping(message, path)
    fields = {key: value for key, value in given.items() if value is not None}
    role = _text(fields, "role", path, filled=True)
    if role == "function":  # the role of results before tools
        fields["role"] = role = "tool"
    calls = fields.pop("tool_calls", None)
    if call := fields.pop("function_call", None):
        calls = calls or [{"function": call}]
    refusal = fields.pop("refusal", None)
    if refusal and not fields.get("content"):
        fields["content"] = refusal
    if calls and role != "assistant":
        raise InvalidRequestError.at(f"{path}.tool_calls", "belongs to a message of the assistant.")
    if isinstance(fields.get("reasoning"), str):  # as vLLM and OpenRouter name it
        fields.setdefault("reasoning_content", fields.pop("reasoning"))
    for name in ("name", "tool_call_id", "reasoning_content"):
        if name in fields:
            _text(fields, name, path)
    if (audio := fields.pop("audio", None)) and role == "assistant" and not fields.get("content"):
        fields["content"] = _transcript_of(audio, f"{path}.audio")
    if "content" in fields:
        fields["content"] = _parse_content(fields["content"], path)
        if not isinstance(fields["content"], str):
            _take_thoughts(fields, path)
    elif "content" in given or (
        role == "assistant" and (calls is not None or "reasoning_content" in fields)
    ):
        fields["content"] = ""  # clients send null where there is no text
    else:
        raise InvalidRequestError.at(f"{path}.content", "is missing.")
    if not fields.get("reasoning_content"):
        fields.pop("reasoning_content", None)
    if calls:
        each = _list(calls, f"{path}.tool_calls", "tool calls", MAX_PARTS)
        fields["tool_calls"] = [
            _parse_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(each)
        ]
    return fields


def _transcript_of(audio: object, path: str) -> str:
    """Take the text of an earlier answer that was spoken."""
    text = _mapping(audio, path).get("transcript")
    if not isinstance(text, str):
        raise InvalidRequestError.at(
            path,
            "names sound, which is not kept: send its 'transcript' here, or as 'content'.",
        )
    return text


def _parse_content(content: object, path: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    path = f"{path}.content"
    parts = _list(content, path, "content parts", MAX_PARTS, "text or ")
    return [_parse_part(part, f"{path}[{i}]") for i, part in enumerate(parts)]


#: Types of content parts that hold reasoning, each with the fields that may have its text.
_THOUGHTS: Mapping[str, tuple[str, ...]] = {
    "thinking": ("thinking", "text"),
    "reasoning": ("text", "reasoning", "content"),
}


def _take_thoughts(fields: Message, path: str) -> None:
    """Make the parts of a content that hold reasoning the reasoning of the message."""
    content: list[dict[str, Any]] = fields["content"]
    thoughts = [part["thought"] for part in content if part["type"] == "thought"]
    if not thoughts:
        return
    if fields["role"] != "assistant":
        place = next(i for i, part in enumerate(content) if part["type"] == "thought")
        raise InvalidRequestError.at(
            f"{path}.content[{place}]", "holds reasoning, which is the assistant's."
        )
    given = fields.get("reasoning_content", "")
    fields["reasoning_content"] = "\n\n".join(filter(None, (given, *thoughts)))
    fields["content"] = [part for part in content if part["type"] != "thought"]


def _parse_part(part: object, path: str) -> dict[str, Any]:
    if isinstance(part, Attachment):
        return media_part(part.source(path))
    fields = _mapping(part, path)
    kind = _text(fields, "type", path, filled=True)
    if kind in ("text", "refusal"):
        return {"type": "text", "text": _text(fields, kind, path)}
    if kind in _THOUGHTS:
        field = next((name for name in _THOUGHTS[kind] if name in fields), kind)
        return {"type": "thought", "thought": _thought(fields, field, path)}
    if kind == "media" and isinstance(fields.get("media"), MediaSource):
        return media_part(fields["media"])
    if kind == "document" and isinstance(fields.get("document"), DocumentSource):
        return {"type": "document", "document": fields["document"]}
    if (media := parse_media_part(kind, fields, path)) is None:
        raise UnsupportedFieldError.at(f"{path}.type", f"is {kind!r:.80}, which is not known here.")
    return media


def _thought(fields: Mapping[str, Any], name: str, path: str) -> str:
    """Read reasoning: a text, or a list of parts with texts, as Mistral's API has it."""
    value = fields.get(name)
    if not isinstance(value, list):
        return _text(fields, name, path)
    parts = (_mapping(part, f"{path}.{name}[{i}]") for i, part in enumerate(value))
    return "".join(_text(part, "text", f"{path}.{name}[{i}]") for i, part in enumerate(parts))


def _parse_call(call: object, path: str) -> dict[str, Any]:
    fields = _mapping(call, path)
    kind = fields.get("type", "function")
    if kind not in ("function", "custom"):
        raise UnsupportedFieldError.at(f"{path}.type", 'must be "function" or "custom".')
    function = _mapping(fields.get(kind), f"{path}.{kind}")
    name = _text(function, "name", f"{path}.{kind}", filled=True)
    arguments = function.get("arguments")
    if kind == "custom":
        arguments = {INPUT_ARGUMENT: _text(function, "input", f"{path}.custom")}
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif arguments is None or arguments == "":
        arguments = "{}"
    elif not isinstance(arguments, str):
        raise InvalidRequestError.at(f"{path}.function.arguments", "must be text or an object.")
    check_count(len(arguments), MAX_ARGUMENTS, f"{path}.function.arguments", "characters")
    parsed: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    return parsed if fields.get("id") is None else {"id": _text(fields, "id", path), **parsed}


# -- values of fields. `path` is where the value, or the object that has it, is in the request.


def _text(fields: Mapping[str, Any], name: str, path: str, *, filled: bool = False) -> str:
    value = fields.get(name)
    if isinstance(value, str) and (value or not filled):
        return value
    problem = "is missing." if value is None else "must be text."
    if value == "":
        problem = "must not be empty."
    raise InvalidRequestError.at(f"{path}.{name}", problem)


def _mapping(value: object, path: str) -> Mapping[str, Any]:
    if isinstance(value, (dict, Mapping)):  # the check for a dict is fast
        return value
    raise InvalidRequestError.at(path, "is missing." if value is None else "must be an object.")


def _list(value: object, path: str, what: str, limit: int, instead: str = "") -> Sequence[object]:
    if not isinstance(value, (list, Sequence)) or isinstance(value, str | bytes):
        raise InvalidRequestError.at(path, f"must be {instead}a list of {what}.")
    check_count(len(value), limit, path, what)
    return value


def check_count(n: int, limit: int, path: str, what: str) -> None:
    """Refuse more items than allowed. Raises InvalidRequestError, naming `path`."""
    if n > limit:
        raise InvalidRequestError.at(path, f"has {n} {what}, and {limit} are allowed.")


def join_text(parts: Sequence[Mapping[str, Any]]) -> str:
    """Join the text of content parts, one part a line, as llama-server does."""
    return "\n".join(part["text"] for part in parts if part["text"])


def as_text(content: Any) -> str:
    """Give the text of a content that may be a list of parts."""
    return content if isinstance(content, str) else join_text(content)


def document_part(
    data: bytes, *, name: str = "", about: str = "", param: str
) -> dict[str, Any] | None:
    """Make a content part of a file of text or a PDF, below `about`; None for other files."""
    if data.startswith(b"%PDF-"):
        return later(DocumentSource(data=data, name=name, about=about, param=param))
    text = _text_of(data)
    return None if text is None else text_part(write_document(text, name=name, about=about))


def later(source: DocumentSource) -> dict[str, Any]:
    """Make a content part of a file that is still to be read."""
    return {"type": "document", "document": source}


def _text_of(data: bytes) -> str | None:
    """Read text in UTF-8, or UTF-16 with its mark; None for other data."""
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
    """The lines before a document: its name, and its description."""
    return [f"File: {name}"] * bool(name) + [about] * bool(about)


def text_part(text: str) -> dict[str, Any]:
    """Make a content part of text."""
    return {"type": "text", "text": text}


#: The choices of OpenAI's clients. How finely a model sees an image is up to the model, so that
#: all are the same here.
DETAILS = ("auto", "low", "high", "original")

#: Types of content parts that are media: the kind of each, and its fields that may hold the file.
#: A text in place of the object is the file, too.
_MEDIA_PARTS: Mapping[str, tuple[MediaKind, tuple[str, ...]]] = {
    "image_url": ("image", ("url",)),
    "input_audio": ("audio", ("data", "url")),
    "input_video": ("video", ("data", "url")),
    "video_url": ("video", ("data", "url")),
}

#: The kinds of files by the beginning of their media type.
_KINDS: Mapping[str, MediaKind] = {"image": "image", "audio": "audio", "video": "video"}


# -- in a program


@attrs.frozen
class Attachment:
    """A file in a message of a program: a path, or the bytes of one. See `Image`."""

    kind: ClassVar[MediaKind]
    file: str | os.PathLike[str] | bytes = attrs.field(repr=lambda file: repr(file)[:80])

    def source(self, param: str) -> MediaSource:
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
    """True if the content of a message in normal form has an image, sound or a video."""
    return isinstance(content, list) and any(part["type"] == "media" for part in content)


@attrs.frozen
class MarkedMessages:
    """Messages in which markers stand for media, and the media by their markers."""

    messages: Messages
    media: Mapping[str, MediaSource] = attrs.field(factory=dict)

    def pieces(self, text: str) -> list[str]:
        """Split a rendered text at its markers: each second piece is one."""
        if not self.media:
            return [text]
        # The markers differ in one number, so that this takes no longer where there are many.
        pattern = re.sub(r"_\d+__>$", r"_\\d+__>", next(iter(self.media)))
        return re.split(f"({pattern})", text)

    def split(self, text: str) -> Sequence[str | MediaSource]:
        """Split a rendered text into text and media.

        Raises:
            UnsupportedFieldError: the template has left media out.
        """
        pieces = self.pieces(text)
        for marker in self.media.keys() - set(pieces):
            param = self.media[marker].param
            raise UnsupportedFieldError.at(
                param, "has no place in the chat template of this model."
            )
        return [self.media.get(piece, piece) for piece in pieces if piece]


# -- as clients write them


def parse_media_part(kind: str, part: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """Read a content part whose `type` is `kind`. None: that is no type of media.

    Raises:
        InvalidRequestError: something is missing or of the wrong type; `param` names it.
    """
    value, path = part.get(kind), f"{path}.{kind}"
    if kind == "file":
        given = {"file_data": value} if isinstance(value, str) else _mapping(value, path)
        return file_part(given, path)
    if kind not in _MEDIA_PARTS:
        return None
    media, fields = _MEDIA_PARTS[kind]
    if not isinstance(value, str):
        given = _mapping(value, path)
        detail = given.get("detail") if media == "image" else None
        if detail is not None and detail not in DETAILS:
            raise InvalidRequestError.at(f"{path}.detail", f"must be one of {', '.join(DETAILS)}.")
        value = next((given[name] for name in fields if name in given), None)
    return media_part(source_of(value, media, path))


def source_of(text: object, kind: MediaKind | None, param: str) -> MediaSource:
    """Read the place of a file, or the file: an http, https or file URL, a data URL, or base64.

    Raises:
        InvalidMediaError: it is something else, or the file is empty; names `param`.
        InvalidRequestError: it is not text.
    """
    if not isinstance(text, str):
        raise InvalidRequestError.at(param, "is missing." if text is None else "must be text.")
    text = text.strip()
    scheme = text[:8].lower()
    if scheme.startswith(("http://", "https://", "file://")):
        if len(text) > MAX_URL:
            raise InvalidMediaError.at(
                param, f"is a URL of {len(text)} characters, and {MAX_URL} are allowed."
            )
        return MediaSource(kind=kind, url=text, param=param)
    if scheme.startswith("data:"):
        media_type, data = split_data_url(text, param)
        if media_type.partition("/")[0] not in _KINDS and media_type not in UNTYPED:
            raise InvalidMediaError.at(
                param,
                f"is of the type {media_type!r:.80}; images, sound and videos can be given here.",
            )
        return MediaSource(kind=kind, data=data, param=param)
    return MediaSource(kind=kind, data=decode_base64(text, param), param=param)


def file_part(given: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Read OpenAI's object of a file, with its data, URL or id: a document, or media.

    Raises:
        UnknownFileError: the client has not uploaded it.
        UnsupportedFieldError: it is of no known type.
        InvalidMediaError: it is not valid base64.
        InvalidRequestError: something is of the wrong type. All name the field.
    """
    filename = "" if given.get("filename") is None else _text(given, "filename", path)
    if given.get("file_id") is not None:
        upload = upload_of(given, path)
        return _content_part(upload.data, filename or upload.name, f"{path}.file_id")
    field = "file_data" if given.get("file_url") is None else "file_url"
    param = f"{path}.{field}"
    data = _text(given, field, path).strip()
    if data[:5].lower() == "data:":
        media_type, content = split_data_url(data, param)
        return _content_part(content, filename, param, media_type)
    source = source_of(data, None, param)
    if source.data is None:
        return later(DocumentSource(url=source.url, name=filename, param=param))
    return _content_part(source.data, filename, param)


def _content_part(
    content: bytes, filename: str, param: str, media_type: str = ""
) -> dict[str, Any]:
    """Make a content part of a file whose type the client says, or does not say."""
    kind = _KINDS.get(media_type.partition("/")[0])
    if kind is None:
        if (part := document_part(content, name=filename, param=param)) is not None:
            return part
        if media_type.startswith("text/"):
            raise InvalidMediaError.at(param, "must be text in UTF-8 or UTF-16.")
        if media_type not in UNTYPED:
            raise UnsupportedFieldError.at(
                param,
                f"is of the type {media_type!r:.80}; text, PDFs, images, sound and "
                "videos can be read.",
            )
    return media_part(MediaSource(kind=kind, data=content, param=param))
