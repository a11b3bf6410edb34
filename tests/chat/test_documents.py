"""Files that may be text."""

from __future__ import annotations

import pytest

from trioserve.chat.documents import read_document, write_document
from trioserve.errors import InvalidMediaError


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_text_is_read(encoding: str) -> None:
    assert read_document("Köln\nBonn\n".encode(encoding), "p") == "Köln\nBonn\n"


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\n", b"RIFF\x00\x00", b"\xff\xfe\x00\xd8"])
def test_other_files_are_no_text(data: bytes) -> None:
    assert read_document(data, "p") is None


def test_a_pdf_is_refused() -> None:
    with pytest.raises(InvalidMediaError, match="'p' is a PDF") as caught:
        read_document(b"%PDF-1.7\n", "p")
    assert caught.value.param == "p"


def test_a_document_has_its_name_and_a_fence() -> None:
    written = write_document("Köln\nBonn\n", name="cities.txt", about="On the Rhine.")
    assert written == "File: cities.txt\nOn the Rhine.\n```\nKöln\nBonn\n```"


def test_a_fence_is_longer_than_those_in_the_text() -> None:
    assert write_document("````\nx\n````") == "`````\n````\nx\n````\n`````"
