"""Images, sound and video are decoded under limits."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.support.media_files import (
    RED,
    av_file,
    encode,
    float_wav,
    image_file,
    video_file,
    wav_file,
)
from trioserve.errors import InvalidMediaError
from trioserve.media import decode
from trioserve.media.decode import decode_image, decode_sound, rows as pixel_rows
from trioserve.media.orders import MediaLimits, sniff

LIMITS = MediaLimits()


def pixels(
    data: bytes, limits: MediaLimits = LIMITS, *, on_white: bool = False
) -> NDArray[np.uint8]:
    """The pixels of a file: height, width, RGB."""
    image = decode_image(data, sniff(data).name, limits)
    rows = b"".join(pixel_rows(image, on_white=on_white))
    return np.frombuffer(rows, np.uint8).reshape(image.height, image.width, 3)


def drawing() -> Image.Image:
    """An image of several bands, in which neighbors differ a little."""
    rows, columns = np.mgrid[0:1000, 0:300]
    colors = np.stack([rows // 4, columns * 5 // 6, (rows + columns) // 8], 2)
    return Image.fromarray(colors.astype(np.uint8))


@pytest.mark.parametrize("format", ["PNG", "BMP", "WEBP"])
def test_every_pixel_has_its_place(format: str) -> None:
    image = drawing()
    options = {"lossless": True} if format == "WEBP" else {}
    assert (pixels(encode(image, format, **options)) == np.asarray(image)).all()


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
def test_a_jpeg_is_read(options: dict[str, int]) -> None:
    image = drawing()
    found = pixels(encode(image, "JPEG", quality=95, **options)).astype(int)
    assert np.abs(found - np.asarray(image)).max() < 16


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    if mode == "I;16":
        image = Image.new("I;16", (2, 2), 0xC0FF)
        expected = np.full((2, 2, 3), 0xC0)
    else:
        image = Image.new("RGB", (2, 2), (192, 192, 192)).convert(mode)
        expected = np.asarray(image.convert("RGB")).astype(int)
    data = encode(image, "JPEG" if mode == "CMYK" else "PNG")
    assert np.abs(pixels(data) - expected).max() <= 2


GRAY = (128, 128, 128)


def hidden(mode: str) -> tuple[Image.Image, dict[str, Any]]:
    """An image of a mode that hides gray, and what its file says of that."""
    image = Image.new("RGBA", (2, 2), (*GRAY, 0))
    if mode in ("RGBA", "LA"):
        return image.convert(mode), {}
    if mode == "P":
        return Image.new("RGB", (2, 2), GRAY).quantize(4), {"transparency": 0}
    return Image.new(mode, (2, 2), GRAY[: len(mode)]), {
        "transparency": GRAY if mode == "RGB" else GRAY[0]
    }


@pytest.mark.parametrize(
    ("mode", "format"),
    [
        ("RGBA", "PNG"),
        ("RGBA", "WEBP"),
        ("LA", "PNG"),
        ("P", "PNG"),
        ("P", "GIF"),
        ("RGB", "PNG"),
        ("L", "PNG"),
    ],
)
def test_transparent_parts_are_white_or_the_colors_that_they_hide(mode: str, format: str) -> None:
    image, options = hidden(mode)
    options |= {"lossless": True, "exact": True} if format == "WEBP" else {}
    data = encode(image, format, **options)
    assert (pixels(data, on_white=True) == 255).all()
    assert np.abs(pixels(data) - GRAY).max() <= 2


def test_half_of_a_color_on_white() -> None:
    image = Image.new("RGBA", (2, 2), (0, 100, 255, 51))
    assert (pixels(encode(image), on_white=True) == (204, 224, 255)).all()
    opaque = encode(Image.new("RGB", (2, 2), RED))
    assert (pixels(opaque, on_white=True) == RED).all()


@pytest.mark.parametrize("orientation", range(10))
def test_an_image_is_turned_as_its_exif_data_say(orientation: int) -> None:
    image = Image.new("RGB", (4, 2))
    image.putpixel((0, 0), RED)
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = pixels(encode(image, "PNG", exif=exif))
    where = tuple(int(place) for place in np.argwhere(found[:, :, 0])[0])
    places = {2: (0, 3), 3: (1, 3), 4: (1, 0), 5: (0, 0), 6: (0, 1), 7: (3, 1), 8: (3, 0)}
    assert where == places.get(orientation, (0, 0))
    assert found.shape[:2] == ((4, 2) if orientation in (5, 6, 7, 8) else (2, 4))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("exif", [b"MM\0*\xff\xff\xff\xff\0", b"XX\0*\0\0\0\x08", b"MM"])
def test_exif_data_that_make_no_sense_turn_nothing(exif: bytes) -> None:
    data = encode(Image.new("RGB", (4, 2), RED), "JPEG", exif=b"Exif\0\0" + exif)
    assert pixels(data).shape == (2, 4, 3)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_image_is_taken(format: str) -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in (RED, (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if format == "WEBP" else {}
    data = encode(frames[0], format, save_all=True, append_images=frames[1:], **options)
    assert (pixels(data) == RED).all()


def png_header(width: int, height: int) -> bytes:
    """A PNG that promises much and has little of it."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = b""
    for name, body in ((b"IHDR", head), (b"IDAT", zlib.compress(bytes(1000)))):
        chunk = name + body
        chunks += struct.pack(">I", len(body)) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return b"\x89PNG\r\n\x1a\n" + chunks


