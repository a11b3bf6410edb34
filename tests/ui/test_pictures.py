"""Code that is shown as a picture or a page, and what Markdown has beside text."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import pytest
from playwright.sync_api import Locator, expect

from tests.support.browsing import Visitor
from tests.support.chat_page import ChatPage
from tests.support.paced_script import PacedScript
from tests.ui.test_looks import LOOKS, scrolls_sideways, shoot, violations

pytestmark = pytest.mark.system

DRAWING = """```svg
<svg viewBox="0 0 200 80" width="200" height="80">
  <rect x="5" y="5" width="190" height="70" rx="12" fill="#dcefec" stroke="#0b6a63"/>
  <text x="100" y="46" text-anchor="middle" font-family="sans-serif">A drawing</text>
</svg>
```"""

DIAGRAM = """```mermaid
flowchart LR
  A[Request] --> B{Slot free?}
  B -- yes --> C[Prefill]
  B -- no --> D[Queue]
  C --> E[Decode]
  D --> B
```"""

PAGE = """```html
<!doctype html>
<style>body { font-family: sans-serif; background: #eef }</style>
<h1>A page</h1>
<button onclick="this.textContent = 'Pressed ' + ++n">Press</button>
<script>let n = 0; document.querySelector("h1").textContent += " that runs";</script>
```"""

MARKDOWN = """The cache is shared[^1], and grows by the token[^size].

> [!NOTE]
> One step decodes the tokens of **all** slots.

> [!WARNING]
>
> A longer context takes more memory.

> [!CAUTION] is no alert, as its mark is not alone on the line.

[^1]: Requests with the same beginning compute it only once.
[^size]: Two vectors for each layer,
  for each token.
"""


def loaded(picture: Locator) -> bool:
    return bool(picture.evaluate("one => one.complete && one.naturalWidth > 0"))


def press(button: Locator) -> None:
    """Click until the page in a frame has noticed: the frame moves while diagrams are drawn."""
    deadline = monotonic() + 60
    while "Pressed" not in (button.text_content() or ""):
        assert monotonic() < deadline
        button.click()


@pytest.mark.parametrize("look", LOOKS)
def test_an_answer_has_pictures_alerts_and_footnotes(
    visitor: Visitor, server: tuple[str, object], script: PacedScript, look: str, tmp_path: Path
) -> None:
    page = visitor.visit(server[0], device_scale_factor=2, **LOOKS[look])
    chat = ChatPage(page)
    script.answer = f"{MARKDOWN}\n{DRAWING}\n\n{DIAGRAM}\n\n{PAGE}\n\nThe end."
    answer = chat.ask("Show me.")
    for name in ("Drawing", "Diagram"):
        picture = answer.get_by_role("img", name=name)
        expect(picture).to_be_visible()
        assert loaded(picture)
    expect(answer.get_by_role("complementary", name="Note")).to_contain_text("One step")
    expect(answer.get_by_role("complementary", name="Warning")).to_contain_text("more memory")
    expect(answer.get_by_role("complementary", name="Caution")).to_have_count(0)
    answer.get_by_role("button", name="Preview").click()
    frame = answer.frame_locator("iframe")
    expect(frame.get_by_role("heading")).to_have_text("A page that runs")
    press(frame.get_by_role("button"))
    assert violations(page) == []
    assert not scrolls_sideways(page)
    shoot(page, f"pictures-end-{look}", tmp_path)
    answer.get_by_role("img", name="Drawing").scroll_into_view_if_needed()
    shoot(page, f"pictures-{look}", tmp_path)


def test_a_footnote_and_its_mark_lead_to_each_other(chat: ChatPage, script: PacedScript) -> None:
    script.answer = MARKDOWN + "\nNo footnote: `[^a]` [^a].\n"
    answer = chat.ask("Notes?")
    mark = answer.get_by_role("button", name="Footnote size", exact=True)
    mark.click()
    note = answer.locator(".footnote", has_text="Two vectors for each layer,")
    expect(note).to_be_focused()
    note.get_by_role("button", name="Back from footnote size").click()
    expect(mark).to_be_focused()
    expect(answer).to_contain_text("No footnote: [^a] [^a].")


def test_a_picture_is_drawn_once_its_code_is_complete(chat: ChatPage, script: PacedScript) -> None:
    script.answer = DRAWING
    script.hold_at("</text>")
    chat.send("Draw.")
    expect(chat.answers.first.locator("pre")).to_contain_text("A drawing")
    expect(chat.answers.first.get_by_role("img", name="Drawing")).to_have_count(0)
    script.go_on()
    chat.wait_until_done()
    expect(chat.answers.first.get_by_role("img", name="Drawing")).to_be_visible()
    chat.answers.first.get_by_role("button", name="Show code").click()
    expect(chat.answers.first.locator("pre")).to_contain_text("<svg")


def test_a_page_in_its_preview_goes_on_when_the_answer_is_complete(
    chat: ChatPage, script: PacedScript
) -> None:
    script.answer = f"{PAGE}\n\nPress[^1] it. Then wait for more.\n\n[^1]: With a finger.\n"
    script.hold_at("Then")
    chat.send("A page?")
    chat.answers.first.get_by_role("button", name="Preview").click()
    button = chat.answers.first.frame_locator("iframe").get_by_role("button")
    press(button)
    script.go_on()
    chat.wait_until_done()
    expect(chat.answers.first.locator(".footnote")).to_contain_text("With a finger.")
    expect(button).to_have_text("Pressed 1")


def test_what_cannot_be_drawn_is_code_with_a_reason(chat: ChatPage, script: PacedScript) -> None:
    script.answer = "```mermaid\nflowchart LR\n  A --> \n  --> B[\n```"
    answer = chat.ask("A diagram?")
    expect(answer.get_by_text("The diagram cannot be drawn.")).to_be_visible()
    expect(answer.locator("pre")).to_contain_text("flowchart")
    script.answer = "```svg\n<svg><g></svg>\n```"
    answer = chat.ask("A drawing?")
    expect(answer.get_by_text("This is not a drawing")).to_be_visible()
    script.answer = DIAGRAM
    expect(chat.ask("Again?").get_by_role("img", name="Diagram")).to_be_visible()
