"""Many chats: found, pinned, copied, chosen together, and named by the model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from tests.support.browsing import Visitor
from tests.support.chat_page import ChatPage
from tests.support.paced_script import PacedScript
from tests.support.trio_thread import TrioThread
from tests.support.waiting import until
from tests.ui.hostile import HOSTILE
from tests.ui.test_hostile import assert_harmless
from trioserve.api.service import Service

pytestmark = pytest.mark.system


def test_a_search_shows_where_the_words_are_and_leads_there(
    chat: ChatPage, script: PacedScript
) -> None:
    script.answer = "The walrus is large. " + "And so on. " * 100 + "A second walrus swims."
    chat.ask("Tell me of the sea.")
    script.answer = "Nothing more." + "\n\nA line." * 60
    chat.ask("And else?")
    chat.begin()
    script.answer = "No animals here."
    chat.ask("What is on land?")
    chat.page.get_by_role("searchbox", name="Search the chats").fill("WALRUS")
    expect(chat.chats).to_have_count(1)
    row = chat.chats.first
    expect(row).to_contain_text("2 matches")
    expect(row.locator("mark")).to_have_text(["walrus"])
    row.get_by_role("button", name="The walrus is large").click()
    answer = chat.answers.filter(has_text="The walrus is large.")
    expect(answer).to_be_in_viewport()
    expect(answer.get_by_text("The walrus is large.")).to_be_in_viewport()


def test_a_search_finds_a_message_on_another_branch(chat: ChatPage, script: PacedScript) -> None:
    script.answer = "The first answer has a walrus."
    chat.ask("A question?")
    script.answer = "The second answer."
    chat.regenerate("The second answer")
    chat.page.get_by_role("searchbox", name="Search the chats").fill("walrus")
    chat.chats.first.get_by_role("button", name="walrus").click()
    expect(chat.answers).to_have_text([re.compile("The first answer")])


def test_what_a_search_shows_is_text(chat: ChatPage, script: PacedScript) -> None:
    for name, text in HOSTILE.items():
        script.answer = f"walrus {text}\n\nThe end of {name}."
        expect(chat.ask("Continue.")).to_contain_text(f"The end of {name}.")
    search = chat.page.get_by_role("searchbox", name="Search the chats")
    for words in ("walrus", "<img", "onerror", "javascript:", "<script"):
        search.fill(words)
        expect(chat.chats.first.locator("mark").first).to_have_text(words)
        assert_harmless(chat.page.get_by_role("navigation"))


#: Finds out whether a pinned chat is stored. The page shows it a moment before.
_HAS_PINNED = """() => new Promise((tell, fail) => {
  const opening = indexedDB.open("trioserve/chats");
  opening.onerror = fail;
  opening.onsuccess = () => {
    const all = opening.result.transaction("chats").objectStore("chats").getAll();
    all.onsuccess = () => {
      opening.result.close();
      tell(all.result.some((chat) => chat.pinned));
    };
  };
})"""


def test_chats_are_pinned_and_copied(chat: ChatPage, script: PacedScript) -> None:
    chat.ask("The oldest.")
    chat.begin()
    chat.ask("The newest.")
    expect(chat.chats).to_contain_text(["The newest.", "The oldest."])
    chat.menu_of("The oldest.", "Pin")
    expect(chat.chats).to_contain_text(["The oldest.", "The newest."])
    expect(chat.page.get_by_role("heading", name="Pinned")).to_be_visible()
    while not chat.page.evaluate(_HAS_PINNED):
        pass
    chat.page.reload()
    expect(chat.chats).to_contain_text(["The oldest.", "The newest."])
    chat.menu_of("The oldest.", "Unpin")
    expect(chat.chats).to_contain_text(["The newest.", "The oldest."])

    chat.menu_of("The oldest.", "Duplicate")
    expect(chat.chats.first).to_contain_text("The oldest. (copy)")
    expect(chat.page.get_by_role("heading", name="The oldest. (copy)")).to_be_visible()
    expect(chat.answers).to_contain_text(["It works."])
    script.answer = "Only in the copy."
    chat.ask("And now?")
    chat.chats.get_by_role("link", name="The oldest.", exact=True).click()
    expect(chat.answers).to_have_count(1)


def test_many_chats_are_exported_and_deleted_at_once(chat: ChatPage, tmp_path: Path) -> None:
    for title in ("One", "Two", "Three"):
        chat.ask(title)
        chat.begin()
    chat.menu_of("One", "Select")
    chat.chats.get_by_role("checkbox", name="Three").check()
    bar = chat.page.get_by_role("group", name="Selected chats")
    expect(bar).to_contain_text("2 chats selected")
    with chat.page.expect_download() as download:
        bar.get_by_role("button", name="Export").click()
    download.value.save_as(tmp_path / "some.json")
    exported = json.loads((tmp_path / "some.json").read_text())["chats"]
    assert sorted(one["title"] for one in exported) == ["One", "Three"]
    bar.get_by_role("button", name="Delete").click()
    expect(chat.chats).to_have_text([re.compile("Two")])
    chat.button("Undo").click()
    expect(chat.chats).to_have_count(3)


# -- titles


@pytest.fixture
def titled(visitor: Visitor, server: tuple[str, Service]) -> ChatPage:
    """A page on which the model writes titles."""
    return ChatPage(visitor.visit(server[0], titles=True))


HOSTILE_TITLE = "<img src=x onerror=alert(1)> W"


def test_the_model_writes_a_title_when_it_is_idle(titled: ChatPage, script: PacedScript) -> None:
    titled.ask("What do I ask?")
    script.answer = f"**{HOSTILE_TITLE}"
    expect(titled.chats.first).to_contain_text(HOSTILE_TITLE)
    assert "Write a title" in script.prompts[-1]
    assert_harmless(titled.page.get_by_role("navigation"))
    assert HOSTILE_TITLE in titled.page.title()


def test_a_name_by_a_person_stays(titled: ChatPage, script: PacedScript) -> None:
    titled.ask("What do I ask?")
    titled.menu_of("What do I ask?", "Rename")
    name = titled.page.get_by_role("textbox", name="Name of the chat")
    name.fill("Mine")
    name.press("Enter")
    titled.begin()
    titled.ask("Another one.")  # whose title comes last
    script.answer = "By the model"
    expect(titled.chats).to_contain_text(["By the model", "Mine"])


def wrote_titles(script: PacedScript) -> int:
    return sum("Write a title" in prompt for prompt in script.prompts)


def test_a_question_ends_the_writing_of_a_title(
    titled: ChatPage, script: PacedScript, loop: TrioThread
) -> None:
    titled.ask("What do I ask?")
    script.answer = "A title too late"
    script.hold_at("too")
    loop.run(until, lambda: wrote_titles(script))
    script.answer = "An answer."
    with titled.page.expect_event("requestfailed", lambda one: "completions" in one.url):
        titled.send("The next question.")
    expect(titled.chats.first).to_contain_text("What do I ask?")
    script.answer = "A title at last"
    script.go_on()
    expect(titled.chats.first).to_contain_text("A title at last")
    assert wrote_titles(script) == 2


def test_a_request_of_another_client_ends_the_writing_of_a_title(
    titled: ChatPage, script: PacedScript, loop: TrioThread, server: tuple[str, Service]
) -> None:
    titled.ask("What do I ask?")
    script.answer = "A title that takes very long"
    script.seconds_a_token = 2  # the page looks more often than that
    loop.run(until, lambda: wrote_titles(script))

    async def ask() -> None:
        body = {"prompt": "Hello", "max_tokens": 8}
        async with httpx.AsyncClient(base_url=server[0], timeout=None) as client:
            (await client.post("/v1/completions", json=body)).raise_for_status()

    with titled.page.expect_event("requestfailed", lambda one: "completions" in one.url):
        loop.run(ask)
    expect(titled.chats.first).to_contain_text("What do I ask?")
    script.seconds_a_token = 0
    script.answer = "A title at last"
    expect(titled.chats.first).to_contain_text("A title at last")
