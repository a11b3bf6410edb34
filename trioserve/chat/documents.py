"""Documents in a chat: files of text and PDFs, which the model gets as text.

A PDF has to be decoded first, and a file with an address to be fetched. Until then it is a part
``{"type": "document", "document": DocumentSource(...)}``, which no template sees.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trioserve.types import DecodedDocument, DocumentSource, MediaSource


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
