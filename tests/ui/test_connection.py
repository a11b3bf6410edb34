"""Answers that outlive a connection, and what the page says when the server has gone."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.support.browsing import Visitor
from tests.support.cable import Cable
from tests.support.chat_page import ChatPage
from tests.support.http_server import serving_script
from tests.support.paced_script import PacedScript
from tests.support.trio_thread import TrioThread

pytestmark = pytest.mark.system

#: Each word is another one, so that a gap shows, and a repeat.
STORY = " ".join(f"word{i}" for i in range(200))

#: Messages of browsers' consoles about a lost connection.
LOST = "net::ERR_|Failed to fetch"


def words_in(text: str) -> list[str]:
    return re.findall(r"word\d+", text)


def test_a_reload_in_mid_answer_goes_on(chat: ChatPage, script: PacedScript) -> None:
    script.answer = STORY
    script.seconds_a_token = 0.002
    script.hold_at("word100 ")
    chat.send("Tell me a story.")
    expect(chat.answers.first).to_contain_text("word100")
    chat.page.reload()
    expect(chat.answers.first).to_contain_text("word50 ")
    script.go_on()
    expect(chat.answers.first).to_contain_text("word199")
    chat.wait_until_done()
    assert words_in(chat.answers.first.inner_text()) == STORY.split()
    assert len(script.prompts) == 1


def test_each_chat_keeps_what_is_being_written(chat: ChatPage) -> None:
    chat.ask("First?")
    chat.composer.fill("more about the first")
    chat.begin()
    expect(chat.composer).to_have_value("")
    chat.composer.fill("something else")
    chat.page.reload()
    expect(chat.composer).to_have_value("something else")
    chat.open("First?")
    expect(chat.composer).to_have_value("more about the first")


def test_a_lost_connection_goes_on(
    visitor: Visitor, script: PacedScript, cable: Cable, loop: TrioThread
) -> None:
    visitor.expect(LOST)
    script.answer = STORY
    script.seconds_a_token = 0.002
    chat = ChatPage(visitor.visit(cable.url))
    chat.send("Tell me a story.")
    for mark in ("word30 ", "word90 ", "word150 "):
        expect(chat.answers.first).to_contain_text(mark)
        loop.run(cable.unplug)
        loop.run(cable.plug_in)
    expect(chat.answers.first).to_contain_text("word199")
    chat.wait_until_done()
    assert words_in(chat.answers.first.inner_text()) == STORY.split()


def test_a_phone_without_a_network_finds_the_whole_answer(
    visitor: Visitor, script: PacedScript, cable: Cable, loop: TrioThread
) -> None:
    visitor.expect(LOST)
    script.answer = STORY
    script.hold_at("word10 ")
    chat = ChatPage(visitor.visit(cable.url))
    chat.send("Tell me a story.")
    expect(chat.answers.first).to_contain_text("word10")
    loop.run(cable.unplug)
    script.go_on()
    expect(chat.button("Try now")).to_be_visible()
    loop.run(cable.plug_in)
    expect(chat.answers.first).to_contain_text("word199")
    chat.wait_until_done()
    assert words_in(chat.answers.first.inner_text()) == STORY.split()


def test_a_server_that_was_killed_and_started_again_is_told_of(
    visitor: Visitor, script: PacedScript, cable: Cable, loop: TrioThread
) -> None:
    visitor.expect(LOST)
    visitor.expect("404")
    script.answer = STORY
    script.hold_at("word10 ")
    chat = ChatPage(visitor.visit(cable.url))
    chat.send("Tell me a story.")
    expect(chat.answers.first).to_contain_text("word10")
    again = PacedScript()
    with loop.open(serving_script(again.backend())) as (url, _):
        loop.run(cable.unplug)
        loop.run(cable.plug_in, url)
        expect(chat.answers.first).to_contain_text("It was restarted")
        chat.wait_until_done()
        assert words_in(chat.answers.first.inner_text()) == STORY.split()[:11]
        again.answer = "From the beginning."
        chat.answers.first.get_by_role("button", name="Try again").click()
        expect(chat.answers.first).to_contain_text("From the beginning.")
        chat.wait_until_done()


def test_a_server_that_shuts_down_is_told_of(visitor: Visitor, loop: TrioThread) -> None:
    visitor.expect(LOST)
    visitor.expect("503")
    script = PacedScript()
    script.answer = "word " * 100_000
    script.seconds_a_token = 0.002
    with loop.open(serving_script(script.backend())) as (url, _):
        chat = ChatPage(visitor.visit(url))
        chat.send("Tell me a story.")
        expect(chat.answers.first).to_contain_text("word word")
    expect(chat.page.get_by_text("Waiting for the server…")).to_be_visible()
    expect(chat.button("Try now")).to_be_visible()
    expect(chat.answers.first).to_contain_text("word word")


def test_two_tabs_show_one_answer(chat: ChatPage, script: PacedScript) -> None:
    script.answer = STORY
    script.seconds_a_token = 0.002  # it takes longer than the page waits before it keeps a text
    script.hold_at("word150 ")
    chat.send("Tell me a story.")
    expect(chat.answers.first).to_contain_text("word150")
    other = ChatPage(chat.page.context.new_page())
    other.page.goto(chat.page.url)
    expect(other.answers.first).to_contain_text("word1")
    script.go_on()
    for tab in (chat, other):
        expect(tab.answers.first).to_contain_text("word199")
        tab.wait_until_done()
        assert words_in(tab.answers.first.inner_text()) == STORY.split()
