"""Documents in a chat: files of text, which the model gets as text."""

from __future__ import annotations

import re

from trioserve.errors import InvalidMediaError


def read_document(data: bytes, param: str) -> str | None:
    """Read the text of a file: UTF-8, or UTF-16 with its mark. None: it is no text.

    Raises:
        InvalidMediaError: it is a PDF; `param` names the field.
    """
    if data.startswith(b"%PDF-"):
        raise InvalidMediaError(
            f"'{param}' is a PDF, which this server does not read; send its text, or a picture of "
            "each page.",
            param=param,
        )
    encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def write_document(text: str, *, name: str = "", about: str = "") -> str:
    """Write a document for the model: in a fence that its text cannot close, below its name."""
    longest = max(map(len, re.findall("`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return "\n".join([*heading(name, about), fence, text.removesuffix("\n"), fence])


def heading(name: str, about: str) -> list[str]:
    """The lines that stand before a document: its name, and what is said about it."""
    return [f"File: {name}"] * bool(name) + [about] * bool(about)
