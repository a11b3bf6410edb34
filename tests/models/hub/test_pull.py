"""Downloads from a hub that loses connections, flips bytes, and is slow."""

from __future__ import annotations

import random
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import trio

from tests.hub.server import Hub, sha256
from tests.support.waiting import patiently
from trioserve.errors import (
    DiskFullError,
    GatedModelError,
    HashMismatchError,
    HubError,
    HubNotFoundError,
    HubUnavailableError,
)
from trioserve.models.hub import (
    DownloadProgress,
    HubModel,
    HubReference,
    cached_models,
    client,
    download,
    look_up,
    pull,
)

REPO = "user/some-model-GGUF"
MODEL = random.Random(0).randbytes(3 * 2**20)
PARTS = [random.Random(i).randbytes(200_000 + i) for i in range(3)]
SPLIT = {f"big-BF16-0000{i}-of-00003.gguf": part for i, part in enumerate(PARTS, 1)}
PROJECTOR = random.Random(9).randbytes(5000)
FILES = {
    "README.md": b"read me",
    "some-model-Q4_K_M.gguf": MODEL,
    "mmproj-F16.gguf": PROJECTOR,
    **SPLIT,
}


@pytest.fixture(autouse=True)
def _full_hub(hub: Hub) -> None:
    hub.add(REPO, FILES)


async def pulled(
    quant: str | None = None, *, with_projector: bool = False, **options: object
) -> HubModel:
    with patiently():
        return await pull(
            HubReference(REPO, quant),
            with_projector=with_projector,
            **options,  # type: ignore[arg-type]
        )


def starts(hub: Hub) -> list[int]:
    """Return the byte of the file at which each download began."""
    ranges = [one.headers.get("Range", "bytes=0-") for one in hub.downloads()]
    return [int(text.removeprefix("bytes=").partition("-")[0]) for text in ranges]


def leftovers(cache: Path) -> list[Path]:
    return list(cache.glob("models--*/blobs/*.incomplete"))


async def test_a_model_arrives_in_the_layout_of_the_cache(hub: Hub, cache: Path) -> None:
    model = await pulled()
    folder = cache / "models--user--some-model-GGUF"
    link = folder / "snapshots" / ("a" * 40) / "some-model-Q4_K_M.gguf"
    assert model == HubModel(name=f"{REPO}:Q4_K_M", files=(link,), mmproj=None, size=len(MODEL))
    assert link.is_symlink()
    assert link.resolve() == folder / "blobs" / sha256(MODEL)
    assert link.read_bytes() == MODEL
    assert (folder / "refs" / "main").read_text() == "a" * 40
    assert cached_models() == [model]
    assert leftovers(cache) == []


async def test_all_parts_of_a_split_model_arrive(hub: Hub) -> None:
    seen: list[DownloadProgress] = []
    model = await pulled("bf16", on_progress=seen.append)
    assert model.name == f"{REPO}:BF16"
    assert [path.name for path in model.files] == list(SPLIT)
    assert [path.read_bytes() for path in model.files] == PARTS
    total = sum(map(len, PARTS))
    assert (seen[-1].all_done, seen[-1].all_total) == (total, total)
    assert {one.url.rpartition("/")[2]: one.total for one in seen} == {
        name: len(part) for name, part in SPLIT.items()
    }
    assert all(one.done <= one.total and one.all_done <= total for one in seen)


async def test_what_is_there_is_not_downloaded_again(hub: Hub) -> None:
    first = await pulled()
    assert await pulled() == first
    assert len(hub.downloads()) == 1


async def test_a_new_commit_with_the_same_file_is_a_link(hub: Hub) -> None:
    first = await pulled()
    hub.add(REPO, FILES | {"README.md": b"changed"}, "b" * 40)
    second = await pulled()
    assert second.files != first.files
    assert second.files[0].resolve() == first.files[0].resolve()
    assert len(hub.downloads()) == 1


