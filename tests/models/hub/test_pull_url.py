"""Models at an address: `--model-url`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio

from tests.hub.server import Hub
from tests.support.waiting import patiently
from trioserve.errors import HubError, HubUnavailableError
from trioserve.models.hub import DownloadProgress, pull_url

MODEL = random.Random(0).randbytes(2**20 + 5)
NEWER = random.Random(1).randbytes(2**20 + 5)


def ignore(progress: DownloadProgress) -> None:
    """Report to no one."""


async def pulled(url: str, path: Path | None = None) -> Path:
    with patiently():
        return await pull_url(url, path, token=None, on_progress=ignore)


@pytest.fixture
def address(hub: Hub) -> str:
    hub.add("user/repo", {"m-Q8_0.gguf": MODEL})
    return f"{hub.cdn_url}/user/repo/m-Q8_0.gguf"


async def test_a_model_arrives_in_the_cache_of_llama_cpp(address: str, tmp_path: Path) -> None:
    path = await pulled(f"{address}?download=true")
    assert path == tmp_path / "cache" / "llama.cpp" / "m-Q8_0.gguf"
    assert path.read_bytes() == MODEL
    assert {one.name for one in path.parent.iterdir()} == {"m-Q8_0.gguf", "m-Q8_0.gguf.etag"}


async def test_a_model_arrives_at_a_path(address: str, tmp_path: Path) -> None:
    path = tmp_path / "models" / "mine.gguf"
    assert await pulled(address, path) == path
    assert path.read_bytes() == MODEL


async def test_it_is_downloaded_again_when_it_has_changed(hub: Hub, address: str) -> None:
    path = await pulled(address)
    n_asked = len(hub.downloads())
    await pulled(address)
    assert len(hub.downloads()) == n_asked + 1  # which looks at the ETag, and reads no further
    hub.add("user/repo", {"m-Q8_0.gguf": NEWER})
    assert await pulled(address) == path
    assert path.read_bytes() == NEWER


async def cancelled(hub: Hub, address: str) -> None:
    """Begin a download, and cancel it in the middle."""
    hub.hold_after = 2**20
    with trio.CancelScope() as scope:
        await pull_url(
            address, token=None, on_progress=lambda one: scope.cancel() if one.done else None
        )
    assert scope.cancelled_caught
    hub.hold_after = None
    hub.go_on.set()


async def test_what_is_left_of_this_version_is_continued(hub: Hub, address: str) -> None:
    await cancelled(hub, address)
    assert (await pulled(address)).read_bytes() == MODEL
    assert hub.downloads()[-1].headers["Range"].startswith("bytes=1")


async def test_what_is_left_of_another_version_is_not_continued(hub: Hub, address: str) -> None:
    await cancelled(hub, address)
    hub.add("user/repo", {"m-Q8_0.gguf": NEWER})
    assert (await pulled(address)).read_bytes() == NEWER


async def test_without_an_etag_the_size_tells(hub: Hub, address: str) -> None:
    hub.has_etags = False
    path = await pulled(address)
    n_asked = len(hub.downloads())
    await pulled(address)
    assert len(hub.downloads()) == n_asked + 1
    hub.add("user/repo", {"m-Q8_0.gguf": NEWER + b"!"})
    assert (await pulled(address)) == path
    assert path.read_bytes() == NEWER + b"!"


async def test_without_an_etag_nothing_is_continued(hub: Hub, address: str, tmp_path: Path) -> None:
    hub.has_etags = False
    await cancelled(hub, address)
    assert list((tmp_path / "cache").rglob("*.incomplete")) != []
    hub.add("user/repo", {"m-Q8_0.gguf": NEWER})
    assert (await pulled(address)).read_bytes() == NEWER


@pytest.mark.system
async def test_two_who_want_the_same_file_download_it_once(hub: Hub, address: str) -> None:
    got: list[Path] = []

    async def one() -> None:
        got.append(await pulled(address))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one)
        nursery.start_soon(one)
    assert got[0] == got[1]
    assert got[0].read_bytes() == MODEL
    assert len(hub.downloads()) == 3  # both look at the ETag


async def test_all_parts_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    parts = {f"m-0000{i}-of-00002.gguf": MODEL[:5000] + bytes([i]) for i in (1, 2)}
    hub.add("user/repo", parts)
    path = await pulled(f"{hub.cdn_url}/user/repo/m-00001-of-00002.gguf")
    assert {one.name for one in path.parent.glob("*.gguf")} == set(parts)
    there = await pulled(f"{hub.cdn_url}/user/repo/m-00001-of-00002.gguf", tmp_path / "x.gguf")
    assert there == tmp_path / "m-00001-of-00002.gguf"
    assert {one.name for one in tmp_path.glob("*.gguf")} == set(parts)


async def test_from_the_hub_itself_the_hash_is_checked(hub: Hub, address: str) -> None:
    hub.n_wrong = 2  # the first is only asked for
    with pytest.raises(HubError, match="arrived damaged"):
        await pulled(f"{hub.url}/user/repo/resolve/main/m-Q8_0.gguf")


async def test_without_the_server_what_is_there_is_served(hub: Hub, address: str) -> None:
    path = await pulled(address)
    gone = address.replace(hub.cdn_url, "http://127.0.0.1:9")
    assert await pulled(gone) == path
    path.unlink()
    with pytest.raises(HubUnavailableError, match="cannot be reached"):
        await pulled(gone)


async def test_the_token_of_the_hub_is_not_for_others(
    hub: Hub, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    await pulled(address)
    assert all("Authorization" not in one.headers for one in hub.asked)


async def test_addresses_that_are_wrong(hub: Hub) -> None:
    with pytest.raises(HubError, match="is not the address of a GGUF file"):
        await pulled(f"{hub.cdn_url}/user/repo/README.md")
    with pytest.raises(HubError, match="answers with status 404"):
        await pulled(f"{hub.cdn_url}/user/nothing/m.gguf")
