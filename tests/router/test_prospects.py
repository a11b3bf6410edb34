"""Models that could be downloaded, and what they and other settings would need."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import trio

from tests.hub.fixtures import hub
from tests.hub.server import Hub
from tests.support.scripted_children import ScriptedLauncher
from tests.support.waiting import patiently
from trioserve.config import Config
from trioserve.errors import (
    DeadlineExceededError,
    HubNotFoundError,
    InvalidRequestError,
    ModelLoadError,
    TrioServeError,
)
from trioserve.models import BUNDLED, BUNDLED_PROJECTOR
from trioserve.models.catalog import Catalog
from trioserve.models.hub import Offer, Repository
from trioserve.router import prospects as prospects_of
from trioserve.router.fleet import Fleet
from trioserve.router.prospects import Prospects

__all__ = ["hub"]

REPO = "user/tiny-GGUF"


@pytest.fixture
def files(hub: Hub) -> dict[str, bytes]:
    files = {
        "tiny-Q8_0.gguf": BUNDLED.read_bytes(),
        "tiny-Q4_K_M-00001-of-00002.gguf": b"GGUF" + bytes(4996),
        "tiny-Q4_K_M-00002-of-00002.gguf": b"GGUF" + bytes(2996),
        "README.md": b"hello",
    }
    hub.add(REPO, files)
    hub.add("user/other", {"other.gguf": b"nonsense" * 1000})
    return files


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    (tmp_path / "one.gguf").symlink_to(BUNDLED)
    return Catalog(Config(models_dir=str(tmp_path)), ["--ctx-size", "4096"], {})


async def test_repositories_are_found_and_their_models_have_sizes(
    hub: Hub, files: dict[str, bytes], catalog: Catalog
) -> None:
    async with Fleet(catalog, launcher=ScriptedLauncher()) as fleet:
        prospects = Prospects(fleet)
        assert await prospects.search("tiny") == [Repository(id=REPO, downloads=7)]
        assert await prospects.offers(REPO) == [
            Offer(f"{REPO}:Q4_K_M", 8000),
            Offer(f"{REPO}:Q8_0", len(files["tiny-Q8_0.gguf"])),
        ]
        with pytest.raises(HubNotFoundError):
            await prospects.offers("user/none")
        with pytest.raises(InvalidRequestError):
            await prospects.offers("../etc")
        hub.repos["odd"] = {}
        assert await prospects.search("odd") == []


@pytest.mark.system
async def test_a_model_is_estimated_by_its_header_alone(
    hub: Hub, files: dict[str, bytes], catalog: Catalog
) -> None:
    files["mmproj-tiny-f16.gguf"] = BUNDLED_PROJECTOR.read_bytes()
    with patiently():
        async with Fleet(catalog) as fleet:
            prospects = Prospects(fleet)
            there = await prospects.needs(f"{REPO}:Q8_0", ("--ctx-size", "2048"))
            here = await prospects.needs("one", ("--ctx-size", "2048"))
            more = await prospects.needs("one", ("--ctx-size", "8192"))
            n_projector = BUNDLED_PROJECTOR.stat().st_size
            assert there.memory == here.memory + n_projector
            assert here.memory < more.memory
            assert there.free
            with pytest.raises(ModelLoadError):
                await prospects.needs("user/other", ())
            with pytest.raises(HubNotFoundError):
                await prospects.needs("user/none:Q8_0", ())


async def test_of_settings_sent_at_once_those_of_the_first_count(catalog: Catalog) -> None:
    async with Fleet(catalog, launcher=ScriptedLauncher()) as fleet:
        entry, refused = catalog.entries["one"], list[TrioServeError]()

        async def load(n_ctx: int) -> None:
            try:
                await fleet.load(entry, ("--ctx-size", str(n_ctx)))
            except InvalidRequestError as error:
                refused.append(error)

        async with trio.open_nursery() as nursery:
            for n_ctx in (256, 512, 1024):
                nursery.start_soon(load, n_ctx)
        assert len(refused) == 2
        child = fleet.child("one")
        assert child is not None
        assert child.entry == catalog.entries["one"]


async def test_a_hub_that_is_too_slow_keeps_no_others_waiting(
    hub: Hub, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prospects_of, "_PATIENCE", -1.0)
    async with Fleet(catalog, launcher=ScriptedLauncher()) as fleet:
        with pytest.raises(DeadlineExceededError, match="too slowly"):
            await Prospects(fleet).needs(f"{REPO}:Q8_0", ())


def test_settings_of_a_model_last_until_others_are_made(catalog: Catalog) -> None:
    before = catalog.entries["one"]
    catalog.set("one", ("--ctx-size", "1024"))
    changed = attrs.evolve(before, args=(*before.args, "--ctx-size", "1024"))
    assert catalog.entries["one"] == changed
    assert not catalog.reload().changed
    catalog.set("one", ())
    assert catalog.entries["one"] == before