async def test_a_list_of_files_in_pages(hub: Hub) -> None:
    hub.page_size = 2
    assert (await pulled("bf16")).size == sum(map(len, PARTS))


async def test_the_projector_comes_with_the_model(hub: Hub) -> None:
    without = await pulled()
    assert without.mmproj is None
    hub.asked.clear()
    model = await pulled(with_projector=True)
    assert len(hub.downloads()) == 1  # the model is there
    assert model.mmproj == model.files[0].with_name("mmproj-F16.gguf")
    assert model.mmproj.read_bytes() == PROJECTOR
    assert model.size == len(MODEL)


async def test_looking_up_downloads_nothing(hub: Hub, cache: Path) -> None:
    model = await look_up(HubReference(REPO, "BF16"))
    assert model.name == f"{REPO}:BF16"
    assert list(model.files) == [*SPLIT, "mmproj-F16.gguf"]
    assert hub.downloads() == []
    assert not cache.exists()


# -- connections that are lost


async def test_a_download_that_is_cut_nine_times_completes(hub: Hub) -> None:
    hub.n_cuts, hub.cut_after = 9, 300_000
    model = await pulled()
    assert model.files[0].read_bytes() == MODEL
    assert starts(hub) == [i * 300_000 for i in range(10)]


async def test_a_download_that_brings_nothing_is_given_up_and_kept(hub: Hub, cache: Path) -> None:
    hub.n_cuts, hub.cut_after = 1, 300_000
    with pytest.raises(HubUnavailableError) as caught:
        await pulled(on_progress=lambda progress: _then_nothing(hub, progress))
    assert caught.value.message.endswith("is lost. 300000 bytes are kept for another try.")
    assert [path.stat().st_size for path in leftovers(cache)] == [300_000]
    assert cached_models() == []
    hub.n_cuts = 0
    assert (await pulled()).files[0].read_bytes() == MODEL
    assert starts(hub)[-1] == 300_000


def _then_nothing(hub: Hub, progress: DownloadProgress) -> None:
    if progress.done:
        hub.n_cuts, hub.cut_after = 1000, 0


async def test_an_error_in_between_loses_nothing(hub: Hub) -> None:
    hub.n_cuts, hub.cut_after = 1, 300_000
    busy, expired = (503, {}), (403, {})

    def fail_once(progress: DownloadProgress) -> None:
        if progress.done == 300_000:
            hub.cdn_failures = [busy, expired, busy, expired]

    assert (await pulled(on_progress=fail_once)).files[0].read_bytes() == MODEL
    assert starts(hub) == [0, *[300_000] * 5]


