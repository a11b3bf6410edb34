"""Documents in a chat: text, and the pages of a PDF."""

from __future__ import annotations

import pytest

from trioserve.chat.documents import document_part, documents_in, pages_of, write_document
from trioserve.chat.messages import parse_messages
from trioserve.types import (
    DecodedDocument,
    DecodedImage,
    DecodedPage,
    DocumentSource,
    MediaSource,
)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_text_is_given_as_text(encoding: str) -> None:
    part = document_part("Köln\nBonn\n".encode(encoding), name="a.txt", about="Two.", param="p")
    assert part == {"type": "text", "text": "File: a.txt\nTwo.\n```\nKöln\nBonn\n```"}


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\n", b"RIFF\x00\x00", b"\xff\xfe\x00\xd8"])
def test_other_files_are_no_documents(data: bytes) -> None:
    assert document_part(data, param="p") is None


def test_a_pdf_is_decoded_later() -> None:
    part = document_part(b"%PDF-1.7\n", name="a.pdf", param="p")
    source = DocumentSource(data=b"%PDF-1.7\n", name="a.pdf", param="p")
    assert part == {"type": "document", "document": source}
    (message,) = parse_messages([{"role": "user", "content": [part]}])
    assert message["content"] == [part]
    assert documents_in(message) == [source]
    assert documents_in({"role": "user", "content": "Hi"}) == []


def test_a_fence_is_longer_than_those_in_the_text() -> None:
    assert write_document("````\nx\n````") == "`````\n````\nx\n````\n`````"


def test_pages_are_text_and_images() -> None:
    image = DecodedImage(width=1, height=1, pixels=b"abc", id="i")
    pages = (DecodedPage(text="One\n", image=image), DecodedPage(text=" \n", image=image))
    source = DocumentSource(data=b"", name="a.pdf", about="Two pages.", param="p")
    picture = {"type": "media", "media": MediaSource(kind="image", decoded=image, param="p")}
    assert pages_of(source, DecodedDocument(pages=pages)) == [
        {"type": "text", "text": "Two pages."},
        {"type": "text", "text": "File: a.pdf, page 1\n```\nOne\n```"},
        picture,
        {"type": "text", "text": "File: a.pdf, page 2"},
        picture,
    ]
