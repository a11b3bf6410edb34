"""The menu of models at a router, and what the page says of a model."""

from __future__ import annotations

import json
import re
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
        menu.get_by_role("button", name="Load seeing", exact=True).click()
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


WANTED = "ggml-org/some-GGUF:Q4_K_M"


@pytest.mark.parametrize("look", LOOKS)
def test_a_model_is_found_estimated_and_downloaded(
    router: Routed, visitor: Visitor, look: str, tmp_path: Path
) -> None:
    page = visitor.visit(router.url, device_scale_factor=2, **LOOKS[look])
    gigabyte = 1_000_000_000
    listed = {"id": WANTED, "status": {"value": "downloading", "progress": {}}}
    files = {"url": {"done": 3 * gigabyte, "total": 5 * gigabyte}}

    def hub(route: Route) -> None:
        offers = [{"name": WANTED, "size": 3 * gigabyte}, {"name": "b:BF16", "size": 20 * gigabyte}]
        repos = [{"id": "ggml-org/some-GGUF", "downloads": 12_345, "likes": 67}]
        data = offers if "repo=" in route.request.url else repos
        route.fulfill(json={"data": data, "free": 8 * gigabyte})

    def download(route: Route) -> None:
        if route.request.method != "POST":
            return route.fallback()
        assert route.request.post_data_json == {"model": WANTED}
        listed["status"]["progress"] = files  # type: ignore[index]
        page.route("**/v1/models", lambda one: one.fulfill(json={"data": [listed]}))
        return route.fulfill(json={"success": True, "model": WANTED})

    page.route("**/models/hub*", hub)
    needs = {"memory": 4 * gigabyte, "free": 8 * gigabyte}
    page.route("**/models/estimate", lambda route: route.fulfill(json=needs))
    page.route("**/models", download)
    open_menu(page).get_by_role("button", name="Get models…").click()
    dialog = page.get_by_role("dialog", name="Get models")
    dialog.get_by_role("searchbox").fill("some")
    dialog.get_by_role("button", name="Search", exact=True).click()
    dialog.get_by_text("ggml-org/some-GGUF").click()
    expect(dialog).to_contain_text("12.3K downloads · 67 likes")
    rows = dialog.get_by_role("group").get_by_role("listitem")
    expect(rows.nth(1)).to_contain_text("larger than the free memory")
    rows.first.get_by_role("button", name="Does it fit?").click()
    expect(rows.first).to_contain_text("fits: needs 4.0 GB, 8.0 GB of RAM are free")
    rows.first.get_by_role("button", name="Download").click()
    coming = dialog.get_by_role("list", name="Downloads").get_by_role("listitem")
    expect(coming).to_contain_text("some-GGUF:Q4_K_M3.0 GB of 5.0 GB")
    assert violations(page) == []
    assert not scrolls_sideways(page)
    shoot(page, f"get-models-{look}", tmp_path)
    page.route("**/models/unload", lambda route: route.fulfill(json={"success": True}))
    files["url"]["done"] = 4 * gigabyte
    expect(coming).to_contain_text(re.compile(r"4.0 GB of 5.0 GB · .+/s · .+ left"))
    listed["id"] = "another"
    coming.get_by_role("button", name="Pause").click()
    expect(coming.filter(has_text="some")).to_contain_text("paused")
    listed["id"], listed["status"] = WANTED, {"value": "downloading", "progress": files}
    coming.filter(has_text="some").get_by_role("button", name="Resume").click()
    expect(coming).to_have_count(1)
    listed["status"] = {"value": "unloaded"}
    expect(page.get_by_text("some-GGUF:Q4_K_M is here.")).to_be_visible()


def test_a_model_is_loaded_with_settings(router: Routed, visitor: Visitor) -> None:
    page = visitor.visit(router.url)
    asked: list[Any] = []

    def estimate(route: Route) -> None:
        asked.append(route.request.post_data_json)
        route.fulfill(json={"memory": 4_000_000_000, "free": 3_000_000_000})

    page.route("**/models/estimate", estimate)
    open_menu(page).get_by_role("button", name="Load seeing with settings…").click()
    dialog = page.get_by_role("dialog", name="Load seeing")
    dialog.get_by_label("Context").fill("8192")
    dialog.get_by_label("Type of keys in the KV cache").select_option("q8_0")
    says = dialog.locator("form").get_by_role("status")
    expect(says).to_contain_text("does not fit: needs 4.0 GB, 3.0 GB of RAM are free")
    sent = {"model": "seeing", "ctx_size": 8192, "cache_type_k": "q8_0"}
    with page.expect_request("**/models/load") as load:
        dialog.get_by_role("button", name="Load", exact=True).click()
    assert load.value.post_data_json == asked[-1] == sent
    expect(dialog).to_be_hidden()
    assert router.fleet.calls == [("load --ctx-size 8192 --cache-type-k q8_0", "seeing")]
    expect(dialog).to_be_hidden()


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