@pytest.mark.system
async def test_a_connection_that_falls_silent_is_made_again(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(client._TIMEOUTS, "read", 0.3)
    hub.hold_after = 2**20 + 1000

    def go_on(progress: DownloadProgress) -> None:
        if progress.done:
            hub.hold_after = None

    assert (await pulled(on_progress=go_on)).files[0].read_bytes() == MODEL
    assert starts(hub) == [0, 2**20 + 1000]


async def test_very_large_files_are_asked_for_in_pieces(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_MAX_PIECE", 10**6)
    hub.n_cuts, hub.cut_after = 1, 300_000
    assert (await pulled()).files[0].read_bytes() == MODEL
    assert starts(hub) == [0, 300_000, 1_300_000, 2_300_000]
    assert hub.downloads()[1].headers["Range"] == "bytes=300000-1299999"


async def test_a_server_that_continues_at_another_place(hub: Hub) -> None:
    hub.n_cuts, hub.cut_after = 1, 300_000
    wrong = {"Content-Range": f"bytes 5-{len(MODEL) - 1}/{len(MODEL)}"}

    def fail_once(progress: DownloadProgress) -> None:
        if progress.done == 300_000:
            hub.cdn_failures = [(206, wrong)]

    assert (await pulled(on_progress=fail_once)).files[0].read_bytes() == MODEL
    assert starts(hub) == [0, 300_000, 0]


async def test_a_server_without_ranges_starts_again(hub: Hub) -> None:
    hub.has_ranges = False
    hub.n_cuts, hub.cut_after = 2, 300_000
    assert (await pulled()).files[0].read_bytes() == MODEL


async def test_a_hub_that_is_busy_is_asked_again(hub: Hub) -> None:
    hub.failures = [(503, {})]
    assert (await pulled()).size == len(MODEL)
    hub.failures = [(429, {"Retry-After": "3600"})]
    with pytest.raises(HubUnavailableError, match="gets too many requests") as caught:
        await pulled()
    assert caught.value.retry_after == 3600


async def test_a_hub_that_is_not_there(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubUnavailableError, match=r"127\.0\.0\.1:9 cannot be reached: "):
        await pulled()


# -- cancelled, killed, and continued


async def test_a_cancelled_download_goes_on_where_it_ended(hub: Hub, cache: Path) -> None:
    hub.hold_after = 2**20 + 1000
    with trio.CancelScope() as scope:
        await pulled(on_progress=lambda progress: scope.cancel() if progress.done else None)
    assert scope.cancelled_caught
    (part,) = leftovers(cache)
    assert 0 < part.stat().st_size < len(MODEL)
    assert cached_models() == []
    assert not list(cache.glob("models--*/snapshots/*/*"))
    assert not list(cache.glob("models--*/refs/*"))
    n_kept = part.stat().st_size
    hub.hold_after = None
    hub.go_on.set()
    assert (await pulled()).files[0].read_bytes() == MODEL
    assert starts(hub)[-1] == n_kept


async def test_a_model_of_which_one_part_came_is_no_model(hub: Hub, cache: Path) -> None:
    def stop(progress: DownloadProgress) -> None:
        if progress.all_done > progress.total:  # the second part comes
            scope.cancel()

    with trio.CancelScope() as scope:
        await pulled("bf16", on_progress=stop)
    assert scope.cancelled_caught
    assert [path for path in cache.glob("models--*/blobs/*") if not path.suffix] != []
    assert cached_models() == []
    assert not list(cache.glob("models--*/snapshots/*/*"))


async def test_what_was_kept_is_hashed_again(hub: Hub, cache: Path) -> None:
    blobs = cache / "models--user--some-model-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{sha256(MODEL)}.incomplete").write_bytes(b"x" * 1000)
    assert (await pulled()).files[0].read_bytes() == MODEL
    assert starts(hub) == [1000, 0]


@pytest.mark.parametrize("extra", [0, 7])
async def test_what_was_kept_may_be_all_or_more(hub: Hub, cache: Path, extra: int) -> None:
    blobs = cache / "models--user--some-model-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{sha256(MODEL)}.incomplete").write_bytes(MODEL + b"x" * extra)
    assert (await pulled()).files[0].read_bytes() == MODEL
    assert len(hub.downloads()) == (1 if extra else 0)


async def test_a_blob_that_was_cut_short_is_replaced(hub: Hub) -> None:
    model = await pulled()
    model.files[0].resolve().write_bytes(MODEL[:1000])
    assert (await pulled()).files[0].read_bytes() == MODEL


# -- the same file for several


@pytest.mark.system
async def test_two_who_want_the_same_model_download_it_once(hub: Hub) -> None:
    hub.hold_after = 2**20 + 1000
    got: list[HubModel] = []
    waiting: list[DownloadProgress] = []

    async def one(on_progress: object) -> None:
        got.append(await pulled(on_progress=on_progress))

    def release(progress: DownloadProgress) -> None:
        waiting.append(progress)
        hub.go_on.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one, lambda progress: None)
        await trio.to_thread.run_sync(hub.holding.wait, 10)
        nursery.start_soon(one, release)
    assert got[0] == got[1]
    assert len(hub.downloads()) == 1
    assert waiting[-1].done == len(MODEL)


