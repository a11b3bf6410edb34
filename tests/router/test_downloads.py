"""Downloads that a router is asked for: each once, told of, and ended when asked to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.support.fake_fleet import FakeCatalog, FakeFleet, entry
from tests.support.scripted_children import ScriptedLauncher
from trioserve.errors import (
    HubError,
    InvalidRequestError,
    PermissionDeniedError,
    TooManyRequestsError,
    UnavailableError,
)
from trioserve.models import hub
from trioserve.models.catalog import Source
from trioserve.models.hub import DownloadProgress, HubReference
from trioserve.router.downloads import Downloads
from trioserve.router.fleet import Fleet
from trioserve.router.states import FleetEvent

NAME = "user/repo:Q8_0"


@attrs.define
class FakeHub:
    """Has each model, and downloads until `step` is set."""

    step: trio.Event = attrs.field(factory=trio.Event)
    pulled: list[str] = attrs.field(factory=list)
    removed: list[str] = attrs.field(factory=list)
    failure: Exception | None = None
    asked: trio.Event = attrs.field(factory=trio.Event)

    async def look_up(self, reference: HubReference, **rest: Any) -> Any:
        await self.asked.wait()
        if self.failure is not None:
            raise self.failure
        return attrs.make_class("Remote", ["name"])(f"{reference.repo}:Q8_0")

    async def pull(
        self,
        reference: HubReference,
        *,
        token: str | None,
        on_progress: Callable[[DownloadProgress], None],
    ) -> None:
        self.pulled.append(str(reference))
        on_progress(DownloadProgress(url="http://x/a", done=1, total=2, all_done=1, all_total=2))
        await self.step.wait()
        if self.failure is not None:
            raise self.failure

    def remove(self, reference: HubReference) -> None:
        self.removed.append(str(reference))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    fake.asked.set()
    for name in ("look_up", "pull", "remove"):
        monkeypatch.setattr(hub, name, getattr(fake, name))
    return fake


@attrs.define
class Running:
    downloads: Downloads
    fleet: FakeFleet
    events: list[FleetEvent]

    def told(self) -> list[str]:
        return [each.event for each in self.events]


@asynccontextmanager
async def running(**fields: Any) -> AsyncIterator[Running]:
    """Downloads of a fleet without models, but with a real nursery for jobs."""
    catalog = FakeCatalog({"one": entry("one", **fields)})
    async with Fleet(catalog, launcher=ScriptedLauncher()) as jobs:  # type: ignore[arg-type]
        fleet = FakeFleet(catalog, jobs=jobs)
        downloads = Downloads(fleet, limit=2)  # type: ignore[arg-type]
        yield Running(downloads, fleet, fleet.events.told)


async def test_a_model_is_downloaded_once(fake: FakeHub) -> None:
    async with running() as one:
        assert await one.downloads.start("user/repo") == NAME
        assert await one.downloads.start("user/repo:q8_0") == NAME
        await wait_all_tasks_blocked()
        assert fake.pulled == ["user/repo"]
        files = {"http://x/a": {"done": 1, "total": 2}}
        assert one.downloads.running[NAME].progress() == files
        fake.step.set()
        await wait_all_tasks_blocked()
        assert one.downloads.running == {}
        assert one.events == [
            FleetEvent(model=NAME, event="download_progress", data=files),
            FleetEvent(model=NAME, event="download_finished"),
        ]
        assert one.fleet.calls == [("reload", "*")]


async def test_a_download_that_fails(fake: FakeHub) -> None:
    async with running() as one:
        await one.downloads.start("user/repo")
        await wait_all_tasks_blocked()
        fake.failure = HubError("The line is cut.")
        fake.step.set()
        await wait_all_tasks_blocked()
        assert one.downloads.running == {}
        assert one.events[-1] == FleetEvent(
            model=NAME, event="download_failed", data={"message": "The line is cut."}
        )


async def test_an_unforeseen_error_ends_its_download_alone(fake: FakeHub) -> None:
    async with running() as one:
        await one.downloads.start("user/repo")
        await wait_all_tasks_blocked()
        fake.failure = OSError(5, "Input/output error")
        fake.step.set()
        await wait_all_tasks_blocked()
        assert one.downloads.running == {}
        assert one.events[-1].event == "download_failed"
        message = (one.events[-1].data or {})["message"]
        assert message == "An unexpected error: OSError(5, 'Input/output error')"
        fake.failure = None
        await one.downloads.start("user/repo")
        await wait_all_tasks_blocked()
        assert one.told()[-1] == "download_finished"


async def test_more_downloads_than_the_limit_are_refused(fake: FakeHub) -> None:
    async with running() as one, trio.open_nursery() as nursery:
        assert await one.downloads.start("user/repo") == NAME
        fake.asked = trio.Event()
        nursery.start_soon(one.downloads.start, "user/second")
        await wait_all_tasks_blocked()
        with pytest.raises(TooManyRequestsError, match="--models-downloads") as caught:
            await one.downloads.start("user/third")  # while the second is looked up
        assert caught.value.retry_after > 0
        fake.asked.set()
        await wait_all_tasks_blocked()
        with pytest.raises(TooManyRequestsError):
            await one.downloads.start("user/third")
        assert await one.downloads.start("user/repo") == NAME, "it runs already"
        assert fake.pulled == ["user/repo", "user/second"]
        assert one.downloads.cancel(NAME)
        await wait_all_tasks_blocked()
        assert await one.downloads.start("user/third") == "user/third:Q8_0"


async def test_a_router_that_downloads_nothing_for_clients(fake: FakeHub) -> None:
    async with running() as one:
        downloads = Downloads(one.fleet, limit=0)  # type: ignore[arg-type]
        with pytest.raises(PermissionDeniedError):
            await downloads.start("user/repo")
    assert fake.pulled == []


async def test_a_download_that_is_ended(fake: FakeHub) -> None:
    async with running() as one:
        await one.downloads.start("user/repo")
        await wait_all_tasks_blocked()
        assert one.downloads.cancel(NAME)
        await wait_all_tasks_blocked()
        assert not one.downloads.cancel(NAME)
        assert one.told() == ["download_progress", "download_failed"]


async def test_what_is_not_downloaded(fake: FakeHub) -> None:
    async with running() as one:
        with pytest.raises(InvalidRequestError, match="not a model on the hub"):
            await one.downloads.start("nonsense")
        one.fleet.catalog.entries = {NAME: entry(NAME)}
        with pytest.raises(InvalidRequestError, match="is here already"):
            await one.downloads.start("user/repo")
        fake.failure = HubError("There is no such model.")
        with pytest.raises(HubError):
            await one.downloads.start("user/other")
        assert one.downloads.running == {}


async def test_a_model_is_deleted(fake: FakeHub) -> None:
    async with running() as one:
        await one.downloads.remove(entry(NAME, source=Source.CACHE, path=Path("/x")))
        assert fake.removed == [NAME]
        assert one.fleet.calls == [("reload", "*")]
        assert one.events == [FleetEvent(model=NAME, event="model_remove")]
        with pytest.raises(InvalidRequestError, match="was not downloaded"):
            await one.downloads.remove(entry("one"))


async def test_a_router_that_ends_downloads_nothing(fake: FakeHub) -> None:
    async with running() as one:
        pass
    with pytest.raises(UnavailableError):
        await one.downloads.start("user/repo")
    assert one.downloads.running == {}


async def test_a_model_that_is_deleted_is_no_longer_offered_if_the_client_leaves_too(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = trio.CancelScope()

    def remove(reference: HubReference) -> None:
        trio.from_thread.run_sync(client.cancel)
        fake.remove(reference)

    monkeypatch.setattr(hub, "remove", remove)
    async with running() as one:
        with client:
            await one.downloads.remove(entry(NAME, source=Source.CACHE, path=Path("/x")))
        assert fake.removed == [NAME]
        assert one.fleet.calls == [("reload", "*")]
        assert one.told() == ["model_remove"]
