"""Parts of a message that are no text: media and documents."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_from_bytes

import pytest

from trioserve.chat import data_urls
from trioserve.chat.data_urls import data_of, decode_base64
from trioserve.chat.messages import (
    Attachment,
    Audio,
    Image,
    Video,
    document_part,
    documents_in,
    pages_of,
    parse_messages,
    write_document,
)
from trioserve.errors import (
    InvalidMediaError,
    InvalidRequestError,
    UnknownFileError,
    UnsupportedFieldError,
)
from trioserve.types import (
    DecodedDocument,
    DecodedImage,
    DecodedPage,
    DocumentSource,
    MediaSource,
)

DATA = bytes(range(256))
BASE64 = b64encode(DATA).decode()
PATH = "messages[0].content[0]"


def parse(part: Any) -> Any:
    ((parsed,),) = (message["content"] for message in parse_messages([user(part)]))
    return parsed


def user(part: Any) -> dict[str, Any]:
    return {"role": "user", "content": [part]}


@pytest.mark.parametrize(
    ("part", "source"),
    [
        (
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BASE64}"}},
            MediaSource(kind="image", data=DATA, param=f"{PATH}.image_url"),
        ),
        (
            {"type": "image_url", "image_url": {"url": BASE64, "detail": "high"}},
            MediaSource(kind="image", data=DATA, param=f"{PATH}.image_url"),
        ),
        (
            {"type": "image_url", "image_url": "HTTPS://example.org/cat.png"},
            MediaSource(kind="image", url="HTTPS://example.org/cat.png", param=f"{PATH}.image_url"),
        ),
        (
            {"type": "image_url", "image_url": {"url": "file://cat.png"}},
            MediaSource(kind="image", url="file://cat.png", param=f"{PATH}.image_url"),
        ),
        (
            {"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}},
            MediaSource(kind="audio", data=DATA, param=f"{PATH}.input_audio"),
        ),
        (
            {"type": "input_audio", "input_audio": {"url": "http://a.b/c.mp3"}},
            MediaSource(kind="audio", url="http://a.b/c.mp3", param=f"{PATH}.input_audio"),
        ),
        (
            {"type": "input_video", "input_video": {"data": BASE64}},
            MediaSource(kind="video", data=DATA, param=f"{PATH}.input_video"),
        ),
        (
            {"type": "video_url", "video_url": {"url": f"DATA:video/mp4;Base64,{BASE64}"}},
            MediaSource(kind="video", data=DATA, param=f"{PATH}.video_url"),
        ),
        (
            {"type": "file", "file": {"file_data": f"data:audio/wav;base64,{BASE64}"}},
            MediaSource(kind="audio", data=DATA, param=f"{PATH}.file.file_data"),
        ),
        (
            {"type": "file", "file": {"file_data": BASE64}},
            MediaSource(data=DATA, param=f"{PATH}.file.file_data"),
        ),
        (Image(DATA), MediaSource(kind="image", data=DATA, param=PATH)),
        (Audio("a.wav"), MediaSource(kind="audio", path="a.wav", param=PATH)),
        (Video(Path("a.mp4")), MediaSource(kind="video", path="a.mp4", param=PATH)),
        ({"type": "media", "media": MediaSource(url="x")}, MediaSource(url="x")),
    ],
)
def test_where_media_are(part: Any, source: MediaSource) -> None:
    assert parse(part) == {"type": "media", "media": source}


def test_a_file_of_text_is_text() -> None:
    data = b64encode("\ufeffGrüße".encode()).decode()
    for url in (f"data:text/plain;charset=utf-8;base64,{data}", data):
        part = {"type": "file", "file": {"filename": "a.txt", "file_data": url}}
        assert parse(part) == {"type": "text", "text": "File: a.txt\n```\nGrüße\n```"}


@pytest.mark.parametrize("attachment", [Image(DATA), Audio(DATA), Video(DATA)])
def test_what_a_program_gives_can_be_sent(attachment: Attachment) -> None:
    sent = parse(attachment.as_part())["media"]
    assert (sent.kind, sent.data) == (attachment.kind, DATA)


def test_a_path_is_read_where_it_is_sent(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(DATA)
    assert parse(Image(tmp_path / "a.png").as_part()) == {
        "type": "media",
        "media": MediaSource(kind="image", data=DATA, param=f"{PATH}.image_url"),
    }


@pytest.mark.parametrize(
    ("part", "error", "param"),
    [
        ({"type": "image_url"}, InvalidRequestError, "image_url"),
        ({"type": "image_url", "image_url": 5}, InvalidRequestError, "image_url"),
        ({"type": "image_url", "image_url": {}}, InvalidRequestError, "image_url"),
        ({"type": "image_url", "image_url": {"url": 5}}, InvalidRequestError, "image_url"),
        ({"type": "image_url", "image_url": ""}, InvalidMediaError, "image_url"),
        ({"type": "image_url", "image_url": "malformed!"}, InvalidMediaError, "image_url"),
        ({"type": "image_url", "image_url": "ftp://a/b"}, InvalidMediaError, "image_url"),
        ({"type": "image_url", "image_url": "\u0416\u0416\u0416"}, InvalidMediaError, "image_url"),
        (
            {"type": "image_url", "image_url": "data:image/png;base64,"},
            InvalidMediaError,
            "image_url",
        ),
        ({"type": "image_url", "image_url": "data:image/png,"}, InvalidMediaError, "image_url"),
        (
            {"type": "image_url", "image_url": "data:image/png;base64,%"},
            InvalidMediaError,
            "image_url",
        ),
        ({"type": "image_url", "image_url": "data:"}, InvalidMediaError, "image_url"),
        (
            {"type": "image_url", "image_url": "data:text/html;base64,aGVsbG8="},
            InvalidMediaError,
            "image_url",
        ),
        (
            {"type": "image_url", "image_url": "http://" + "a" * 9000},
            InvalidMediaError,
            "image_url",
        ),
        (
            {"type": "image_url", "image_url": {"url": BASE64, "detail": "much"}},
            InvalidRequestError,
            "image_url.detail",
        ),
        ({"type": "input_audio", "input_audio": {}}, InvalidRequestError, "input_audio"),
        ({"type": "video_url", "video_url": {}}, InvalidRequestError, "video_url"),
        ({"type": "file", "file": {"file_id": "f"}}, UnknownFileError, "file.file_id"),
        ({"type": "file", "file": {"filename": "f"}}, InvalidRequestError, "file.file_data"),
        (
            {"type": "file", "file": {"file_data": f"data:application/zip;base64,{BASE64}"}},
            UnsupportedFieldError,
            "file.file_data",
        ),
        (
            {"type": "file", "file": {"file_data": f"data:text/plain;base64,{BASE64}"}},
            InvalidMediaError,
            "file.file_data",
        ),
        ({"type": "media", "media": {"data": "x"}}, UnsupportedFieldError, "type"),
        ({"type": "hologram"}, UnsupportedFieldError, "type"),
    ],
)
def test_a_fault_is_named(part: Any, error: type[InvalidRequestError], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(part)
    assert type(caught.value) is error
    assert caught.value.param == f"{PATH}.{param}"
    assert f"'{PATH}.{param}'" in caught.value.message


@pytest.mark.parametrize(
    "url",
    [
        f"data:application/octet-stream;base64,{BASE64}",
        f"data:;base64,{BASE64}",
        f"DATA:image/png;name=a.png; base64,{BASE64}",
        f"data:image/png;base64,{quote(BASE64, safe='')}",
        f"data:image/png,{quote_from_bytes(DATA)}",
        f"\n data:image/png;base64, {BASE64} \n",
        f" {BASE64}\r\n",
    ],
    ids=lambda url: url[:40],
)
def test_data_as_clients_write_them(url: str) -> None:
    image = parse({"type": "image_url", "image_url": {"url": url}})["media"]
    assert (image.kind, image.data) == ("image", DATA)
    assert parse({"type": "file", "file": {"file_data": url}})["media"].data == DATA
    assert data_of(url, "x") == DATA


@pytest.mark.parametrize(("length", "space"), [(0, ""), (3, "\n"), (4, ""), (11, "\n"), (13, "")])
def test_base64_in_pieces(length: int, space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_urls, "_PIECE", 5)
    data = DATA[1 : length + 2]
    text = space.join(b64encode(data).decode())
    assert decode_base64(f"data:,{text}", "x", start=6) == data
    assert decode_base64(text.rstrip("="), "x") == data
    with pytest.raises(InvalidMediaError):
        decode_base64(f"{text.rstrip('=')}*", "x")


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
