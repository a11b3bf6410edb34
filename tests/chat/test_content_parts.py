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


def parse(given: Any) -> Any:
    ((parsed,),) = (
        message["content"] for message in parse_messages([{"role": "user", "content": [given]}])
    )
    return parsed


def part(kind: str, value: Any = None, /, **fields: Any) -> dict[str, Any]:
    """A content part with a value, or with an object of these fields."""
    return {"type": kind, kind: fields if value is None else value}


@pytest.mark.parametrize(
    ("given", "kind", "place"),
    [
        (part("image_url", url=f"data:image/png;base64,{BASE64}"), "image", {"data": DATA}),
        (part("image_url", url=BASE64, detail="high"), "image", {"data": DATA}),
        (part("image_url", "HTTPS://a.org/b.png"), "image", {"url": "HTTPS://a.org/b.png"}),
        (part("image_url", url="file://cat.png"), "image", {"url": "file://cat.png"}),
        (part("input_audio", data=BASE64, format="wav"), "audio", {"data": DATA}),
        (part("input_audio", url="http://a.b/c.mp3"), "audio", {"url": "http://a.b/c.mp3"}),
        (part("input_video", data=BASE64), "video", {"data": DATA}),
        (part("video_url", url=f"DATA:video/mp4;Base64,{BASE64}"), "video", {"data": DATA}),
        (part("file", file_data=f"data:audio/wav;base64,{BASE64}"), "audio", {"data": DATA}),
        (part("file", file_data=BASE64), None, {"data": DATA}),
        (Image(DATA), "image", {"data": DATA}),
        (Audio("a.wav"), "audio", {"path": "a.wav"}),
        (Video(Path("a.mp4")), "video", {"path": "a.mp4"}),
    ],
)
def test_where_media_are(given: Any, kind: Any, place: dict[str, Any]) -> None:
    param = PATH if isinstance(given, Attachment) else f"{PATH}.{given['type']}"
    param += ".file_data" if param.endswith(".file") else ""
    source = MediaSource(kind=kind, param=param, **place)
    assert parse(given) == {"type": "media", "media": source}


def test_what_is_in_normal_form_stays() -> None:
    given = part("media", MediaSource(url="x"))
    assert parse(given) == given


def test_a_file_of_text_is_text() -> None:
    data = b64encode("\ufeffGrüße".encode()).decode()
    for url in (f"data:text/plain;charset=utf-8;base64,{data}", data):
        assert parse(part("file", filename="a.txt", file_data=url)) == {
            "type": "text",
            "text": "File: a.txt\n```\nGrüße\n```",
        }


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
    ("given", "error", "param"),
    [
        ({"type": "image_url"}, InvalidRequestError, "image_url"),
        (part("image_url", 5), InvalidRequestError, "image_url"),
        (part("image_url"), InvalidRequestError, "image_url"),
        (part("image_url", url=5), InvalidRequestError, "image_url"),
        (part("image_url", ""), InvalidMediaError, "image_url"),
        (part("image_url", "malformed!"), InvalidMediaError, "image_url"),
        (part("image_url", "ftp://a/b"), InvalidMediaError, "image_url"),
        (part("image_url", "\u0416\u0416\u0416"), InvalidMediaError, "image_url"),
        (part("image_url", "data:image/png;base64,"), InvalidMediaError, "image_url"),
        (part("image_url", "data:image/png,"), InvalidMediaError, "image_url"),
        (part("image_url", "data:image/png;base64,%"), InvalidMediaError, "image_url"),
        (part("image_url", "data:"), InvalidMediaError, "image_url"),
        (part("image_url", "data:text/html;base64,aGVsbG8="), InvalidMediaError, "image_url"),
        (part("image_url", "http://" + "a" * 9000), InvalidMediaError, "image_url"),
        (part("image_url", url=BASE64, detail="much"), InvalidRequestError, "image_url.detail"),
        (part("input_audio"), InvalidRequestError, "input_audio"),
        (part("video_url"), InvalidRequestError, "video_url"),
        (part("file", file_id="f"), UnknownFileError, "file.file_id"),
        (part("file", filename="f"), InvalidRequestError, "file.file_data"),
        (
            part("file", file_data=f"data:application/zip;base64,{BASE64}"),
            UnsupportedFieldError,
            "file.file_data",
        ),
        (
            part("file", file_data=f"data:text/plain;base64,{BASE64}"),
            InvalidMediaError,
            "file.file_data",
        ),
        (part("media", data="x"), UnsupportedFieldError, "type"),
        ({"type": "hologram"}, UnsupportedFieldError, "type"),
    ],
)
def test_a_fault_is_named(given: Any, error: type[InvalidRequestError], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(given)
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
    image = parse(part("image_url", url=url))["media"]
    assert (image.kind, image.data) == ("image", DATA)
    assert parse(part("file", file_data=url))["media"].data == DATA
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
    text = document_part("Köln\nBonn\n".encode(encoding), name="a.txt", about="Two.", param="p")
    assert text == {"type": "text", "text": "File: a.txt\nTwo.\n```\nKöln\nBonn\n```"}


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\n", b"RIFF\x00\x00", b"\xff\xfe\x00\xd8"])
def test_other_files_are_no_documents(data: bytes) -> None:
    assert document_part(data, param="p") is None


def test_a_pdf_is_decoded_later() -> None:
    pdf = document_part(b"%PDF-1.7\n", name="a.pdf", param="p")
    source = DocumentSource(data=b"%PDF-1.7\n", name="a.pdf", param="p")
    assert pdf == {"type": "document", "document": source}
    (message,) = parse_messages([{"role": "user", "content": [pdf]}])
    assert message["content"] == [pdf]
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
