"""The menu of models at a router, and what the page says of a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from tests.support.browsing import Visitor
from tests.support.chat_page import ChatPage
from tests.support.fake_fleet import Routed, entry, routed
from tests.support.paced_script import PacedScript
from tests.support.trio_thread import TrioThread
from tests.ui.test_looks import LOOKS, scrolls_sideways, shoot, violations
from trioserve.models.catalog import ModelEntry, Source
from trioserve.router.states import ModelState, Status
from trioserve.types import Modalities

pytestmark = pytest.mark.system

EXAMPLES = ["What digit is it?", "Say hello.", "What is the sun?"]
ADVICE = "A request may have 1,024 tokens: four share 4,096. Set -np 1 for longer ones."


def told(**more: object) -> dict[str, Any]:
    """A loaded model, as it is described."""
    counts = ("vocab_type", "n_vocab", "n_ctx_train", "n_embd", "n_params", "size")
    return {"meta": {**dict.fromkeys(counts, 0), "n_ctx": 1024, "ftype": "Q8_0"}, **more}


LOADED = {
    "toy": told(
        is_toy=True, example_prompts=EXAMPLES, has_chat_template=True, context_advice=ADVICE
    ),
    "base": told(has_chat_template=False),
}


@pytest.fixture
def router(
    loop: TrioThread, script: PacedScript, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Routed]:
    """A router with a toy that is loaded, and models in other states."""

    async def modalities(_: object, entries: Iterable[ModelEntry]) -> dict[str, Modalities]:
        senses = Modalities(vision=True, audio=True)
        return {one.name: senses if one.name == "seeing" else Modalities() for one in entries}

    monkeypatch.setattr("trioserve.api.router.files.Files.modalities", modalities)
    monkeypatch.setattr(
        "trioserve.api.router.service.of_server", lambda server: LOADED[server.config.alias]
    )
    loaded = {name: script.backend(name) for name in LOADED}
    with loop.open(routed({**loaded, "large": None, "seeing": None})) as router:
        fleet = router.fleet
        fleet.states["large"] = ModelState(value=Status.LOADING, progress=0.4)
        seeing = entry("seeing", source=Source.CACHE, size=2_500_000_000)
        fleet.catalog.entries = {**fleet.catalog.entries, "seeing": seeing}
        yield router


# Tests name the router before the visitor: its pages are closed before it is.


def open_menu(page: Page) -> Locator:
    page.get_by_role("button", name="Model:").click()
    menu = page.get_by_role("dialog", name="Choose a model")
    expect(menu).to_be_visible()
    return menu


@pytest.mark.parametrize("look", LOOKS)
def test_the_menu_says_what_each_model_is(
    router: Routed, visitor: Visitor, look: str, tmp_path: Path
) -> None:
    page = visitor.visit(router.url, device_scale_factor=2, **LOOKS[look])
    menu = open_menu(page)
    rows = menu.get_by_role("listitem")
    expect(rows.filter(has_text="toy")).to_contain_text("toy model · 1K context")
    expect(rows.filter(has_text="large")).to_contain_text("is loading, 40%")
    progress = rows.filter(has_text="large").get_by_role("progressbar")
    assert progress.evaluate("bar => bar.value") == 0.4
    seeing = rows.filter(has_text="seeing")
    expect(seeing).to_contain_text("not loaded · 2.5 GB")
    for sense in ("sees pictures", "hears sound"):
        expect(seeing.get_by_role("img", name=sense)).to_be_visible()
        expect(rows.filter(has_text="toy").get_by_role("img", name=sense)).to_have_count(0)
    assert violations(page) == []
    assert not scrolls_sideways(page)
    shoot(page, f"models-{look}", tmp_path)


def test_models_are_loaded_unloaded_and_deleted(router: Routed, visitor: Visitor) -> None:
    page = visitor.visit(router.url)
    menu = open_menu(page)
    done: list[str] = []
    page.on("response", lambda answer: done.append(f"{answer.request.method} {answer.status}"))
    with page.expect_response("**/models/load"):
        menu.get_by_role("button", name="Load seeing").click()
    with page.expect_response("**/models/unload"):
        menu.get_by_role("button", name="Unload toy").click()
    with page.expect_response("**/v1/models"):
        pass
    assert {("load", "seeing"), ("unload", "toy")} <= {*router.fleet.calls}

    def delete(route: Route) -> None:
        done.append(route.request.url)
        route.fulfill(json={"success": True})

    page.route("**/models?*", delete)
    expect(menu.get_by_role("button", name="Delete toy…")).to_have_count(0)
    menu.get_by_role("button", name="Delete seeing…").click()
    with page.expect_response("**/models?*"):
        menu.get_by_role("button", name="Delete seeing", exact=True).click()
    assert any(one.endswith("/models?model=seeing") for one in done)


def test_a_model_is_downloaded(router: Routed, visitor: Visitor) -> None:
    page = visitor.visit(router.url)
    menu = open_menu(page)
    visitor.expect("status of 400")
    field = menu.get_by_role("combobox", name="A model of Hugging Face")
    field.fill("no model")
    menu.get_by_role("button", name="Download").click()
    expect(page.get_by_role("alert").or_(page.locator(".toast"))).to_contain_text("no model")
    wanted = "ggml-org/some-GGUF:Q4_K_M"
    coming = {"url": {"done": 30, "total": 120}, "other": {"done": 0, "total": 30}}
    listed = {"id": wanted, "status": {"value": "downloading", "progress": coming}}

    def begin(route: Route) -> None:
        assert route.request.post_data_json == {"model": wanted}
        page.route("**/v1/models", lambda one: one.fulfill(json={"data": [listed]}))
        route.fulfill(json={"success": True, "model": wanted})

    page.route(
        "**/models",
        lambda route: begin(route) if route.request.method == "POST" else route.fallback(),
    )
    field.fill(wanted)
    menu.get_by_role("button", name="Download").click()
    expect(field).to_have_value("")
    row = menu.get_by_role("listitem").filter(has_text="some-GGUF")
    expect(row).to_contain_text("is being downloaded, 20%")
    expect(row.get_by_role("button", name="Cancel some-GGUF:Q4_K_M")).to_be_visible()


@pytest.mark.parametrize("look", LOOKS)
def test_a_toy_has_examples_of_what_it_can_do(
    router: Routed, visitor: Visitor, script: PacedScript, look: str, tmp_path: Path
) -> None:
    page = visitor.visit(router.url, device_scale_factor=2, **LOOKS[look])
    chat = ChatPage(page)
    expect(page.get_by_text("This model is a toy")).to_be_visible()
    expect(page.get_by_text(ADVICE)).to_be_visible()
    examples = page.get_by_role("group", name="Examples").get_by_role("button")
    expect(examples).to_have_text(EXAMPLES)
    assert violations(page) == []
    assert not scrolls_sideways(page)
    shoot(page, f"toy-{look}", tmp_path)
    examples.nth(2).click()
    expect(chat.answers.first).to_contain_text(script.answer)
    assert EXAMPLES[2] in script.prompts[-1]


def test_a_model_without_a_chat_template_has_a_notice(router: Routed, visitor: Visitor) -> None:
    page = visitor.visit(router.url)
    visitor.expect("status of 400")  # what is not loaded has no properties
    notice = page.get_by_text("This model has no chat template")
    expect(page.get_by_text("This model is a toy")).to_be_visible()
    expect(notice).to_have_count(0)
    open_menu(page).get_by_role("button", name="base").first.click()
    expect(notice).to_be_visible()
    expect(page.get_by_text("This model is a toy")).to_have_count(0)


def test_a_browser_can_install_the_page(router: Routed, visitor: Visitor) -> None:
    page = visitor.visit(router.url)
    expect(ChatPage(page).composer).to_be_visible()
    session = page.context.new_cdp_session(page)
    answer = session.send("Page.getAppManifest")
    assert answer["errors"] == []
    assert json.loads(answer["data"])["name"] == "trioserve"
    errors = session.send("Page.getInstallabilityErrors")["installabilityErrors"]
    assert [one["errorId"] for one in errors if one["errorId"] != "in-incognito"] == []
