"""PDFs in chats: decoded in a process, as text and images, refused by name."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.clients import client_of
from tests.support.media_bombs import damage
from tests.support.media_files import image_file
from tests.support.pdf_files import pdf_file
from tests.support.projectors import WordProjector
from tests.support.scripts import answering, noting
from trioserve.errors import InvalidMediaError, NotSupportedError
from trioserve.media.orders import MediaLimits
from trioserve.server.limits.memory import MemoryBudget
from trioserve.server.media import loader as media
from trioserve.server.media.loader import MediaLoader
from trioserve.types import DocumentSource

pytestmark = pytest.mark.system

#: The number of files to damage, and of files to cut off; in ``make fuzz``, 200.
N_DAMAGED = int(os.environ.get("N_DAMAGED_MEDIA", "6"))

FIELD = "messages[0].content[0].file.file_data"


@pytest.fixture
async def loader() -> AsyncIterator[MediaLoader]:
    loader = MediaLoader(MediaLimits(max_frames=3))
    yield loader
    await loader.aclose()


@pytest.fixture
def budget() -> MemoryBudget:
    return MemoryBudget(2**28)


def asked(data: bytes) -> dict[str, Any]:
    given = {"filename": "a.pdf", "file_data": b64encode(data).decode()}
    return {"messages": [{"role": "user", "content": [{"type": "file", "file": given}]}]}


def needs_pdf() -> None:
    pytest.importorskip("pypdfium2", reason="the extra trioserve[pdf] is not installed")


async def test_the_pages_of_a_pdf(loader: MediaLoader, budget: MemoryBudget) -> None:
    needs_pdf()
    source = DocumentSource(data=pdf_file("One", "", "Two\nlines"))
    with budget.hold() as hold:
        document = await loader.load_document(source, with_images=True, hold=hold)
        assert [page.text for page in document.pages] == ["One", "", "Two\nlines"]
        for page in document.pages:
            assert page.image is not None
            assert (page.image.width, page.image.height) == (1536, 768)
            assert page.image.pixels[:3] == b"\xff\0\0"
        assert hold.n_bytes > 3 * 1536 * 768 * 3
        document = await loader.load_document(source, with_images=False, hold=hold)
        assert [page.image for page in document.pages] == [None] * 3


async def test_a_long_page(loader: MediaLoader, budget: MemoryBudget) -> None:
    needs_pdf()
    text = "\n".join(["a line of text"] * 600)
    source = DocumentSource(data=pdf_file(text, size=(200, 14_000)))
    with budget.hold() as hold:
        (page,) = (await loader.load_document(source, with_images=True, hold=hold)).pages
    assert page.text == text
    assert page.image is not None and page.image.height == 1536


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"%PDF-1.7 and nothing more", "cannot be read"),
        (pdf_file("One")[:200], "cannot be read"),
        (pdf_file(*"abcd"), "has 4 pages, and 3 at most"),
        (b"%PDF-" + bytes(2**26), "has more than"),
    ],
)
async def test_a_file_that_cannot_be_used(
    loader: MediaLoader, budget: MemoryBudget, data: bytes, problem: str
) -> None:
    needs_pdf()
    source = DocumentSource(data=data, param="p")
    with budget.hold() as hold, pytest.raises(InvalidMediaError, match=problem) as caught:
        await loader.load_document(source, with_images=True, hold=hold)
    assert caught.value.param == "p"


async def test_damaged_files_are_decoded_or_refused(
    loader: MediaLoader, budget: MemoryBudget
) -> None:
    needs_pdf()
    good = pdf_file("One", "", "Two\nlines")
    step = max(1, len(good) // N_DAMAGED)
    damaged = [damage(good, seed) for seed in range(N_DAMAGED)]
    damaged += [good[:length] for length in range(5, len(good), step)]
    for data in (*damaged, good):
        with budget.hold() as hold, trio.fail_after(40):
            try:
                source = DocumentSource(data=data)
                document = await loader.load_document(source, with_images=True, hold=hold)
            except InvalidMediaError:
                assert data is not good
        assert budget.n_held == 0
    assert [page.text for page in document.pages] == ["One", "", "Two\nlines"]


async def test_without_the_extra_a_pdf_is_refused(
    loader: MediaLoader, budget: MemoryBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "has_extra", lambda name: False)
    source = DocumentSource(data=pdf_file("One"), param="p")
    with budget.hold() as hold, pytest.raises(NotSupportedError, match=r"trioserve\[pdf\]") as info:
        await loader.load_document(source, with_images=True, hold=hold)
    assert info.value.param == "p"


async def test_a_chat_about_a_pdf() -> None:
    needs_pdf()
    for projector, said in (
        (None, "File: a.pdf, page 1\n```\nOne\n```"),
        (WordProjector(), "File: a.pdf, page 1\n```\nOne\n```(image 1536x768)"),
    ):
        backend, prompts = noting("Yes.", projector=projector)
        async with client_of(backend) as client:
            answer = await client.post("/v1/chat/completions", json=asked(pdf_file("One")))
            counted = await client.post(
                "/v1/chat/completions/input_tokens", json=asked(pdf_file("One"))
            )
            rendered = await client.post("/apply-template", json=asked(pdf_file("One")))
        assert said in prompts[0]
        assert counted.json()["input_tokens"] == answer.json()["usage"]["prompt_tokens"]
        assert "page 1\n```\nOne\n```" in rendered.json()["prompt"]


async def test_files_with_an_address(tmp_path: Path) -> None:
    needs_pdf()
    (tmp_path / "a.pdf").write_bytes(pdf_file("One"))
    (tmp_path / "b.txt").write_text("Two")
    (tmp_path / "c.png").write_bytes(image_file(size=(8, 4)))
    backend, prompts = noting("Yes.", projector=WordProjector())
    parts = [
        {"type": "input_file", "filename": name, "file_url": f"file://{name}"}
        for name in ("a.pdf", "b.txt", "c.png", "d.pdf")
    ]
    async with client_of(backend, media_path=str(tmp_path)) as client:
        items = [{"role": "user", "content": parts[:3]}]
        answer = await client.post("/v1/responses", json={"input": items})
        assert answer.status_code == 200, answer.text
        items = [{"role": "user", "content": parts}]
        answer = await client.post("/v1/responses", json={"input": items})
    assert answer.json()["error"]["param"] == "input[0].content[3].file_url"
    assert (
        "File: a.pdf, page 1\n```\nOne\n```(image 1536x768)File: b.txt\n```\nTwo\n```" in prompts[0]
    )
    assert "```(image 8x4)" in prompts[0]


async def test_there_may_be_a_hundred_documents() -> None:
    (message,) = asked(pdf_file("One"))["messages"]
    async with client_of(answering("Yes.")) as client:
        body = {"messages": [{**message, "content": message["content"] * 101}]}
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.json()["error"]["param"] == "messages[0].content[100].file.file_data"


async def test_a_scan_needs_a_model_that_sees() -> None:
    needs_pdf()
    async with client_of(answering("Yes.")) as client:
        answer = await client.post("/v1/chat/completions", json=asked(pdf_file("")))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == FIELD
    assert "has no text, and this model sees no images" in answer.json()["error"]["message"]
