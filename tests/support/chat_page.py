"""The page as a person uses it: by what things are called."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Locator, Page, expect


class ChatPage:
    """A page that shows a chat.

    Attributes:
        page: the page in the browser.
        composer: where one writes.
        stop: what ends an answer that is being written.
        answers: the answers of the open chat, the first one first.
        questions: what was asked.
        chats: the list of chats.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        self.composer = page.get_by_role("textbox", name="Message", exact=True)
        self.stop = page.get_by_role("button", name="Stop", exact=True)
        self.answers = page.get_by_role("article", name="Answer")
        self.questions = page.get_by_role("article", name="You")
        self.chats = page.get_by_role("navigation", name="Chats").get_by_role("listitem")

    def button(self, name: str | re.Pattern[str]) -> Locator:
        """Find a button anywhere in the page."""
        return self.page.get_by_role("button", name=name)

    def send(self, text: str) -> None:
        """Ask something."""
        self.composer.fill(text)
        self.page.get_by_role("button", name="Send", exact=True).click()

    def ask(self, text: str) -> Locator:
        """Ask something, and wait for the whole answer."""
        n_answers = self.answers.count()
        self.send(text)
        answer = self.answers.nth(n_answers)
        expect(answer).to_be_visible()
        self.wait_until_done()
        return answer

    def regenerate(self, shows: str) -> None:
        """Have the first answer written again, and wait until it is there."""
        self.answers.first.hover()
        self.answers.first.get_by_role("button", name="Regenerate").click()
        expect(self.answers).to_have_text([re.compile(shows)])
        self.wait_until_done()

    def wait_until_done(self) -> None:
        """Wait for the end of what is being written."""
        expect(self.stop).to_have_count(0)

    def begin(self) -> None:
        """Begin another chat."""
        self.button("New chat").first.click()
        expect(self.answers).to_have_count(0)

    def open(self, title: str) -> None:
        """Open the chat with this title."""
        self.chats.get_by_role("link", name=title).click()

    def menu_of(self, title: str, entry: str) -> None:
        """Choose something in the menu of a chat."""
        row = self.chats.filter(has=self.page.get_by_role("link", name=title, exact=True))
        row.hover()
        row.get_by_role("button").click()
        self.page.get_by_role("menuitem", name=entry).click()

    @contextmanager
    def settings(self, section: str) -> Iterator[Locator]:
        """Open the settings at one of their tabs, and close them after the block."""
        self.button("Settings").first.click()
        dialog = self.page.get_by_role("dialog", name="Settings")
        dialog.get_by_role("tab", name=section).click()
        yield dialog.get_by_role("tabpanel")
        dialog.get_by_role("button", name="Close").click()
        expect(dialog).to_be_hidden()

    def export_to(self, path: Path) -> None:
        """Save all chats to a file."""
        with self.settings("Your data") as panel:
            with self.page.expect_download() as download:
                panel.get_by_role("button", name="Export all").click()
            download.value.save_as(path)

    def import_from(self, path: Path, says: str) -> None:
        """Add the chats of a file, and wait until the page says this of it."""
        with self.settings("Your data") as panel:
            with self.page.expect_file_chooser() as chooser:
                panel.get_by_role("button", name="Import").click()
            chooser.value.set_files(path)
            expect(self.page.get_by_text(says)).to_be_visible()
