"""Sound to samples."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.media_files import av_file, float_wav, wav_file
from trioserve.errors import InvalidMediaError
from trioserve.media import sound
from trioserve.media.limits import MediaLimits
from trioserve.media.sniff import sniff

LIMITS = MediaLimits()


def samples(data: bytes, rate: int = 16_000, limits: MediaLimits = LIMITS) -> NDArray[np.float32]:
    pieces = sound.decode(data, sniff(data).name, rate, limits)
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
