"""Pictures, recordings and drawings, from the page to the prompt."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Locator, Page, Route, expect

from tests.support.browsing import Visitor
from tests.support.chat_page import ChatPage
from tests.support.http_server import serving, serving_script
from tests.support.paced_script import PacedScript
from tests.support.pdf_files import pdf_file
from tests.support.projectors import WordProjector
from tests.support.trio_thread import TrioThread
from tests.ui.hostile import RUN
from tests.ui.test_looks import FOLDER, LOOKS, scrolls_sideways, shoot, violations
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.types import SamplingParams

pytestmark = pytest.mark.system

NAME = f'"><img src=x onerror="{RUN}">.png'


@pytest.fixture(scope="module")
def media_server(loop: TrioThread, _script: PacedScript) -> Iterator[str]:
    """A server whose model finds the sizes of pictures and recordings in its prompt."""
    with loop.open(serving_script(_script.backend(projector=WordProjector()))) as (url, _):
        yield url


@pytest.fixture
def chat(visitor: Visitor, media_server: str) -> ChatPage:
    return ChatPage(visitor.visit(media_server))


def png(width: int, height: int, **more: object) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "teal").save(file, "PNG", **more)
    return file.getvalue()


def choose(chat: ChatPage, name: str, content: bytes, type_: str = "image/png") -> None:
    with chat.page.expect_file_chooser() as chooser:
        chat.button("Attach files").click()
    chooser.value.set_files({"name": name, "mimeType": type_, "buffer": content})


def attached(page: Page) -> Locator:
    return page.get_by_role("list", name="Attached files").get_by_role("listitem")


def hand_over(page: Page, event: str, content: bytes, name: str) -> None:
    """Let the page have a file as the browser would: ``paste`` into the field, or ``drop``."""
    page.evaluate(_HAND_OVER, [event, name, base64.b64encode(content).decode()])


_HAND_OVER = """([event, name, content]) => {
    const bytes = Uint8Array.from(atob(content), (one) => one.charCodeAt(0));
    const files = new DataTransfer();
    files.items.add(new File([bytes], name, { type: "image/png" }));
    const details = { bubbles: true, cancelable: true };
    if (event === "paste") {
        const pasted = new ClipboardEvent("paste", { ...details, clipboardData: files });
        document.getElementById("message").dispatchEvent(pasted);
        return;
    }
    const dropped = { ...details, dataTransfer: files };
    document.body.dispatchEvent(new DragEvent("dragenter", dropped));
    return new Promise((resolve) => requestAnimationFrame(() => {
        document.querySelector(".drop-zone").dispatchEvent(new DragEvent("drop", dropped));
        resolve();
    }));
}"""


def test_a_picture_is_sent_and_kept(
    chat: ChatPage, script: PacedScript, visitor: Visitor, tmp_path: Path
) -> None:
    """Its name is hostile, as a name from anywhere may be."""
    page = chat.page
    choose(chat, NAME, png(8, 4))
    expect(attached(page).get_by_role("presentation")).to_be_visible()
    assert violations(page) == []
    with page.expect_request("**/chat/completions") as request:
        chat.ask("What is it?")
    picture = base64.b64encode(png(8, 4)).decode()
    assert request.value.post_data_json["messages"][-1]["content"] == [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
        {"type": "text", "text": "What is it?"},
    ]
    assert "(image 8x4)" in script.prompts[-1]

    page.reload()
    page.get_by_role("navigation").get_by_role("link", name="What is it?").click()
    shown = chat.questions.first.get_by_role("img", name=NAME)
    assert shown.evaluate("image => image.decode().then(() => image.naturalWidth)") == 8
    shown.click()
    expect(shown.locator("..")).to_have_attribute("aria-expanded", "true")
    chat.questions.first.get_by_role("button", name="Edit").click()
    editor = chat.questions.first.get_by_role("textbox")
    editor.fill("And now?")
    editor.press("Enter")
    chat.wait_until_done()
    assert "(image 8x4)" in script.prompts[-1] and "And now?" in script.prompts[-1]

    chat.export_to(tmp_path / "chats.json")
    assert picture in (tmp_path / "chats.json").read_text(encoding="utf-8")
    other = ChatPage(visitor.visit(page.url.partition("#")[0]))
    other.import_from(tmp_path / "chats.json", "1 chat was added.")
    other.open("What is it?")
    shown = other.questions.first.get_by_role("img", name=NAME)
    assert shown.evaluate("image => image.decode().then(() => image.naturalWidth)") == 8
    assert violations(other.page) == []


def test_pictures_are_pasted_dropped_and_taken_out(chat: ChatPage, script: PacedScript) -> None:
    expect(chat.composer).to_be_focused()
    for number, (event, size) in enumerate(
        [("paste", (10, 20)), ("drop", (30, 40)), ("drop", (4096, 2048))]
    ):
        hand_over(chat.page, event, png(*size), f"{number}.png")
        expect(attached(chat.page).nth(number)).to_contain_text(f"{number}.png")
    chat.button("Remove 0.png").click()
    expect(chat.composer).to_be_focused()
    chat.button("Send").click()  # without a word
    expect(chat.answers).to_contain_text([script.answer])
    assert "(image 30x40)" in script.prompts[-1] and "10x20" not in script.prompts[-1]
    assert "(image 2896x1448)" in script.prompts[-1]


@contextmanager
def drawing(page: Page) -> Iterator[Locator]:
    """Open the sheet, and attach what is drawn on it."""
    page.get_by_role("button", name="Draw", exact=True).click()
    dialog = page.get_by_role("dialog", name="Draw")
    yield dialog
    n_attached = attached(page).count()
    dialog.get_by_role("button", name="Attach").click()
    expect(dialog).to_have_count(0)
    expect(attached(page)).to_have_count(n_attached + 1)


def draw(page: Page, *points: tuple[float, float]) -> None:
    """Draw a line through points of the sheet, whose sides have the length of 1."""
    box = page.get_by_role("img", name="The sheet").bounding_box()
    assert box is not None
    for number, (x, y) in enumerate(points):
        page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"], steps=5)
        if number == 0:
            page.mouse.down()
    page.mouse.up()


def test_a_digit_is_drawn(chat: ChatPage, script: PacedScript) -> None:
    page = chat.page
    with drawing(page) as dialog:
        draw(page, (0.3, 0.2), (0.3, 0.8))
        draw(page, (0.6, 0.2), (0.6, 0.8))
        dialog.get_by_role("button", name="Undo").click()
        assert violations(page) == []
        assert not scrolls_sideways(page)
    with page.expect_request("**/chat/completions") as request:
        chat.ask("What digit is it?")
    assert "(image 512x512)" in script.prompts[-1]
    url = request.value.post_data_json["messages"][-1]["content"][0]["image_url"]["url"]
    drawn = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("L")
    ink = drawn.point(lambda level: 255 * (level < 128)).getbbox()
    assert ink is not None
    left, top, right, bottom = (side / 512 for side in ink)
    assert 0.25 < left < 0.3 < right < 0.35 and 0.15 < top < 0.2 and 0.8 < bottom < 0.85


@asynccontextmanager
async def serving_bundled() -> AsyncIterator[str]:
    """Serve the model that comes with trioserve, without chance."""
    look = '{"showMessageStats": false}'
    sampling = SamplingParams(temperature=0)
    app = create_app(Config(sampling=sampling, ui_config=look))
    async with serving(app) as url:
        await app.extensions["trioserve"].wait_loaded()
        yield url


def test_the_bundled_model_reads_a_digit(
    visitor: Visitor, loop: TrioThread, tmp_path: Path
) -> None:
    with loop.open(serving_bundled()) as url:
        for look in ("light", "dark") if FOLDER else ("light",):
            settings = LOOKS[look] | {"viewport": {"width": 1000, "height": 920}}
            page = visitor.visit(url, device_scale_factor=2, **settings)
            chat = ChatPage(page)
            with drawing(page) as dialog:
                dialog.get_by_role("radio", name="Green").check()
                draw(page, (0.28, 0.18), (0.72, 0.18), (0.46, 0.86))
            expect(chat.ask("What digit is it?")).to_contain_text("The number is 7.")
            expect(chat.ask("What color is it?")).to_contain_text("The color is green.")
            shoot(page, f"digit-{look}", tmp_path)
            page.close()


def test_the_microphone_is_recorded(chat: ChatPage, script: PacedScript) -> None:
    page = chat.page
    chat.button("Record").click()
    expect(page.get_by_text("does not let the page use the microphone")).to_be_visible()
    page.context.grant_permissions(["microphone"])
    chat.button("Record").click()
    expect(chat.button("Stop recording")).to_contain_text("0:01")
    chat.button("Stop recording").click()
    expect(attached(page)).to_contain_text([re.compile(r"Recording .+\.webm")])
    chat.ask("What do you hear?")
    heard = re.search(r"\(sound ([\d.]+)s\)", script.prompts[-1])
    assert heard is not None and 0.5 < float(heard[1]) < 10, script.prompts[-1]
    player = chat.questions.first.locator("audio")
    expect(player).to_have_attribute("aria-label", re.compile("^Recording"))
    page.wait_for_function("document.querySelector('audio').readyState > 0")
    assert violations(page) == []


def test_what_cannot_be_attached_is_told_of(chat: ChatPage, tmp_path: Path) -> None:
    large = tmp_path / "long.mp3"
    large.write_bytes(bytes(50_000_001))
    choose(chat, "broken.png", png(8, 8)[:40])
    expect(chat.page.get_by_text("broken.png")).to_contain_text("cannot be read as a picture")
    with chat.page.expect_file_chooser() as chooser:
        chat.button("Attach files").click()
    chooser.value.set_files(large)
    expect(chat.page.get_by_text("long.mp3")).to_contain_text("too large. The limit is 50 MB")
    choose(chat, "some.zip", b"PK\3\4\0\0", "application/zip")
    expect(chat.page.get_by_text("some.zip")).to_contain_text(
        "is neither a text nor a PDF, a picture"
    )
    expect(attached(chat.page)).to_have_count(0)


def test_a_pdf_is_sent_and_comes_back(chat: ChatPage, script: PacedScript, tmp_path: Path) -> None:
    """The server reads it: the model gets its text and its pages."""
    content = pdf_file("First page", "Second page")
    choose(chat, "report.pdf", content, "")
    expect(attached(chat.page)).to_contain_text("report.pdf")
    chat.ask("What does it say?")
    prompt = script.prompts[-1]
    assert (
        prompt.index("report.pdf, page 1")
        < prompt.index("First page")
        < prompt.index("Second page")
    )
    assert "(image " in prompt
    chat.export_to(tmp_path / "chats.json")
    with chat.settings("Your data") as panel:
        panel.get_by_role("button", name="Delete all chats").click()
        panel.get_by_role("button", name="Delete them").click()
    chat.import_from(tmp_path / "chats.json", "1 chat was added.")
    chat.chats.first.get_by_role("link").click()
    with chat.page.expect_download() as download:
        chat.questions.first.get_by_role("button", name="report.pdf").click()
    assert Path(download.value.path()).read_bytes() == content


def test_a_server_that_reads_no_pdfs(visitor: Visitor, media_server: str) -> None:
    page = visitor.visit(media_server)

    def without(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json={**answer.json(), "takes_pdf": False})

    page.route("**/props*", without)
    page.reload()
    chat = ChatPage(page)
    expect(chat.button("Draw")).to_be_visible()
    choose(chat, "report.pdf", pdf_file("A page"), "application/pdf")
    expect(page.get_by_text("report.pdf")).to_contain_text("this server reads no PDFs")
    expect(attached(page)).to_have_count(0)


def test_a_model_without_eyes_and_ears(
    visitor: Visitor, server: tuple[str, object], script: PacedScript
) -> None:
    """Also where a picture is pasted before the page knows what the model takes."""
    page = visitor.visit(server[0])
    held: list[Route] = []
    is_known = False
    page.route("**/props*", lambda one: one.continue_() if is_known else held.append(one))
    page.reload()
    chat = ChatPage(page)
    expect(chat.composer).to_be_focused()
    hand_over(page, "paste", png(8, 8), "early.png")
    expect(attached(page)).to_contain_text("early.png")
    is_known = True
    for route in held:
        route.continue_()
    expect(page.get_by_text(re.compile("early.png.*takes no pictures"))).to_be_visible()
    expect(attached(page)).to_have_count(0)

    expect(chat.button("Attach text files")).to_be_visible()
    for name in ("Draw", "Record"):
        expect(chat.button(name)).to_have_count(0)
    hand_over(page, "paste", png(8, 8), "one.png")
    expect(page.get_by_text("one.png")).to_contain_text("this model takes no pictures")
    expect(attached(page)).to_have_count(0)


def test_no_file_of_an_import_is_anything_else(chat: ChatPage, tmp_path: Path) -> None:
    """One that holds a page would be a page of this server, were it opened."""
    chat.ask("Hello")
    chat.export_to(tmp_path / "chats.json")
    content = json.loads((tmp_path / "chats.json").read_text(encoding="utf-8"))
    content["chats"][0]["id"] = "another"
    page = base64.b64encode(f"<script>{RUN}</script>".encode()).decode()
    file = {"name": "a.png", "data": f"data:text/html;base64,{page}"}
    content["chats"][0]["messages"][0]["attachments"] = [file]
    (tmp_path / "chats.json").write_text(json.dumps(content), encoding="utf-8")
    chat.import_from(tmp_path / "chats.json", "is no picture, recording or video")