@pytest.mark.system
async def test_whoever_waits_takes_over_from_one_who_gives_up(hub: Hub) -> None:
    hub.hold_after = 2**20 + 1000
    scope = trio.CancelScope()

    async def first() -> None:
        with scope:
            await pulled()

    async def second() -> None:
        model = await pulled(on_progress=lambda progress: scope.cancel())
        assert model.files[0].read_bytes() == MODEL

    async with trio.open_nursery() as nursery:
        nursery.start_soon(first)
        await trio.to_thread.run_sync(hub.holding.wait, 10)
        hub.hold_after = None
        nursery.start_soon(second)
    assert scope.cancelled_caught


# -- contents that are wrong, and disks that are full


async def test_a_flipped_byte_is_noticed_and_nothing_is_kept(hub: Hub, cache: Path) -> None:
    hub.n_wrong = 1
    with pytest.raises(HashMismatchError, match="arrived damaged: its hash is "):
        await pulled()
    assert cached_models() == []
    assert [path.stat().st_size for path in leftovers(cache)] == [0]
    assert (await pulled()).files[0].read_bytes() == MODEL


async def test_more_than_the_file_has_is_noticed(hub: Hub) -> None:
    hub.excess = b"more"
    with pytest.raises(HashMismatchError, match="is larger than the hub says"):
        await pulled()
    assert cached_models() == []


async def test_a_disk_without_room_is_refused_before_the_first_byte(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    with pytest.raises(DiskFullError, match=r"needs 3\.0 MiB more on the disk of .*blobs, which"):
        await pulled()
    assert hub.downloads() == []


async def test_a_cache_that_cannot_be_written(hub: Hub, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("this is a file")
    with pytest.raises(HubError, match="cannot be written: Not a directory"):
        await pulled()


# -- names that are wrong, and models that are not for everyone


async def test_an_unknown_repository(hub: Hub) -> None:
    reference = HubReference("user/nothing")
    with pytest.raises(HubNotFoundError, match="has no user/nothing, or it is private and needs"):
        await pull(reference)
    with pytest.raises(HubNotFoundError, match=r"has no user/nothing\.$"):
        await pull(reference, token="hf_x")


async def test_a_gated_model(hub: Hub) -> None:
    hub.gated[REPO] = "hf_secret"
    page = f"{hub.url}/{REPO}"
    with pytest.raises(GatedModelError, match=f"accept its terms at {page}; then give a token"):
        await pulled()
    with pytest.raises(GatedModelError, match="your token has no access"):
        await pulled(token="hf_other")
    assert (await pulled(token="hf_secret")).size == len(MODEL)


async def test_the_token_stays_with_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated[REPO] = "hf_secret"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    await pulled()
    sent = {one.host: one.headers.get("Authorization") for one in hub.asked}
    assert sent == {"hub": "Bearer hf_secret", "cdn": None}


async def test_what_does_not_answer_as_a_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.failures = [(200, {})]
    with pytest.raises(HubError, match="does not answer as the hub does; look at HF_ENDPOINT"):
        await pulled()
    hub.failures = [(418, {})]
    with pytest.raises(HubError, match="answers with status 418"):
        await pulled()
    for endpoint in ("ftp://x", "nonsense", "http://[x"):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        with pytest.raises(HubError, match="is not an address that begins with http"):
            await pulled()


async def test_paths_that_lead_out_of_the_cache_are_left_out(hub: Hub, cache: Path) -> None:
    hub.add(REPO, {"../../evil-Q4_K_M.gguf": MODEL, "/tmp/evil-Q4_K_M.gguf": MODEL})
    with pytest.raises(HubNotFoundError, match="has no GGUF files that are models"):
        await pulled()


async def test_small_files_have_the_hash_of_git(hub: Hub) -> None:
    hub.add(REPO, {"tiny-Q8_0.gguf": b"tiny"})
    assert (await pulled()).files[0].read_bytes() == b"tiny"
