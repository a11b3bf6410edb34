"""Loading the media of requests: read, decoded in a process, refused by name."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from tests.support.media_files import RED, av_file, image_file, wav_file
from trioserve.config import Config
from trioserve.errors import InvalidMediaError, NotSupportedError, PayloadTooLargeError
from trioserve.media.orders import MediaLimits
from trioserve.server.limits.memory import MemoryBudget
from trioserve.server.media import loader as media
from trioserve.server.media.loader import MediaLoader, Wanted, size_of
from trioserve.server.prompts.media import check_kinds
from trioserve.types import (
    DecodedAudio,
    DecodedImage,
    DecodedVideo,
    MediaKind,
    MediaSource,
    Modalities,
)

pytestmark = pytest.mark.system

ALL = Wanted(kinds=frozenset({"image", "audio", "video"}))


@pytest.fixture
async def loader() -> AsyncIterator[MediaLoader]:
    loader = MediaLoader(MediaLimits())
    yield loader
    await loader.aclose()


@pytest.fixture
def budget() -> MemoryBudget:
    return MemoryBudget(2**28)


async def test_each_file_becomes_what_is_in_it(loader: MediaLoader, budget: MemoryBudget) -> None:
    sources = [
        MediaSource(data=image_file(size=(8, 4))),
        MediaSource(data=wav_file(0.5)),
        MediaSource(data=av_file("mp4", "aac", "libx264")),
    ]
    with budget.hold() as hold:
        image, sound, video = await loader.load(sources, ALL, hold)
        assert isinstance(image, DecodedImage) and isinstance(sound, DecodedAudio)
        assert isinstance(video, DecodedVideo)
        assert (image.width, image.height, image.pixels) == (8, 4, bytes(RED) * 32)
        assert (sound.rate, sound.seconds) == (16_000, pytest.approx(0.5, abs=0.01))
        assert np.frombuffer(sound.samples, np.float32).max() == pytest.approx(0.25, abs=0.01)
        assert [at for at, _ in video.frames] == [0.0, 0.25, 0.5, 0.75, 1.0][: len(video.frames)]
        assert hold.n_bytes == size_of(image) + size_of(sound) + size_of(video)
    assert budget.n_held == 0


@pytest.mark.parametrize(
    ("background", "shown"), [("white", b"\xff" * 3), ("none", bytes((10, 20, 30)))]
)
async def test_what_is_below_a_transparent_image(
    budget: MemoryBudget, background: str, shown: bytes
) -> None:
    file = BytesIO()
    Image.new("RGBA", (2, 2), (10, 20, 30, 0)).save(file, "PNG")
    loader = MediaLoader.of(Config(media_background=background))
    with budget.hold() as hold:
        (image,) = await loader.load([MediaSource(data=file.getvalue())], ALL, hold)
    await loader.aclose()
    assert isinstance(image, DecodedImage) and image.pixels == shown * 4


async def test_without_the_extra_an_image_is_not_supported(
    loader: MediaLoader, budget: MemoryBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "has_extra", lambda name: False)
    decoded = DecodedImage(width=1, height=1, pixels=b"123", id="a")
    with budget.hold() as hold:
        assert await loader.load([MediaSource(decoded=decoded)], ALL, hold) == [decoded]
        with pytest.raises(NotSupportedError, match=r"install trioserve\[media\]") as info:
            await loader.load([MediaSource(data=image_file(), param="p")], ALL, hold)
    assert info.value.param == "p"
    # The same holds where the model of a router has no projector for that reason.
    with pytest.raises(NotSupportedError, match=r"install trioserve\[media\]") as info:
        check_kinds(Modalities(), [MediaSource(data=b"", param="q")])
    assert info.value.param == "q"


async def test_a_photo_is_turned_as_its_exif_data_say(
    loader: MediaLoader, budget: MemoryBudget
) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    exif[ExifTags.Base.XResolution] = 72.0
    files = [image_file(name, size=(8, 4), exif=exif) for name in ("JPEG", "PNG", "WEBP")]
    with budget.hold() as hold:
        images = await loader.load([MediaSource(data=one) for one in files], ALL, hold)
    for image in images:
        assert isinstance(image, DecodedImage) and (image.width, image.height) == (4, 8)


async def test_equal_content_has_equal_ids(loader: MediaLoader, budget: MemoryBudget) -> None:
    files = [image_file("PNG"), image_file("BMP"), image_file("PNG", size=(4, 8))]
    with budget.hold() as hold:
        png, bmp, other = await loader.load([MediaSource(data=one) for one in files], ALL, hold)
    assert png.id == bmp.id != other.id


async def test_a_refusal_names_the_field(loader: MediaLoader, budget: MemoryBudget) -> None:
    good = MediaSource(data=image_file())
    bad = MediaSource(data=b"nothing", kind="image", param="messages[0].content[1].image_url")
    with budget.hold() as hold, pytest.raises(InvalidMediaError) as caught:
        await loader.load([good, bad], ALL, hold)
    assert (caught.value.index, caught.value.param) == (1, bad.param)
    assert "The image in 'messages[0].content[1].image_url' is none of" in caught.value.message


async def test_files_are_read_below_the_folder_only(tmp_path: Path, budget: MemoryBudget) -> None:
    folder = tmp_path / "media"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a b.png").write_bytes(image_file())
    (tmp_path / "secret.png").write_bytes(image_file())
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "dangling.png").symlink_to(tmp_path / "nothing.png")
    loader = MediaLoader(MediaLimits(), media_path=folder)
    outside = ("../secret.png", "../nothing.png", "link.png", "dangling.png")
    outside += ("%2e%2e/secret.png", "/../secret.png")
    with budget.hold() as hold:
        absolute = (folder / "sub" / "a b.png").as_uri()
        for url in ("file://sub/a%20b.png", absolute, "file:////sub//a%20b.png"):
            assert await loader.load([MediaSource(url=url)], ALL, hold)
        for name in outside:  # whether there is a file or not
            with pytest.raises(InvalidMediaError, match="is outside of --media-path"):
                await loader.load([MediaSource(url=f"file://{name}")], ALL, hold)
        for name in ("sub", "none.png", "%00"):
            with pytest.raises(InvalidMediaError):
                await loader.load([MediaSource(url=f"file://{name}")], ALL, hold)
        assert await loader.load([MediaSource(path=str(tmp_path / "secret.png"))], ALL, hold)
    await loader.aclose()


@pytest.mark.parametrize(
    ("kind", "data", "kinds", "reason"),
    [
        ("image", wav_file(0.1), ALL.kinds, "is no image, but a file of the format wav"),
        ("audio", image_file(), ALL.kinds, "is no sound, but a file of the format png"),
        (None, image_file(), {"audio"}, "the format png, and this model takes no images"),
        (None, wav_file(0.1), {"image", "video"}, "the format wav, and this model takes no sound"),
    ],
)
async def test_a_file_is_what_the_request_says_and_the_model_takes(
    kind: MediaKind | None, data: bytes, kinds: set[MediaKind], reason: str, budget: MemoryBudget
) -> None:
    loader = MediaLoader(MediaLimits())
    wanted = Wanted(kinds=frozenset(kinds))
    with budget.hold() as hold, pytest.raises(InvalidMediaError, match=reason):
        await loader.load([MediaSource(data=data, kind=kind)], wanted, hold)


async def test_a_request_may_have_so_many_files(loader: MediaLoader, budget: MemoryBudget) -> None:
    sources = [MediaSource(data=b"", param=f"messages[{index}]") for index in range(101)]
    with budget.hold() as hold, pytest.raises(InvalidMediaError) as caught:
        await loader.load(sources, ALL, hold)
    assert (caught.value.index, caught.value.param) == (100, "messages[100]")


async def test_what_is_decoded_counts_against_the_memory(loader: MediaLoader) -> None:
    budget = MemoryBudget(1000)
    with budget.hold() as hold:
        await loader.load([MediaSource(data=image_file(size=(10, 10)))], ALL, hold)
        with pytest.raises(PayloadTooLargeError):
            await loader.load([MediaSource(data=image_file(size=(20, 20)))], ALL, hold)
    assert budget.n_held == 0


async def test_a_file_that_cannot_be_read_in_time_is_refused(
    tmp_path: Path, budget: MemoryBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    monkeypatch.setattr(media, "_read_file", lambda *_: may_go_on.wait(30) and b"")
    loader = MediaLoader(MediaLimits(timeout=0.05))
    with budget.hold() as hold, pytest.raises(InvalidMediaError, match="cannot be read in time"):
        await loader.load([MediaSource(path=str(tmp_path / "x.png"))], ALL, hold)
    may_go_on.set()
