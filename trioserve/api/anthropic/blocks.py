"""Blocks of Anthropic's messages that say something to the model: text, images, documents, results
of searches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeAlias

from trioserve.api.base.fields import MismatchError, mapping, named, objects, required, text
from trioserve.chat.documents import document_part, heading, later, text_part, write_document
from trioserve.chat.media_parts import decode_base64, media_part, source_of
from trioserve.chat.messages import MAX_PARTS, check_count
from trioserve.errors import InvalidMediaError, InvalidRequestError, UnsupportedFieldError
from trioserve.types import DocumentSource, MediaSource

#: A block and where it stands in the request: ``messages[0].content[1]``.
Block: TypeAlias = tuple[str, Mapping[str, Any]]

#: A part of a message in normal form.
Part: TypeAlias = dict[str, Any]

#: The types of blocks that become parts of a message.
KINDS = ("text", "image", "document", "search_result")


def content_of(value: Any) -> str | tuple[dict[str, Any], ...]:
    """Take what a field `content` may hold. Raises MismatchError: it is something else."""
    try:
        return value if isinstance(value, str) else objects(value)
    except MismatchError:
        raise MismatchError("a string or a list of blocks") from None


def blocks_of(content: str | tuple[dict[str, Any], ...], path: str) -> list[Block]:
    """Give the blocks of a content. A string is a block of text."""
    if isinstance(content, str):
        return [(path, {"type": "text", "text": content})]
    check_count(len(content), MAX_PARTS, path, "blocks")
    return [(f"{path}[{j}]", block) for j, block in enumerate(content)]


def text_of(block: Mapping[str, Any], path: str) -> str:
    """Read a block of text."""
    _refuse_citations(block, path)
    return required(block, "text", text, path)


def texts_of(blocks: Iterable[Block], owner: str) -> list[str]:
    """Take the texts of blocks that can be nothing else."""
    texts = []
    for path, block in blocks:
        if (kind := required(block, "type", text, path)) != "text":
            raise unsupported(kind, path, owner)
        texts.append(text_of(block, path))
    return texts


def parts_of(blocks: Iterable[Block], owner: str, kinds: Collection[str] = KINDS) -> list[Part]:
    """Read blocks of the types in `KINDS`, or those of them that `owner` may have.

    Raises:
        UnsupportedFieldError: a block is of another type; `owner` cannot have it.
        InvalidMediaError: a file is not valid base64, is of the wrong type, or cannot be read.
        InvalidRequestError: something is missing or has the wrong type. All name it.
    """
    parts: list[Part] = []
    for path, block in blocks:
        kind = required(block, "type", text, path)
        if kind not in kinds:
            raise unsupported(kind, path, owner)
        parts += _READERS[kind](block, path)
    return parts


def as_content(parts: list[Part]) -> str | list[Part]:
    """Make the content of a message: several parts stay apart, as the template has it."""
    if len(parts) == 1 and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    return parts or ""


def unsupported(kind: str, path: str, owner: str) -> UnsupportedFieldError:
    """Make the error of a block whose type is not one for `owner`."""
    return UnsupportedFieldError(
        f"'{path}.type' is {kind!r:.80}, which is not supported in {owner}.", param=f"{path}.type"
    )


def _refuse_citations(block: Mapping[str, Any], path: str) -> None:
    citations = block.get("citations")
    if citations and citations != {"enabled": False}:
        raise UnsupportedFieldError(
            f"'{path}.citations' is not supported; leave it out.", param=f"{path}.citations"
        )


def _said(block: Mapping[str, Any], path: str) -> list[Part]:
    return [text_part(text_of(block, path))]


# -- images


def _image(block: Mapping[str, Any], path: str) -> list[Part]:
    if block.get("transformations"):
        raise UnsupportedFieldError(
            f"'{path}.transformations' is not supported; leave it out.",
            param=f"{path}.transformations",
        )
    source, kind, path = _source(block, path)
    if kind == "url":
        found = source_of(required(source, "url", text, path), "image", f"{path}.url")
        return [media_part(found)]
    if kind != "base64":
        raise _unknown_source(kind, path, "base64", "url")
    media_type = required(source, "media_type", text, path)
    if not media_type.lower().startswith("image/"):
        raise InvalidRequestError(
            f"'{path}.media_type' must be the type of an image, such as image/png.",
            param=f"{path}.media_type",
        )
    data = decode_base64(required(source, "data", text, path), f"{path}.data")
    return [media_part(MediaSource(kind="image", data=data, param=f"{path}.data"))]


# -- documents


def _document(block: Mapping[str, Any], path: str) -> list[Part]:
    """Read a document: its title and what is said about it stand before it."""
    _refuse_citations(block, path)
    name = _optional_text(block, "title", path)
    about = _optional_text(block, "context", path)
    source, kind, path = _source(block, path)
    match kind:
        case "text":
            return [_written(required(source, "data", text, path), name, about)]
        case "content":
            content = required(source, "content", content_of, path)
            if isinstance(content, str):
                return [_written(content, name, about)]
            head = [text_part("\n".join(heading(name, about)))] if name or about else []
            blocks = blocks_of(content, f"{path}.content")
            return head + parts_of(blocks, "a document", ("text", "image"))
        case "base64":
            param = f"{path}.data"
            data = decode_base64(required(source, "data", text, path), param)
            part = document_part(data, name=name, about=about, param=param)
            if part is None:
                raise InvalidMediaError(f"'{param}' is neither a PDF nor a text.", param=param)
            return [part]
        case "url":
            param = f"{path}.url"
            url = source_of(required(source, "url", text, path), None, param).url
            if url is None:
                raise InvalidMediaError(
                    f"'{param}' must be a URL of http, https or file.", param=param
                )
            return [later(DocumentSource(url=url, name=name, about=about, param=param))]
    raise _unknown_source(kind, path, "base64", "text", "content", "url")


def _written(said: str, name: str, about: str) -> Part:
    return text_part(write_document(said, name=name, about=about))


def _optional_text(block: Mapping[str, Any], name: str, path: str) -> str:
    value = block.get(name)
    return "" if value is None else named(text, value, f"{path}.{name}")


def _search_result(block: Mapping[str, Any], path: str) -> list[Part]:
    """Read what a search has found: its title and where it is from stand before it."""
    _refuse_citations(block, path)
    title, source = (required(block, name, text, path) for name in ("title", "source"))
    content = required(block, "content", content_of, path)
    said = texts_of(blocks_of(content, f"{path}.content"), "the result of a search")
    about = f"Search result: {title}\nSource: {source}"
    return [text_part(write_document("\n\n".join(said), about=about))]


# -- sources


def _source(block: Mapping[str, Any], path: str) -> tuple[Mapping[str, Any], str, str]:
    """Give the source of a block, its type, and its place."""
    source, path = required(block, "source", mapping, path), f"{path}.source"
    return source, required(source, "type", text, path), path


def _unknown_source(kind: str, path: str, *known: str) -> UnsupportedFieldError:
    if kind == "file":
        problem = "is 'file', and no files are kept here; send the file itself"
    else:
        problem = f"is {kind!r:.80}; it must be one of {', '.join(known)}"
    return UnsupportedFieldError(f"'{path}.type' {problem}.", param=f"{path}.type")


_READERS: Mapping[str, Callable[[Mapping[str, Any], str], list[Part]]] = {
    "text": _said,
    "image": _image,
    "document": _document,
    "search_result": _search_result,
}
