"""Windows of a recording: all of it is in them, they are cut in pauses, and silence is left out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from trioserve.server.transcription.model import windows_of
from trioserve.types import DecodedAudio

RATE = 1000


def recording(*parts: tuple[float, float]) -> DecodedAudio:
    """Noise; each part has its seconds and its loudness."""
    random = np.random.default_rng(0)
    samples = np.concatenate(
        [loud * random.uniform(-1, 1, round(seconds * RATE)) for seconds, loud in parts]
    )
    return DecodedAudio(rate=RATE, samples=samples.astype(np.float32).tobytes(), id="any")


def test_a_short_recording_is_one_window() -> None:
    audio = recording((5, 0.5))
    (window,) = windows_of(audio, 30)
    assert (window.first, window.stop) == (0, 5000)
    assert (window.start, window.end) == (0, 5)
    assert window.cut_from(audio).samples == audio.samples


def test_a_long_one_is_cut_in_its_pauses() -> None:
    windows = windows_of(recording((20, 0.5), (1, 0.001), (25, 0.5), (1, 0.001), (10, 0.5)), 30)
    assert [each.first / RATE for each in windows] == pytest.approx([0, 20.5, 46.5], abs=0.45)
    for window, heard in zip(windows, [(0, 20), (21, 46), (47, 57)], strict=True):
        assert (window.start, window.end) == pytest.approx(heard, abs=0.03)


def test_without_pauses_it_is_cut_at_the_longest_length_or_before() -> None:
    windows = windows_of(recording((100, 0.5)), 30)
    assert all(18 <= (each.stop - each.first) / RATE <= 30 for each in windows[:-1])
    assert [each.stop for each in windows[:-1]] == [each.first for each in windows[1:]]


def test_windows_of_silence_are_left_out() -> None:
    assert windows_of(recording((50, 0.0)), 30) == []
    windows = windows_of(recording((10, 0.5), (100, 0.0), (10, 0.5)), 30)
    for window, heard in zip(windows, [(0, 10), (110, 120)], strict=True):
        assert (window.start, window.end) == pytest.approx(heard, abs=0.03)


def test_what_is_cut_out_has_an_identity_of_its_own() -> None:
    audio = recording((40, 0.5), (40, 0.4))
    windows = windows_of(audio, 30)
    assert len({window.cut_from(audio).id for window in windows}) == len(windows) >= 3


@settings(deadline=None, max_examples=50)
@given(
    n=st.integers(1, 200_000),
    longest=st.sampled_from([0.01, 0.5, 10, 30]),
    loud=st.sampled_from([0.01, 1.0]),
)
def test_every_sample_is_in_one_window(n: int, longest: float, loud: float) -> None:
    audio = DecodedAudio(rate=RATE, samples=np.full(n, loud, np.float32).tobytes(), id="any")
    windows = windows_of(audio, longest)
    assert windows[0].first == 0 and windows[-1].stop == n
    assert [each.stop for each in windows[:-1]] == [each.first for each in windows[1:]]
    assert max(each.stop - each.first for each in windows) <= RATE * max(longest, 0.02)
