"""A headless Chromium, and the rules that every page in it is held to."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Dialog,
    Page,
    Request,
    expect,
    sync_playwright,
)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

_FONTS = Path(__file__).with_name("fonts.conf")

_ARGUMENTS = [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
    "--no-sandbox",
    "--use-fake-device-for-media-stream",  # a microphone that beeps
]

#: The model writes no titles, unless a test wants them: it would answer when the server is idle.
_NO_TITLES = """
if (self.origin.startsWith("http") && !localStorage.getItem("trioserve/settings"))
    localStorage.setItem("trioserve/settings", '{"titles": false}');
"""

#: Seconds that an element may take on a busy machine.
PATIENCE = 60


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run a browser."""
    expect.set_options(timeout=PATIENCE * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=_ARGUMENTS,
            env={**os.environ, "FONTCONFIG_FILE": str(_FONTS)},
        )
        with browser:
            yield browser


class Visitor:
    """Opens pages, each as a separate user, and records what must not happen there.

    That is an error on the console, an uncaught error, a dialog, or a request to an origin other
    than that of the page. `expect` names errors that a test expects.
    """

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._contexts: list[BrowserContext] = []
        self._expected: list[str] = []
        self.problems: list[str] = []

    def expect(self, pattern: str) -> None:
        """Allow errors that match this pattern."""
        self._expected.append(pattern)

    def visit(self, url: str, *, titles: bool = False, **settings: Any) -> Page:
        """Open a page in a new window with a new profile."""
        settings = {"viewport": {"width": 1280, "height": 800}, **settings}
        context = self._browser.new_context(**settings)
        context.set_default_timeout(PATIENCE * 1000)
        self._contexts.append(context)
        origin = "{0.scheme}://{0.netloc}".format(urlsplit(url))
        context.on("request", lambda request: self._check_request(request, origin))
        context.on("page", self._watch)
        if not titles:
            context.add_init_script(_NO_TITLES)
        page = context.new_page()
        page.goto(url)
        return page

    def close(self) -> None:
        """Close all windows."""
        for context in self._contexts:
            context.close()

    def unexpected(self) -> list[str]:
        """List the problems that the test did not name."""
        return [
            problem
            for problem in self.problems
            if not any(re.search(pattern, problem) for pattern in self._expected)
        ]

    def _watch(self, page: Page) -> None:
        page.on("pageerror", lambda error: self.problems.append(f"uncaught: {error}"))
        page.on("console", self._check_console)
        page.on("dialog", self._close_dialog)

    def _close_dialog(self, dialog: Dialog) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _check_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            where = message.location.get("url", "")
            self.problems.append(f"console {message.type}: {message.text} {where}")

    def _check_request(self, request: Request, origin: str) -> None:
        scheme = urlsplit(request.url).scheme
        if scheme not in ("data", "blob") and not request.url.startswith(f"{origin}/"):
            self.problems.append(f"foreign request: {request.url}")
