"""Answers that are read aloud, by a server whose sound a test gives or by the browser."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page, Route, expect

from tests.api.openai.test_speech import is_at_rest
from tests.support.browsing import Visitor
from tests.support.chat_page import ChatPage
from tests.support.http_server import serving_script
from tests.support.paced_script import PacedScript
from tests.support.trio_thread import TrioThread
from tests.support.waiting import PATIENCE
from tests.ui.test_looks import violations
from trioserve.api.service import Service
from trioserve.errors import OutputError
from trioserve.testing import ScriptedSpeaker, heard

pytestmark = pytest.mark.system

#: Keeps the samples that the page plays.
_LISTEN = """
window.played = [];
const start = AudioBufferSourceNode.prototype.start;
AudioBufferSourceNode.prototype.start = function (at) {
    for (const sample of this.buffer.getChannelData(0)) window.played.push(sample);
    return start.call(this, at);
};
"""

_SILENT_BROWSER = "delete window.speechSynthesis"

SOUND = bytes(24_000 // 2 * 2)  # half a second

VOICES = [{"id": "default", "name": "Default"}, {"id": "anna", "name": "Anna"}]


def until(page: Page, condition: Callable[[], bool]) -> None:
    """Let the page run until this is true."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        page.wait_for_timeout(20)