@pytest.mark.parametrize("size", [(50_000, 50_000), (2**31 - 1, 1), (8193, 8192)])
def test_an_image_that_is_too_large_is_refused_by_its_header(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidMediaError, match=f"has {size[0]} x {size[1]} pixels"):
        pixels(png_header(*size))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "BMP", "WEBP"])
def test_half_of_an_image_is_none(format: str) -> None:
    data = encode(drawing(), format)
    with pytest.raises(Exception, match=r"truncated|broken|decod|identify|incomplete"):
        pixels(data[: len(data) // 2])


@pytest.mark.parametrize("format", ["TIFF", "ICO", "PPM", "TGA", "PDF", "EPS", "ICNS", "JPEG2000"])
def test_other_formats_are_not_taken(format: str) -> None:
    with pytest.raises(InvalidMediaError, match="none of the files that are taken: PNG, JPEG"):
        pixels(image_file(format, size=(16, 16)))


@pytest.mark.parametrize("text", [b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.7", b"x"])
def test_neither_is_text(text: bytes) -> None:
    with pytest.raises(InvalidMediaError, match="none of the files"):
        sniff(text)


def test_a_file_is_what_it_begins_as() -> None:
    gif_named_png = b"\x89PNG\r\n\x1a\n" + image_file("GIF")
    with pytest.raises(Exception, match=r"broken|identify|cannot"):
        pixels(gif_named_png)


def samples(data: bytes, rate: int = 16_000, limits: MediaLimits = LIMITS) -> NDArray[np.float32]:
    pieces = decode_sound(data, sniff(data).name, rate, limits)
    return np.frombuffer(b"".join(pieces), np.float32)


def loudest_frequency(found: NDArray[np.float32], rate: int) -> float:
    spectrum = np.abs(np.fft.rfft(found))
    return float(spectrum.argmax()) * rate / len(found)


@pytest.mark.parametrize(
    ("format", "codec"),
    [("mp3", "mp3"), ("flac", "flac"), ("ogg", "libopus"), ("adts", "aac"),
     ("mp4", "aac"), ("ipod", "alac"), ("webm", "libopus"), ("wav", "pcm_f32le"),
     ("wav", "pcm_s24le"), ("wav", "pcm_mulaw"), ("wav", "adpcm_ms")],
)  # fmt: skip
def test_each_format_is_read(format: str, codec: str) -> None:
    found = samples(av_file(format, codec))
    assert len(found) == pytest.approx(16_000, rel=0.08)
    assert loudest_frequency(found, 16_000) == pytest.approx(440, abs=3)


def test_labels_need_not_be_utf_8() -> None:
    plain = wav_file(0.5)
    label = b"INFOINAM" + struct.pack("<I", 4) + b"caf\xe9"
    labelled = plain[:12] + b"LIST" + struct.pack("<I", len(label)) + label + plain[12:]
    assert (samples(labelled) == samples(plain)).all()


@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000, 44_100, 48_000])
def test_the_rate_is_the_one_that_is_wanted(rate: int) -> None:
    for file_rate in (8_000, 22_050, 44_100):
        found = samples(wav_file(0.5, file_rate), rate)
        assert len(found) == pytest.approx(0.5 * rate, abs=2 + rate // 1000)
        assert loudest_frequency(found, rate) == pytest.approx(440, abs=3)


def test_what_is_at_that_rate_stays_as_it_is() -> None:
    values = np.linspace(-1, 1, 1000, dtype=np.float32)
    assert (samples(float_wav(values)) == values).all()


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_channels_are_averaged(channels: int) -> None:
    found = samples(wav_file(0.5, 16_000, channels))
    assert found.max() == pytest.approx(0.5 / channels, abs=0.01)


def test_what_is_higher_than_the_rate_can_hold_is_filtered_out() -> None:
    times = np.arange(48_000) / 48_000
    found = samples(float_wav(np.sin(2 * np.pi * 15_000 * times), 48_000))
    assert np.abs(found[1000:-1000]).max() < 0.01  # and would be 1 if it had become 1,000 Hz


def test_a_header_that_lies_about_the_length_changes_nothing() -> None:
    data = wav_file(0.5, 16_000, 1)
    for size in (0, 10, 2**31, 2**32 - 1):
        lying = (
            data[:4] + struct.pack("<I", size) + data[8:40] + struct.pack("<I", size) + data[44:]
        )
        if size in (0, 10):
            assert len(samples(lying)) <= 8000
        else:
            assert len(samples(lying)) == 8000


def test_what_is_too_long_is_refused_as_it_comes() -> None:
    with pytest.raises(InvalidMediaError, match=r"is longer than 0.25 seconds"):
        samples(wav_file(0.5), limits=MediaLimits(max_seconds=0.25))


def test_files_that_were_joined_are_heard_one_after_the_other() -> None:
    parts = [av_file("mp3", "mp3", rate=rate) for rate in (48_000, 32_000, 48_000)]
    found = samples(b"".join(parts))
    assert len(found) == pytest.approx(3 * 16_000, rel=0.15)
    assert loudest_frequency(found, 16_000) == pytest.approx(440, abs=3)


@pytest.mark.parametrize("format", ["mp3", "flac", "ogg", "adts", "webm"])
def test_a_recording_that_was_cut_off_is_heard_as_far_as_it_goes(format: str) -> None:
    codec = {"ogg": "libopus", "adts": "aac", "webm": "libopus"}.get(format, format)
    data = av_file(format, codec, seconds=2)
    assert len(samples(data[: len(data) // 2])) == pytest.approx(16_000, rel=0.4)


def test_pictures_have_no_sound() -> None:
    with pytest.raises(InvalidMediaError, match="has no sound"):
        samples(av_file("mp4", None, "libx264"))


def test_a_decoder_that_is_not_named_is_not_used() -> None:
    with pytest.raises(InvalidMediaError, match="adpcm_yamaha, which is not taken"):
        samples(av_file("wav", "adpcm_yamaha"))


@pytest.mark.parametrize("text", [b"RIFF\0\0\0\0WAVE", b"OggS", b"fLaC", b"ID3", b"\xff\xfb" * 500])
def test_a_beginning_is_no_file(text: bytes) -> None:
    with pytest.raises(Exception, match=r"."):
        assert len(samples(text)) == 0
        raise InvalidMediaError("has nothing in it")


def frames(
    data: bytes, fps: float = 4.0, limits: MediaLimits = LIMITS
) -> list[tuple[float, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]]:
    found = decode.decode_video(data, sniff(data).name, fps, limits)
    return [(at, np.asarray(image)) for at, image in found]


@pytest.fixture(scope="module")
def mp4() -> bytes:
    """Two seconds of 24 frames, of 64 x 48, in which red rises from 0 to 255."""
    return av_file("mp4", "aac", "libx264", seconds=2)


def test_frames_are_taken_at_a_rate(mp4: bytes) -> None:
    found = frames(mp4)
    assert [at for at, _ in found] == [i / 4 for i in range(len(found))]
    assert len(found) in (8, 9)
    for at, frame in found:
        assert frame.shape == (48, 64, 3)
        assert frame[:, :, 0].mean() == pytest.approx(127.5 * min(at, 23 / 12), abs=12)


@pytest.mark.parametrize(("fps", "count"), [(1, (2, 3)), (12, (24, 25)), (48, (95, 96))])
def test_the_rate_may_be_any(mp4: bytes, fps: float, count: tuple[int, ...]) -> None:
    found = frames(mp4, fps)
    assert len(found) in count
    assert [at for at, _ in found] == [i / fps for i in range(len(found))]


def test_all_frames_are_taken_at_rate_0(mp4: bytes) -> None:
    found = frames(mp4, 0)
    assert len(found) == 48
    assert [at for at, _ in found] == pytest.approx([i / 24 for i in range(48)], abs=0.001)


@pytest.mark.parametrize(("format", "codec"), [("webm", "libvpx-vp9"), ("webm", "libvpx")])
def test_webm_is_read(format: str, codec: str) -> None:
    assert len(frames(av_file(format, None, codec))) in (4, 5)


def test_large_frames_are_made_smaller(mp4: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_MAX_FRAME_PIXELS", 32 * 24)
    assert frames(mp4)[0][1].shape == (24, 32, 3)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (MediaLimits(max_frames=7), "has more than 7 frames, at 4 a second"),
        (MediaLimits(max_seconds=1), "is longer than 1 seconds"),
        (MediaLimits(max_pixels=64 * 48 - 1), "has frames of 64 x 48 pixels"),
    ],
)
def test_limits_hold(mp4: bytes, limits: MediaLimits, message: str) -> None:
    with pytest.raises(InvalidMediaError, match=message):
        frames(mp4, limits=limits)


def test_a_video_is_turned_as_it_says() -> None:
    """Phones turn a video by the matrix in the head of its track, here clockwise."""
    straight = struct.pack(">9i", 2**16, 0, 0, 0, 2**16, 0, 0, 0, 2**30)
    turned = struct.pack(">9i", 0, 2**16, 0, -(2**16), 0, 0, 0, 0, 2**30)
    image = Image.new("RGB", (64, 48))
    image.paste((255, 0, 0), (0, 0, 32, 48))  # its left half is red
    data = video_file([image] * 24)
    movie, track, rest = data.split(straight)
    (_, frame), *_ = frames(movie + straight + track + turned + rest)
    assert frame.shape == (64, 48, 3)
    assert frame[:28, :, 0].min() > 200 and frame[36:, :, 0].max() < 50


def test_sound_has_no_video() -> None:
    with pytest.raises(InvalidMediaError, match="has no video"):
        frames(av_file("mp4", "aac"))
