"""Files that are made to do harm: refused by name, within bounds, and nothing else is lost."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import attrs
import pytest
import trio

from tests.support import media_bombs
from tests.support.loop_probe import probing
from tests.support.media_bombs import BOMBS, GOOD, damage
from tests.support.media_files import float_wav, image_file
from tests.support.waiting import patiently
from trioserve.errors import InvalidMediaError
from trioserve.media import decoders
from trioserve.media.orders import MediaLimits
from trioserve.server.limits.memory import MemoryBudget
from trioserve.server.media.loader import MediaLoader, Wanted
from trioserve.types import DecodedImage, DecodedMedia, MediaSource

pytestmark = pytest.mark.system

ALL = Wanted(kinds=frozenset({"image", "audio", "video"}))
PARAM = "messages[0].content[1].image_url"

#: The number of files of each format to damage, and of files to cut off; in ``make fuzz``, 200.
N_DAMAGED = int(os.environ.get("N_DAMAGED_MEDIA", "6"))


@attrs.define
class Loading:
    """A loader, and the memory that it may hold."""

    loader: MediaLoader
    budget: MemoryBudget

    async def load(self, *files: bytes) -> list[DecodedMedia]:
        with self.budget.hold() as hold:
            sources = [MediaSource(data=data, param=PARAM) for data in files]
            return await self.loader.load(sources, ALL, hold)

    @property
    def pid(self) -> int:
        """The process that waits for the next file."""
        (decoder,) = self.loader._decoders._idle
        assert decoder.pid is not None
        return decoder.pid

    def peak(self) -> int:
        """The most bytes of RAM that it has had."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no peak")


@pytest.fixture
async def loading() -> AsyncIterator[Loading]:
    loading = Loading(MediaLoader(MediaLimits()), MemoryBudget(2**29))
    yield loading
    await loading.loader.aclose()
    assert loading.budget.n_held == 0


async def test_bombs_are_refused_by_name_and_cost_little(loading: Loading) -> None:
    await loading.load(image_file())
    pid, before = loading.pid, loading.peak()
    async with probing() as probe:
        for name, make in BOMBS.items():
            data = make()
            with trio.fail_after(60), pytest.raises(InvalidMediaError) as caught:
                await loading.load(data)
                pytest.fail(name)
            assert caught.value.param == PARAM and PARAM in caught.value.message, name
            assert isinstance((await loading.load(image_file()))[0], DecodedImage), name
    assert loading.pid == pid  # none of them has ended it
    assert loading.peak() - before < 128 * 2**20
    assert probe.held < 1  # most of it for making the files


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
async def test_a_large_image_takes_no_more_memory_than_it_may(loading: Loading) -> None:
    await loading.load(image_file())
    before, data = loading.peak(), media_bombs.large_png()
    async with probing() as probe:
        (image,) = await loading.load(data)
    assert isinstance(image, DecodedImage) and len(image.pixels) == 3 * 5_000 * 5_000
    assert loading.peak() - before < 2 * 5_000 * 5_000 + 2**25  # a byte for each pixel, and some
    assert probe.held < 0.1


async def test_of_ten_thousand_frames_one_is_decoded(loading: Loading) -> None:
    data = media_bombs.long_gif()
    with patiently():
        (image,) = await loading.load(data)
    assert isinstance(image, DecodedImage) and (image.width, image.height) == (500, 500)


async def test_what_only_takes_long_is_ended(
    loading: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoders, "_PATIENCE", 1000.0)  # this machine may be busy
    loading.loader._decoders._limits = MediaLimits(timeout=0.3)
    await loading.load(image_file())
    pid = loading.pid
    with pytest.raises(InvalidMediaError, match=r"takes more than 0.3 seconds to decode"):
        await loading.load(media_bombs.many_scans())
    loading.loader._decoders._limits = MediaLimits()
    await loading.load(image_file())
    assert loading.pid != pid


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
async def test_samples_that_are_no_numbers_are_refused(loading: Loading, value: float) -> None:
    with pytest.raises(InvalidMediaError, match="samples that are no numbers"):
        await loading.load(float_wav([0.5] * 1000 + [value] + [0.5] * 1000))


async def test_samples_that_are_too_loud_are_cut_off(loading: Loading) -> None:
    (sound,) = await loading.load(float_wav([0.5, 7.0, -(2.0**127), 0.25] * 100))
    assert set(memoryview(sound.samples).cast("f")) == {0.5, 1.0, -1.0, 0.25}


async def test_damaged_files_are_decoded_or_refused(loading: Loading) -> None:
    for name, make in GOOD.items():
        good = make()
        step = max(1, len(good) // N_DAMAGED)
        damaged = [damage(good, seed) for seed in range(N_DAMAGED)]
        await loading.load(good)
        pid = loading.pid
        for data in (*damaged, *(good[:length] for length in range(0, len(good), step))):
            with trio.fail_after(40), suppress(InvalidMediaError):
                await loading.load(data)
        await loading.load(good)
        assert loading.pid == pid, f"a damaged {name} has ended the process that decodes"
