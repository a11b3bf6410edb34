"""Tests of the encoders: what comes out is decoded again, and compared."""

import wave
from io import BytesIO

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.encoded_sound import sound_in
from trioserve.media.encode import (
    CONTENT_TYPES,
    RATE,
    SOUND_FORMATS,
    SoundEncoder,
    SoundFormat,
    Tempo,
    with_lengths,
)

#: Seconds that an encoder may add: its frames have one length, and some begin with silence.
_ADDED = {"mp3": 0.11, "aac": 0.11, "opus": 0.03}

#: The correlation with the original that is lost at most.
_LOST = {"mp3": 0.02, "aac": 0.02, "opus": 0.02}


def tones(seconds: float, rate: int = RATE, hz: float = 440.0) -> NDArray[np.float32]:
    times = np.arange(int(seconds * rate)) / rate
    loudness = 0.3 + 0.2 * np.sin(2 * np.pi * 3 * times)
    return (loudness * np.sin(2 * np.pi * hz * times)).astype(np.float32)


def encode(
    format: SoundFormat,
    samples: NDArray[np.float32],
    *,
    step: int,
    rate: int = RATE,
) -> list[bytes]:
    encoder = SoundEncoder(format, rate)
    pieces = [encoder.feed(samples[i : i + step]) for i in range(0, len(samples), step)]
    return [*pieces, encoder.finish()]


def likeness(made: NDArray[np.float32], given: NDArray[np.float32]) -> float:
    """The largest normalized correlation at any delay of up to 0.12 s."""
    best = 0.0
    for delay in range(int(0.12 * RATE)):
        n = min(len(made) - delay, len(given))
        a, b = made[delay : delay + n], given[:n]
        best = max(best, float(a @ b / np.sqrt((a @ a) * (b @ b) + 1e-12)))
    return best


@pytest.mark.parametrize("format", SOUND_FORMATS)
@pytest.mark.parametrize("step", [997, 1920, 48000])
def test_what_is_encoded_is_what_was_given(format: SoundFormat, step: int) -> None:
    given = tones(1.5)
    made = sound_in(b"".join(encode(format, given, step=step)), format)
    assert 0 <= len(made) - len(given) <= _ADDED.get(format, 0) * RATE
    assert likeness(made, given) > 0.999 - _LOST.get(format, 0)


@pytest.mark.parametrize("format", SOUND_FORMATS)
def test_bytes_come_while_there_is_more_to_encode(format: SoundFormat) -> None:
    pieces = encode(format, tones(2.0), step=1920)
    n_before_half = sum(map(len, pieces[: len(pieces) // 2]))
    assert n_before_half > 0.4 * sum(map(len, pieces))
    assert any(pieces[:3])  # a quarter of a second


@pytest.mark.parametrize("speed", [0.25, 0.5, 0.8, 1.3, 2.0, 4.0])
def test_speed_changes_the_length_and_not_the_pitch(speed: float) -> None:
    tempo, given = Tempo(RATE, speed), tones(3.0)
    parts = [tempo.feed(given[i : i + 1920]) for i in range(0, len(given), 1920)]
    made = np.concatenate([*parts, tempo.finish()])
    assert made.dtype == np.float32
    assert sum(map(len, parts[: len(parts) // 2])) > 0.3 * len(made)  # it comes meanwhile
    assert len(made) / RATE == pytest.approx(3.0 / speed, abs=0.1)
    middle = made[len(made) // 4 : -len(made) // 4]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    loudest = np.argmax(spectrum) * RATE / len(middle)
    assert loudest == pytest.approx(440, abs=8)


def test_nothing_has_a_speed_too() -> None:
    tempo = Tempo(RATE, 2.0)
    assert len(tempo.feed(tones(0.0))) == len(tempo.finish()) == 0


@pytest.mark.parametrize("rate", [16000, 48000])
def test_other_rates_become_the_one_of_all(rate: int) -> None:
    made = sound_in(b"".join(encode("pcm", tones(1.0, rate), step=1000, rate=rate)), "pcm")
    assert len(made) == pytest.approx(RATE, abs=64)
    assert likeness(made, tones(1.0)) > 0.99


def test_what_is_too_loud_is_cut_off() -> None:
    made = sound_in(b"".join(encode("pcm", 3 * tones(0.2), step=480)), "pcm")
    assert made.max() > 0.99 and made.min() < -0.99  # no sample has the wrong sign
    assert np.all(np.sign(made[50:60]) == np.sign(tones(0.2)[50:60]))


@pytest.mark.parametrize("format", SOUND_FORMATS)
def test_nothing_is_a_file_too(format: SoundFormat) -> None:
    data = b"".join(encode(format, tones(0.0), step=1))
    if format in ("wav", "flac", "opus"):
        assert data  # a header


def test_a_stream_of_wav_is_read_by_others() -> None:
    data = b"".join(encode("wav", tones(0.5), step=480))
    with wave.open(BytesIO(data)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, RATE)
        assert len(file.readframes(RATE)) == 2 * RATE // 2


def test_a_whole_wav_tells_its_length() -> None:
    data = b"".join(encode("wav", tones(0.5), step=480))
    whole = with_lengths(data[:64], len(data)) + data[64:]
    assert len(whole) == len(data)
    with wave.open(BytesIO(whole)) as file:
        assert file.getnframes() == RATE // 2
    for head in (whole, data[:20], b"ID3", b""):  # it has one, or is cut, or another format
        assert with_lengths(head, len(data)) == head


def test_an_encoder_can_be_left_in_the_middle() -> None:
    for format in SOUND_FORMATS:
        encoder = SoundEncoder(format, RATE)
        encoder.feed(tones(0.3))
        encoder.close()
        encoder.close()


def test_each_format_has_a_type() -> None:
    assert all(each.startswith("audio/") for each in CONTENT_TYPES.values())
