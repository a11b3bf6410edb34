"""Whatever a model, a file or a person writes is text: it runs nothing, and loads nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Locator, expect

from tests.support.browsing import Visitor
from tests.support.chat_files import chat_of, write_chats
from tests.support.chat_page import ChatPage
from tests.support.paced_script import PacedScript
from tests.ui.hostile import ESCAPE, HEAVY, HOSTILE, PICTURES, RUN, SLOW

pytestmark = pytest.mark.system

#: Seconds that the slowest text may take to be shown.
LONGEST = 20

_UNWANTED = (
    "script, style, link, base, meta, iframe, object, embed, form, img, picture, video, audio,"
    " template, dialog, [onerror], [onload], [onfocus], [ontoggle], [autofocus], [srcdoc]"
)
_OVER_THE_PAGE = """part => [...part.querySelectorAll("*:not([popover])")]
    .filter(one => getComputedStyle(one).position === "fixed")
    .map(one => one.outerHTML)"""


def assert_harmless(part: Locator) -> None:
    """Nothing has run, and nothing in this part could run, load, or cover the page."""
    assert part.page.evaluate("window.broken") is None
    assert part.locator(_UNWANTED).evaluate_all("all => all.map(one => one.outerHTML)") == []
    targets = part.locator("a").evaluate_all("all => all.map(one => one.href)")
    schemes = {target.split(":")[0] for target in targets}
    assert schemes <= {"http", "https", "mailto"}, targets
    assert part.evaluate(_OVER_THE_PAGE) == []
    assert part.page.locator("#app").count() == 1


@pytest.mark.parametrize("role", ["model", "person"])
def test_hostile_markdown_is_text(chat: ChatPage, script: PacedScript, role: str) -> None:
    """All of it in one chat; the page works as before afterwards."""
    for name, text in HOSTILE.items():
        hostile = f"{text}\n\nThe end of {name}."
        script.answer = hostile if role == "model" else "I see."
        answer = chat.ask(hostile if role == "person" else "Continue.")
        part = answer if role == "model" else chat.questions.last
        expect(part).to_contain_text(f"The end of {name}.")
        assert_harmless(part)
    script.answer = "All is well."
    expect(chat.ask("Still there?")).to_contain_text("All is well.")


def test_a_hostile_picture_runs_nothing_and_loads_nothing(
    visitor: Visitor, chat: ChatPage, script: PacedScript
) -> None:
    visitor.expect("Content Security Policy|@import rules are not allowed here")
    for name, text in PICTURES.items():
        script.answer = f"{text}\n\nThe end of {name}."
        answer = chat.ask("Draw.")
        expect(answer.locator("figure :is(img, .problem)").first).to_be_visible()
        assert chat.page.evaluate("window.broken") is None, name
    assert not chat.page.locator(".prose iframe").count()


def test_a_drawing_that_would_hold_up_the_page_stays_code(
    chat: ChatPage, script: PacedScript
) -> None:
    for name, text in HEAVY.items():
        script.answer = f"```svg\n{text}\n```\n\nThe end of {name}."
        answer = chat.ask("Draw.")
        expect(answer).to_contain_text(f"The end of {name}.")
        expect(answer.locator("pre")).to_contain_text("<svg")
        expect(answer.get_by_role("button", name="Preview")).to_have_count(0)


@contextmanager
def another_server() -> Iterator[tuple[str, list[str]]]:
    """Its address, and the requests that it got."""
    asked: list[str] = []

    class Noting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_POST = do_GET  # noqa: N815 (the name is that of the base class)

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Noting) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def test_a_page_does_not_get_out_of_its_sandbox(
    visitor: Visitor, chat: ChatPage, script: PacedScript
) -> None:
    visitor.expect("console|foreign request")  # what is refused is named on the console
    with another_server() as (address, asked):
        script.answer = f"```html\n{ESCAPE.replace('ELSEWHERE', address)}\n```"
        answer = chat.ask("A page?")
        expect(answer.locator("iframe")).to_have_count(0)  # until a person wants it
        with chat.page.expect_console_message(lambda one: one.type == "log") as logged:
            answer.get_by_role("button", name="Preview").click()
        assert set(json.loads(logged.value.text).values()) == {"refused"}, logged.value.text
        frame = answer.locator("iframe").element_handle().content_frame()
        assert frame is not None
        frame.wait_for_url("chrome-error://**")  # in place of the other server
        httpx.get(f"http://{address}/done")
        assert asked == ["/done"]
    assert urlsplit(chat.page.url).path == "/"


def test_an_image_is_a_link_that_shows_where_it_leads(chat: ChatPage, script: PacedScript) -> None:
    script.answer = "See ![a cat](http://evil.invalid/cat.png)."
    answer = chat.ask("A cat?")
    link = answer.get_by_role("link")
    expect(link).to_have_attribute("href", "http://evil.invalid/cat.png")
    expect(link).to_contain_text("evil.invalid/cat.png")


_IS_ISOLATED = """part => {
    for (let one = part; one !== document.body; one = one.parentElement)
        if (/isolate|plaintext/.test(getComputedStyle(one).unicodeBidi)) return true;
    return false;
}"""


def test_text_that_turns_its_direction_turns_nothing_else(
    chat: ChatPage, script: PacedScript
) -> None:
    script.answer = "Turned: \u202egnihton\u202c \u2066x \u202eabc"
    answer = chat.ask("Turn \u202eit around.")
    for part in (answer.get_by_text("Turned:"), chat.questions.first.get_by_text("Turn")):
        assert part.evaluate(_IS_ISOLATED)


def test_no_text_holds_up_the_page(chat: ChatPage, tmp_path: Path) -> None:
    chats = [
        chat_of(name, [{"content": text}, {"content": f"{text}\n\nThe end of {name}."}], at=0)
        for name, text in SLOW.items()
    ]
    chat.import_from(write_chats(tmp_path / "chats.json", chats), f"{len(chats)} chats were added.")
    for name in SLOW:
        before = time.monotonic()
        chat.open(name)
        expect(chat.answers).to_contain_text([f"The end of {name}."])
        assert time.monotonic() - before < LONGEST, name


def test_a_hostile_file_is_imported_as_text(chat: ChatPage, tmp_path: Path) -> None:
    """An export in which every text is hostile."""
    chat.ask("Hello")
    file = tmp_path / "chats.json"
    chat.export_to(file)
    with chat.settings("Your data") as panel:
        panel.get_by_role("button", name="Delete all chats").click()
        panel.get_by_role("button", name="Delete them").click()
    file.write_text(json.dumps(spoil(json.loads(file.read_text()))))
    chat.import_from(file, "1 chat was added.")
    chat.chats.first.get_by_role("link").click()
    expect(chat.answers.first).to_contain_text("onerror")
    for part in (chat.page.get_by_role("navigation"), chat.questions.first, chat.answers.first):
        assert_harmless(part)


def spoil(value: object, key: str = "") -> object:
    """Put markup into every text that a person could have written."""
    if isinstance(value, dict):
        return {name: spoil(part, name) for name, part in value.items()}
    if isinstance(value, list):
        return [spoil(part, key) for part in value]
    texts = ("title", "content", "reasoning", "model", "system", "error", "finish")
    if isinstance(value, str) and key in texts:
        return f"<img src=x onerror='{RUN}'> {value}"
    return value
