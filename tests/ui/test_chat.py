"""A chat in a real browser: what one does in it every day."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.support.browsing import Visitor
from tests.support.chat_page import ChatPage
from tests.support.http_server import serving_script, slots_in_use
from tests.support.paced_script import PacedScript
from tests.support.trio_thread import TrioThread
from trioserve.api.service import Service

pytestmark = pytest.mark.system


def test_an_answer_is_written_as_it_comes(chat: ChatPage, script: PacedScript) -> None:
    script.answer = "It works: ünïcödé, 😀. Every word of it."
    script.hold_at("😀")
    chat.send("Does it work?")
    answer = chat.answers.first
    expect(answer).to_contain_text("It works: ünïcödé, ")
    expect(answer).not_to_contain_text("Every")
    expect(chat.stop).to_be_visible()
    script.go_on()
    expect(answer).to_contain_text("It works: ünïcödé, 😀. Every word of it.")
    chat.wait_until_done()
    expect(chat.questions).to_have_count(1)
    expect(chat.questions.first).to_contain_text("Does it work?")
    expect(chat.composer).to_be_focused()


def test_stop_frees_the_slot_and_keeps_the_text(
    chat: ChatPage, script: PacedScript, loop: TrioThread, server: tuple[str, Service]
) -> None:
    script.answer = "word " * 100_000
    script.seconds_a_token = 0.002
    chat.send("Tell me a long story.")
    expect(chat.answers.first).to_contain_text("word word")
    assert loop.run(slots_in_use, server[1]) == 1
    chat.stop.click()
    chat.wait_until_done()
    chat.page.wait_for_timeout(0)
    for _ in range(100):
        if loop.run(slots_in_use, server[1]) == 0:
            break
        chat.page.wait_for_timeout(50)
    assert loop.run(slots_in_use, server[1]) == 0
    expect(chat.answers.first).to_contain_text("word word")


def test_an_answer_is_made_again_and_both_are_kept(chat: ChatPage, script: PacedScript) -> None:
    script.answer = "The first answer."
    chat.ask("A question?")
    script.answer = "The second answer."
    chat.regenerate("The second answer")
    chat.answers.first.get_by_role("button", name="Previous version").click()
    expect(chat.answers).to_have_text([re.compile("The first answer")])


def test_an_edited_question_is_a_branch_of_its_own(chat: ChatPage, script: PacedScript) -> None:
    script.answer = "Four."
    chat.ask("What is two and two?")
    script.answer = "Six."
    chat.questions.first.hover()
    chat.questions.first.get_by_role("button", name="Edit").click()
    editor = chat.questions.first.get_by_role("textbox")
    expect(editor).to_be_focused()
    editor.fill("What is three and three?")
    editor.press("Control+Enter")
    expect(chat.answers).to_have_text([re.compile("Six")])
    chat.wait_until_done()
    assert "three and three" in script.prompts[-1] and "two and two" not in script.prompts[-1]
    chat.questions.first.get_by_role("button", name="Previous version").click()
    expect(chat.answers).to_have_text([re.compile("Four")])
    script.answer = "Of the first branch."
    chat.ask("And then?")
    assert "two and two" in script.prompts[-1] and "three and three" not in script.prompts[-1]


MARKDOWN = r"""# A heading

