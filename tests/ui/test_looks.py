"""The looks of the page, its accessibility, and its loading time."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.support.browsing import Visitor
from tests.support.chat_page import ChatPage
from tests.support.http_server import serving_script
from tests.support.paced_script import PacedScript
from tests.support.trio_thread import TrioThread
from tests.ui import showcase
from trioserve.api.service import Service

pytestmark = pytest.mark.system

#: Screenshots are written there, if it is set: `make screenshots` does.
FOLDER = os.environ.get("SCREENSHOTS")

LIGHT = {"color_scheme": "light", "viewport": {"width": 1280, "height": 860}}
DARK = {**LIGHT, "color_scheme": "dark"}
PHONE = {
    "color_scheme": "light",
    "viewport": {"width": 360, "height": 740},
    "has_touch": True,
    "is_mobile": True,
}
LOOKS = {"light": LIGHT, "dark": DARK, "phone": PHONE}

#: The first paint, in milliseconds. Where others use the machine as well, a page with one word may
#: take as long; then the limit is four times what that one takes.
FIRST_PAINT = 100

#: The faults that axe-core finds: things that keep people from using a page.
SERIOUS = ("serious", "critical")


def violations(page: Page) -> list[str]:
    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {node['html']} {node['failureSummary']}"
        for each in found
        if each["impact"] in SERIOUS
        for node in each["nodes"]
    ]


def scrolls_sideways(page: Page) -> bool:
    width = "document.scrollingElement.scrollWidth > document.scrollingElement.clientWidth"
    return bool(page.evaluate(width))


def shoot(page: Page, name: str, tmp_path: Path) -> None:
    """Take a screenshot, once everything stands still."""
    page.mouse.move(0, 0)
    page.screenshot(
        path=Path(FOLDER or tmp_path) / f"{name}.png", animations="disabled", caret="hide"
    )


@pytest.fixture(params=LOOKS)
def look(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def showing(loop: TrioThread) -> Iterator[str]:
    """A server for the chat of the screenshots."""
    backend = PacedScript().backend(showcase.MODEL, n_slots=1, n_ctx=8192, n_ctx_seq=8192)
    with loop.open(serving_script(backend)) as (url, _):
        yield url


def test_a_chat_looks_good(visitor: Visitor, showing: str, look: str, tmp_path: Path) -> None:
    """A chat with all that an answer can have."""
    page = visitor.visit(showing, device_scale_factor=2, **LOOKS[look])
    chat = ChatPage(page)
    chat.import_from(showcase.write(tmp_path / "chats.json"), "10 chats were added.")
    page.reload()
    if look == "phone":
        chat.button("Show the chats").click()
    chat.open(showcase.TITLE)
    expect(chat.answers.last).to_be_visible()
    expect(chat.answers.first.locator("math").first).to_be_attached()
    expect(chat.answers.first.locator(".hl-keyword").first).to_be_visible()
    assert not scrolls_sideways(page)
    assert violations(page) == []
    chat.questions.first.scroll_into_view_if_needed()
    shoot(page, f"chat-{look}", tmp_path)


@pytest.mark.parametrize("section", ["General", "This chat", "Your data"])
def test_settings_can_be_used_by_all(
    visitor: Visitor, server: tuple[str, Service], look: str, section: str
) -> None:
    chat = ChatPage(visitor.visit(server[0], **LOOKS[look]))
    if look == "phone":
        chat.button("Show the chats").click()
    with chat.settings(section):
        assert not scrolls_sideways(chat.page)
        assert violations(chat.page) == []


def test_the_activity_is_watched(
    visitor: Visitor, loop: TrioThread, look: str, tmp_path: Path
) -> None:
    """Three slots write, one reads a long prompt, and two requests wait."""
    script = PacedScript()
    script.seconds_a_token, script.seconds_a_prompt_token = 0.02, 0.002
    sizes = {"n_slots": 4, "n_seqs": 8, "n_ctx": 24576, "n_ctx_seq": 8192, "n_batch": 512}
    with loop.open(serving_script(script.backend(showcase.MODEL, **sizes))) as (url, _):
        page = visitor.visit(url, device_scale_factor=2, **LOOKS[look])
        chat = ChatPage(page)
        chat.import_from(showcase.write(tmp_path / "chats.json"), "10 chats were added.")
        if look != "phone":
            chat.open(showcase.TITLE)
        chat.button("Activity of the server").click()
        panel = page.get_by_role("complementary", name="Activity of the server")
        if FOLDER:  # there is something to see: texts that are kept, and a chart
            script.answer = "These words are tokens. " * 5
            _ask(url, 200, 350, 280, 150)
            expect(panel).to_contain_text("4 of 4 busy")
            expect(panel).to_contain_text("0 of 4 busy", timeout=60_000)
        script.answer = "These words are tokens, and there are more of them. " * 1_000
        _ask(url, 60, 400, 180)
        expect(panel).to_contain_text("3 of 4 busy")
        page.wait_for_timeout(9_000 if FOLDER else 0)
        _ask(url, 750, 20, 300)
        expect(panel).to_contain_text("2 waiting")
        page.wait_for_timeout(6_000 if FOLDER else 0)
        expect(panel).to_contain_text("prefill")
        assert not scrolls_sideways(page)
        assert violations(page) == []
        shoot(page, f"activity-{look}", tmp_path)
        page.close()  # before the server goes


def _ask(url: str, *lengths: int) -> None:
    """Have prompts of a number of words answered, and read none of the answers."""
    for n_words in lengths:
        words = " ".join(f"word{n_words + i}" for i in range(n_words))
        body = {"messages": [{"role": "user", "content": words}]}
        headers = {"Prefer": "respond-async, wait=0"}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 202, answer.text


def test_the_first_paint_is_soon(visitor: Visitor, server: tuple[str, Service]) -> None:
    """In the best of a few first visits."""
    visitor.expect("favicon.ico")  # a page without an icon has browsers ask for it
    times: dict[str, list[float]] = {"/": [], "/health": []}
    for path, measured in list(times.items()) * 6:
        page = visitor.visit(server[0] + path)
        measured.append(page.evaluate(_FIRST_PAINT))
        page.context.close()
    of_a_word = statistics.median(times["/health"])
    assert min(times["/"]) < max(FIRST_PAINT, 4 * of_a_word), times


_FIRST_PAINT = """async () => {
    const painted = () => performance.getEntriesByName("first-paint")[0];
    while (!painted()) await new Promise(requestAnimationFrame);
    return painted().startTime;
}"""