class Speaker:
    """The voice of the server.

    Attributes:
        asked: the bodies of the requests so far.
        held: requests without an answer, while `holds` is true.
        ended: the number of requests that the page has given up.
    """

    def __init__(self, page: Page) -> None:
        self.asked: list[dict[str, Any]] = []
        self.held: list[Route] = []
        self.holds = False
        self.ended = 0
        self._page = page
        page.route("**/props", self._props)
        page.route("**/v1/audio/speech", self._speak)
        page.route("**/v1/audio/voices*", lambda route: route.fulfill(json={"voices": VOICES}))
        page.on("requestfailed", lambda request: self._note_end(request.url))

    @property
    def said(self) -> list[str]:
        return [body["input"] for body in self.asked]

    def _props(self, route: Route) -> None:
        route.fulfill(json={**route.fetch().json(), "endpoint_speech": True})

    def _speak(self, route: Route) -> None:
        self.asked.append(route.request.post_data_json)
        if self.holds:
            self.held.append(route)
        else:
            route.fulfill(body=SOUND, content_type="audio/pcm")

    def _note_end(self, url: str) -> None:
        self.ended += url.endswith("/v1/audio/speech")

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until this is true of what the page has asked."""
        until(self._page, condition)


@pytest.fixture
def speaker(chat: ChatPage) -> Speaker:
    """A page whose server speaks; the browser does not."""
    chat.page.add_init_script(_LISTEN + _SILENT_BROWSER)
    speaker = Speaker(chat.page)
    chat.page.reload()
    return speaker


def reading(page: Page) -> Any:
    return page.get_by_role("button", name="Stop reading")


def test_the_server_reads_an_answer(chat: ChatPage, script: PacedScript, speaker: Speaker) -> None:
    script.answer = "One **word**.\n\n```\ncode\n```\n\nAnd another."
    chat.ask("Say it.")
    button = chat.button(re.compile("^Read aloud$"))
    button.click()
    expect(button).to_have_count(1)  # as the sound has ended
    (body,) = speaker.asked
    assert body == {
        "model": "scripted",
        "input": "One word. And another.",
        "voice": "default",
        "speed": 1,
        "response_format": "pcm",
    }
    assert chat.page.evaluate("played.length") == 12_000
    speaker.holds = True
    button.click()
    expect(reading(chat.page)).to_be_focused()
    assert violations(chat.page) == []
    reading(chat.page).press("Enter")
    expect(button).to_be_focused()
    speaker.until(lambda: speaker.ended == 1)


@pytest.mark.parametrize("way", ["Escape", "another chat", "a new message", "another tab"])
def test_what_ends_reading_ends_the_request(
    chat: ChatPage, script: PacedScript, speaker: Speaker, way: str
) -> None:
    chat.ask("Say it.")
    speaker.holds = True
    chat.button("Read aloud").click()
    speaker.until(lambda: len(speaker.asked) == 1)
    if way == "Escape":
        chat.page.keyboard.press("Escape")
    elif way == "another chat":
        chat.begin()
    elif way == "a new message":
        chat.ask("And now?")
    else:
        other = chat.page.context.new_page()
        other.goto(chat.page.url)
        other.evaluate("() => { speechSynthesis.speak = () => undefined }")
        ChatPage(other).button("Read aloud, with the voice of the browser").click()
        expect(reading(other)).to_be_visible()
    speaker.until(lambda: speaker.ended == 1)
    expect(reading(chat.page)).to_have_count(0)
    assert chat.page.evaluate("played") == []


def test_every_answer_is_read_while_it_is_written(
    chat: ChatPage, script: PacedScript, speaker: Speaker
) -> None:
    with chat.settings("General") as panel:
        panel.get_by_label("Read every answer aloud").check()
        panel.get_by_role("radio", name="1.5").check(force=True)
    script.answer = "```\nonly code\n```"
    chat.ask("Tell me nothing.")
    other = ChatPage(chat.page.context.new_page())
    other.page.goto(chat.page.url)
    other.page.evaluate("() => { window.said = 0; speechSynthesis.speak = () => { said++ } }")
    chat.page.bring_to_front()
    script.answer = "The first. The second, which is held. The third."
    script.hold_at("held")
    chat.send("Tell me.")
    speaker.until(lambda: speaker.said == ["The first."])
    assert speaker.asked[0]["speed"] == 1.5
    reading(chat.page).focus()
    assert violations(chat.page) == []
    script.go_on()
    chat.wait_until_done()
    speaker.until(lambda: " ".join(speaker.said) == script.answer)
    expect(chat.answers.last.get_by_role("button", name="Read aloud")).to_be_focused()
    expect(chat.page.locator(".toast")).to_have_count(0)  # code is no failure
    expect(other.answers.last).to_contain_text("The third.")
    assert other.page.evaluate("said") == 0  # one of the tabs is enough
    script.hold_at("held")
    speaker.holds = True
    chat.send("Again.")
    speaker.until(lambda: len(speaker.held) == 1)
    chat.stop.click()
    expect(reading(chat.page)).to_have_count(0)
    speaker.until(lambda: speaker.ended == 1)


def test_a_failure_is_told(
    chat: ChatPage, script: PacedScript, speaker: Speaker, visitor: Visitor
) -> None:
    visitor.expect("400")
    chat.page.unroute("**/v1/audio/speech")
    error = {"error": {"message": "The model cannot say this.", "code": 400}}
    chat.page.route("**/v1/audio/speech", lambda route: route.fulfill(json=error, status=400))
    chat.ask("Say it.")
    chat.button("Read aloud").click()
    expect(chat.page.get_by_text("The model cannot say this.")).to_be_visible()
    expect(reading(chat.page)).to_have_count(0)
    script.answer = "```\ncode\n```"
    chat.ask("And code?")
    chat.button("Read aloud").last.click()
    expect(chat.page.get_by_text("This answer has no text to read aloud.")).to_be_visible()


def test_a_voice_of_the_server_is_chosen(
    chat: ChatPage, script: PacedScript, speaker: Speaker
) -> None:
    with chat.settings("General") as panel:
        choice = panel.get_by_label("Voice")
        expect(choice.get_by_role("option")).to_have_text(["Default", "Anna"])
        choice.select_option("Anna")
        assert violations(chat.page) == []
    chat.ask("Say it.")
    chat.button("Read aloud").click()
    speaker.until(lambda: len(speaker.asked) == 1)
    assert speaker.asked[0]["voice"] == "anna"


def test_without_a_voice_of_the_server_the_browser_reads(
    chat: ChatPage, script: PacedScript
) -> None:
    chat.page.evaluate(
        """() => {
            window.said = [];
            speechSynthesis.speak = (said) => {
                window.said.push([said.text, said.rate]);
                if (window.said.length === 1) said.onend();
            };
        }"""
    )
    sentence = f"{'word ' * 60}end."
    script.answer = f"**{sentence}**\n\n```\ncode\n```\n\n{sentence}"
    chat.ask("Say it.")
    chat.button("Read aloud, with the voice of the browser").click()
    expect(reading(chat.page)).to_be_visible()
    assert chat.page.evaluate("said") == [[sentence, 1], [sentence, 1]]
    reading(chat.page).click()
    expect(reading(chat.page)).to_have_count(0)


@pytest.fixture
def scripted_speaker() -> ScriptedSpeaker:
    return ScriptedSpeaker()


@pytest.fixture
def spoken(
    loop: TrioThread, visitor: Visitor, script: PacedScript, scripted_speaker: ScriptedSpeaker
) -> Iterator[tuple[ChatPage, Service]]:
    """A page of a server that does speak."""
    backend = script.backend()
    backend.speaker = lambda: scripted_speaker
    with loop.open(serving_script(backend)) as (url, service):
        page = visitor.visit(url)
        page.add_init_script(_LISTEN + _SILENT_BROWSER)
        page.reload()
        yield ChatPage(page), service
        if not page.is_closed():
            page.goto("about:blank")  # else it asks a server that has gone


def heard_by(page: Page) -> str:
    return heard(np.array(page.evaluate("played"), np.float32))


def test_what_a_server_speaks_is_played(
    spoken: tuple[ChatPage, Service], script: PacedScript
) -> None:
    chat, _ = spoken
    script.answer = "So *it* works, with 1.2 kB: as said. Über alles\n\n- 你好\n- שלום"
    chat.ask("Say it.")
    with chat.settings("General") as panel:
        expect(panel.get_by_label("Voice").get_by_role("option")).to_have_text(["Default"])
    chat.button("Read aloud").click()
    expect(reading(chat.page)).to_have_count(0)
    words = "So it works, with 1.2 kB: as said. Über alles. 你好. שלום."
    assert heard_by(chat.page).replace(" ", "") == words.replace(" ", "")


def test_a_speaker_that_fails_in_the_middle_is_told(
    spoken: tuple[ChatPage, Service],
    script: PacedScript,
    scripted_speaker: ScriptedSpeaker,
    visitor: Visitor,
) -> None:
    visitor.expect("ERR_CONNECTION_RESET|ERR_INCOMPLETE_CHUNKED_ENCODING")
    chat, _ = spoken
    scripted_speaker.frame_failures[ord("B")] = OutputError("no sense")
    script.answer = f"{'x' * 48}. Bad."
    chat.ask("Say it.")
    chat.button("Read aloud").click()
    expect(chat.page.get_by_text("The sound from the server broke off.")).to_be_visible()
    expect(reading(chat.page)).to_have_count(0)
    chat.button("Read aloud").click()  # it has failed once
    until(chat.page, lambda: heard_by(chat.page).endswith("Bad."))


@pytest.mark.parametrize("way", ["stop", "close", "reload"])
def test_a_slot_is_free_when_reading_ends(
    spoken: tuple[ChatPage, Service],
    script: PacedScript,
    scripted_speaker: ScriptedSpeaker,
    loop: TrioThread,
    way: str,
) -> None:
    chat, service = spoken
    scripted_speaker.on_sound = lambda _task: time.sleep(0.05)
    script.answer = "This continues. " * 30
    chat.ask("Say it.")
    chat.button("Read aloud").click()
    until(chat.page, lambda: heard_by(chat.page) != "")
    if way == "stop":
        reading(chat.page).click()
    elif way == "reload":
        chat.page.reload()
    else:
        chat.page.close()
    loop.run(is_at_rest, service)
    assert sum(scripted_speaker.batches) < len(script.answer)
