"""The page in other languages."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.support.browsing import Visitor
from tests.support.paced_script import PacedScript
from trioserve.api.service import Service

pytestmark = pytest.mark.system


@pytest.mark.parametrize(
    ("locale", "new", "placeholder"),
    [("de-AT", "Neuer Chat", "Nachricht schreiben"), ("zh-CN", "新对话", "输入消息")],
)
def test_the_page_speaks_the_language_of_the_browser(
    visitor: Visitor, server: tuple[str, Service], locale: str, new: str, placeholder: str
) -> None:
    page = visitor.visit(server[0], locale=locale)
    expect(page.get_by_role("button", name=new).first).to_be_visible()
    expect(page.locator("#message")).to_have_attribute("placeholder", placeholder)
    assert page.locator("html").get_attribute("lang") == locale[:2]


def test_a_setting_changes_the_language_at_once(
    visitor: Visitor, server: tuple[str, Service], script: PacedScript
) -> None:
    page = visitor.visit(server[0])
    page.get_by_role("button", name="Settings").first.click()
    page.get_by_role("radio", name="Deutsch").check(force=True)
    dialog = page.get_by_role("dialog", name="Einstellungen")
    expect(dialog.get_by_role("tab", name="Allgemein")).to_be_visible()
    page.reload()
    expect(page.get_by_role("button", name="Neuer Chat").first).to_be_visible()
