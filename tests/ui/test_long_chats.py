"""Long chats: messages that wait for their turn, and a context that is full."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, expect

from tests.support.browsing import Visitor
from tests.support.cable import Cable
from tests.support.chat_page import ChatPage
from tests.support.http_server import serving_script
from tests.support.paced_script import PacedScript
from tests.support.trio_thread import TrioThread
from tests.ui.test_connection import LOST

pytestmark = pytest.mark.system


def queued(chat: ChatPage) -> Locator:
    return chat.page.get_by_role("region", name="Queued messages").get_by_role("listitem")


def queue(chat: ChatPage, text: str) -> None:
    chat.composer.fill(text)
    chat.composer.press("Enter")


def test_enter_during_an_answer_queues_the_message(chat: ChatPage, script: PacedScript) -> None:
    script.answer = "The first answer."
    script.hold_at("first")
    chat.send("One?")
    expect(chat.answers.first).to_contain_text("The first")
    for text in ("Two?", "Threee?", "Four?"):
        queue(chat, text)
    expect(queued(chat)).to_contain_text(["Two?", "Threee?", "Four?"])
    expect(chat.questions).to_have_count(1)
    queued(chat).nth(1).get_by_role("button", name="Edit").click()
    expect(chat.composer).to_have_value("Threee?")
    queue(chat, "Three?")
    queued(chat).filter(has_text="Four?").get_by_role("button", name="Remove").click()
    expect(queued(chat)).to_contain_text(["Two?", "Three?"])
    script.go_on()
    expect(chat.answers).to_have_count(3)
    expect(chat.questions).to_contain_text(["One?", "Two?", "Three?"])
    expect(queued(chat)).to_have_count(0)


def test_a_queued_message_is_sent_in_its_chat(chat: ChatPage, script: PacedScript) -> None:
    """Another chat is open when its answer ends."""
    script.answer = "The first answer."
    script.hold_at("first")
    chat.send("One?")
    expect(chat.answers.first).to_contain_text("The first")
    queue(chat, "Two?")
    chat.begin()
    script.go_on()
    expect(chat.chats).to_have_count(1)
    chat.open("One?")
    expect(chat.questions).to_contain_text(["One?", "Two?"])
    expect(chat.answers).to_contain_text(["The first answer.", "The first answer."])
    assert "One?" in script.prompts[-1] and "Two?" in script.prompts[-1]


def test_after_a_stop_a_person_decides_what_is_sent(chat: ChatPage, script: PacedScript) -> None:
    script.answer = "word " * 100_000
    script.seconds_a_token = 0.002
    chat.send("One?")
    expect(chat.answers.first).to_contain_text("word")
    queue(chat, "Two?")
    chat.stop.click()
    expect(queued(chat)).to_contain_text(["not sent"])
    chat.page.reload()
    expect(queued(chat)).to_contain_text(["Two?"])
    script.answer = "It works."
    chat.button("Send now").click()
    expect(chat.answers.last).to_contain_text("It works.")
    expect(queued(chat)).to_have_count(0)


def test_a_lost_server_is_reported_once(
    visitor: Visitor, script: PacedScript, cable: Cable, loop: TrioThread
) -> None:
    visitor.expect(LOST)
    script.answer = "The first answer."
    script.hold_at("first")
    chat = ChatPage(visitor.visit(cable.url))
    chat.send("One?")
    expect(chat.answers.first).to_contain_text("The first")
    loop.run(cable.unplug)
    said = chat.page.get_by_text(re.compile("cannot be reached|connection was lost", re.IGNORECASE))
    expect(chat.button("Try now")).to_be_visible()
    chat.button("Try now").click()
    chat.button("New chat").first.click()
    chat.send("Are you there?")
    expect(chat.page.get_by_text("Waiting for the server…")).to_be_visible()
    expect(said).to_have_count(1)
    loop.run(cable.plug_in)
    script.go_on()
    expect(chat.answers.last).to_contain_text("The first answer.")
    expect(said).to_have_count(0)


# -- a full context


@pytest.fixture
def small(visitor: Visitor, script: PacedScript, loop: TrioThread) -> Iterator[ChatPage]:
    """A page whose model has a context of 2,000 tokens, which are letters."""
    visitor.expect("400")
    visitor.expect("ERR_CONNECTION_REFUSED")  # the server ends before its pages
    backend = script.backend(n_slots=1, n_ctx=2048, n_ctx_seq=2048)
    with loop.open(serving_script(backend)) as (url, _):
        yield ChatPage(visitor.visit(url))


LONG = "a long text " * 50


def fill(chat: ChatPage, script: PacedScript) -> None:
    """Ask until it does not fit."""
    for word in ("apple", "berry"):
        script.answer = f"I know the {word}."
        chat.ask(f"{word} {LONG}")
    chat.send(f"cherry {LONG}")
    expect(chat.page.get_by_text("This chat no longer fits")).to_be_visible()


def test_the_oldest_turns_can_be_dropped(small: ChatPage, script: PacedScript) -> None:
    fill(small, script)
    script.answer = "I know the cherry."
    small.button("Drop the oldest turns").click()
    expect(small.answers.last).to_contain_text("I know the cherry.")
    assert "apple" not in script.prompts[-1] and "cherry" in script.prompts[-1]
    expect(small.page.get_by_text("The model no longer gets the messages above.")).to_be_visible()
    expect(small.questions.first).to_contain_text("apple")
    small.page.reload()
    expect(small.answers.last).to_contain_text("I know the cherry.")
    script.answer = "Still here."
    small.ask("And now?")
    assert "apple" not in script.prompts[-1]
    small.button("Send them again").click()
    small.send("All of it?")
    expect(small.page.get_by_text("This chat no longer fits")).to_be_visible()


def test_a_chat_continues_with_a_summary(small: ChatPage, script: PacedScript) -> None:
    fill(small, script)
    script.answer = "<b>They</b> spoke of fruit."
    small.button("Continue with a summary").click()
    expect(small.answers.last).to_contain_text("They spoke of fruit.")
    *asked, answered = script.prompts
    assert any("Write a summary" in prompt and "apple" in prompt for prompt in asked)
    assert "Summary of the conversation before this:\n<b>They</b> spoke of fruit." in answered
    assert "apple" not in answered and "cherry" in answered
    small.button("Summary").click()
    expect(small.page.get_by_text("<b>They</b> spoke of fruit.")).to_be_visible()


def test_a_message_that_is_too_long_by_itself(small: ChatPage, script: PacedScript) -> None:
    small.send(LONG * 5)
    expect(small.page.get_by_text("This message does not fit")).to_be_visible()
    expect(small.button("Drop the oldest turns")).to_have_count(0)
    expect(small.button("New chat").last).to_be_visible()