Some *emphasis* and `code`, and a [link](https://example.com/page).

| fruit | weight |
|---|---:|
| apple | 182 g |

```python
def double(x):
    return 2 * x
```

The sum is $a^2 + b^2 = c^2$.
"""


def test_markdown_is_shown(chat: ChatPage, script: PacedScript) -> None:
    script.answer = MARKDOWN
    answer = chat.ask("Show me.")
    expect(answer.get_by_role("heading", name="A heading")).to_be_visible()
    expect(answer.get_by_role("cell", name="182 g")).to_be_visible()
    expect(answer.get_by_text("def double(x):")).to_be_visible()
    expect(answer.locator("math").first).to_be_attached()
    link = answer.get_by_role("link", name="link")
    expect(link).to_have_attribute("href", "https://example.com/page")
    assert "noopener" in (link.get_attribute("rel") or "")


def test_code_is_copied(chat: ChatPage, script: PacedScript) -> None:
    chat.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    script.answer = MARKDOWN
    answer = chat.ask("Show me.")
    answer.get_by_role("button", name="Copy code").click()
    copied = chat.page.evaluate("navigator.clipboard.readText()")
    assert copied.strip() == "def double(x):\n    return 2 * x"


def test_reasoning_is_folded_away(chat: ChatPage, script: PacedScript) -> None:
    script.answer = "<think>Let me see: seven times six.</think>It is 42."
    answer = chat.ask("What is it?")
    expect(answer.get_by_text("It is 42.")).to_be_visible()
    thoughts = answer.get_by_text("Let me see: seven times six.")
    expect(thoughts).to_be_hidden()
    answer.get_by_role("button", name="Thoughts").click()
    expect(thoughts).to_be_visible()


def test_a_chat_is_kept_found_renamed_and_deleted(chat: ChatPage, script: PacedScript) -> None:
    script.answer = "Remember the walrus."
    chat.ask("What shall I remember?")
    chat.begin()
    script.answer = "Something else."
    chat.ask("Is there more?")
    expect(chat.chats).to_have_count(2)
    chat.page.reload()
    expect(chat.chats).to_have_count(2)

    search = chat.page.get_by_role("searchbox", name="Search the chats")
    search.fill("walrus")
    expect(chat.chats).to_have_count(1)
    chat.open("What shall I remember?")
    expect(chat.answers).to_contain_text(["Remember the walrus."])
    search.fill("")

    chat.menu_of("What shall I remember?", "Rename")
    name = chat.page.get_by_role("textbox", name="Name of the chat")
    name.fill("Animals")
    name.press("Enter")
    chat.menu_of("Animals", "Delete")
    expect(chat.chats).to_have_count(1)
    chat.button("Undo").click()
    expect(chat.chats).to_have_count(2)
    chat.open("Animals")
    expect(chat.answers).to_contain_text(["Remember the walrus."])


def test_chats_are_exported_and_imported(
    chat: ChatPage, script: PacedScript, visitor: Visitor, tmp_path: Path
) -> None:
    chat.ask("Keep this.")
    chat.export_to(tmp_path / "chats.json")
    other = ChatPage(visitor.visit(chat.page.url))
    other.import_from(tmp_path / "chats.json", "1 chat was added.")
    other.import_from(tmp_path / "chats.json", "0 chats were added.")
    expect(other.chats).to_have_count(1)
    other.open("Keep this.")
    expect(other.answers).to_contain_text([script.answer])
    (tmp_path / "none.json").write_text("{")
    other.import_from(tmp_path / "none.json", "This file is not JSON.")


def test_a_text_file_is_attached(chat: ChatPage, script: PacedScript, tmp_path: Path) -> None:
    file = tmp_path / "recipe.txt"
    file.write_text("Three eggs, and nothing else.\n")
    with chat.page.expect_file_chooser() as chooser:
        chat.button("Attach text files").click()
    chooser.value.set_files(file)
    expect(chat.page.get_by_role("list", name="Attached files")).to_contain_text("recipe.txt")
    chat.ask("What do I need?")
    assert "Three eggs, and nothing else." in script.prompts[-1]
    expect(chat.questions.first).to_contain_text("recipe.txt")


def test_a_system_prompt_and_sampling_are_sent(chat: ChatPage, script: PacedScript) -> None:
    with chat.settings("This chat") as panel:
        temperature = panel.get_by_label("Temperature", exact=True)
        expect(temperature).to_have_attribute("placeholder", "0.8")  # the server's default
        temperature.fill("0.25")
        panel.get_by_label("System prompt").fill("Speak like a pirate.")
        panel.get_by_label("System prompt").blur()
    with chat.page.expect_request("**/chat/completions") as request:
        chat.ask("Hello?")
    assert request.value.post_data_json["temperature"] == 0.25
    assert "top_k" not in request.value.post_data_json
    assert "Speak like a pirate." in script.prompts[-1]


def test_a_key_is_asked_for(visitor: Visitor, script: PacedScript, loop: TrioThread) -> None:
    visitor.expect("401")
    with loop.open(serving_script(script.backend(), api_keys=("secret",))) as (url, _):
        chat = ChatPage(visitor.visit(url))
        key = chat.page.get_by_label("API key")
        key.fill("wrong")
        key.press("Enter")
        expect(chat.page.get_by_text("The server does not accept this key.")).to_be_visible()
        key.fill("secret")
        key.press("Enter")
        expect(key).to_have_count(0)
        expect(chat.ask("Hello?")).to_contain_text("It works.")


def test_a_full_server_is_told_of_and_the_answer_comes_in_the_end(
    visitor: Visitor, script: PacedScript, loop: TrioThread
) -> None:
    """One slot, which another client has, and room for one in the queue."""
    visitor.expect("429")
    visitor.expect("ERR_CONNECTION_REFUSED")  # the server ends before its pages
    script.answer = "word " * 100_000
    script.seconds_a_token = 0.002
    with loop.open(serving_script(script.backend(n_slots=1), max_queue=1)) as (url, _):
        chat, second, third = (ChatPage(visitor.visit(url)) for _ in range(3))
        chat.send("I am the first.")
        expect(chat.answers.first).to_contain_text("word")
        second.send("I am the second.")
        expect(second.page.get_by_text("Next in the queue")).to_be_visible()
        third.send("I am one too many.")
        expect(third.page.get_by_text("The server is full.").first).to_be_visible()
        script.answer = "It works."
        chat.stop.click()
        for each in (second, third):
            expect(each.answers.first).to_contain_text("It works.")


def test_it_can_be_used_without_a_mouse(chat: ChatPage, script: PacedScript) -> None:
    keyboard = chat.page.keyboard
    expect(chat.composer).to_be_focused()
    keyboard.type("Hello?")
    keyboard.press("Enter")
    expect(chat.answers).to_contain_text(["It works."])
    keyboard.press("Escape")
    keyboard.press("Control+Shift+o")
    expect(chat.answers).to_have_count(0)
    expect(chat.composer).to_be_focused()
    keyboard.press("Control+k")
    search = chat.page.get_by_role("searchbox", name="Search the chats")
    expect(search).to_be_focused()
    keyboard.type("Hello")
    keyboard.press("Enter")
    expect(chat.answers).to_contain_text(["It works."])
    search.blur()
    keyboard.press("?")
    dialog = chat.page.get_by_role("dialog")
    expect(dialog).to_contain_text("New chat")
    keyboard.press("Escape")
    expect(dialog).to_have_count(0)
