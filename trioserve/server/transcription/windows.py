"""Cuts a recording into windows, in pauses where there are any."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from trioserve.types import DecodedAudio, content_id

_Floats = NDArray[np.float32]

#: Seconds of the frames whose loudness is compared.
_FRAME = 0.02

#: A pause is looked for by the loudness of so many frames together.
_PAUSE = 11

#: What is never louder than this (-60 dB of full scale, root of the mean of squares) is silence.
_SILENCE = 1e-3

#: A frame counts as part of a pause if it is quieter than this share of the loud ones.
_QUIET = 0.05

#: A window has at least this share of the longest length.
_SHORTEST = 0.6


@attrs.frozen
class Window:
    """A part of a recording: samples, and the seconds from the first sound in it to the last."""

    first: int  # samples
    stop: int
    start: float
    end: float

    def cut_from(self, audio: DecodedAudio) -> DecodedAudio:
        """Make a recording of its samples. It takes some milliseconds."""
        samples = audio.samples[4 * self.first : 4 * self.stop]
        return DecodedAudio(
            rate=audio.rate,
            samples=samples,
            id=content_id(b"sound %d" % audio.rate, samples),
        )


def windows_of(audio: DecodedAudio, longest: float) -> list[Window]:
    """Cut a recording into windows of at most `longest` seconds, where it is quietest.

    Windows without any sound are left out: models make up words for them. It takes some tens of
    milliseconds for an hour.
    """
    samples = np.frombuffer(audio.samples, np.float32)
    size = max(1, round(audio.rate * _FRAME))
    loudness = _loudness(samples, size)
    most = max(1, int(longest * audio.rate) // size)
    floor = max(_SILENCE, _QUIET * float(np.quantile(loudness, 0.95)))
    windows = []
    for first, stop in _cut(loudness, most):
        if (heard := np.flatnonzero(loudness[first:stop] >= _SILENCE)).size == 0:
            continue
        loud = np.flatnonzero(loudness[first:stop] >= floor)
        within = loud if loud.size else heard
        windows.append(
            Window(
                first * size,
                min(stop * size, len(samples)),
                (first + int(within[0])) * size / audio.rate,
                min((first + int(within[-1]) + 1) * size, len(samples)) / audio.rate,
            )
        )
    return windows


def _loudness(samples: _Floats, size: int) -> _Floats:
    """The loudness of each frame of so many samples; the last one may be shorter."""
    n_whole = len(samples) // size
    whole = samples[: n_whole * size].reshape(n_whole, size)
    squares = np.einsum("ij,ij->i", whole, whole) / size
    if len(rest := samples[n_whole * size :]):
        squares = np.append(squares, np.dot(rest, rest) / len(rest))
    loudness: _Floats = np.sqrt(squares)
    return loudness


def _cut(loudness: _Floats, most: int) -> Sequence[tuple[int, int]]:
    """Ranges of at most `most` frames that together are all, cut in the quietest places."""
    around = np.convolve(loudness, np.full(_PAUSE, 1 / _PAUSE, np.float32), mode="same")
    ranges, first = [], 0
    while len(loudness) - first > most:
        shortest = first + max(1, int(most * _SHORTEST))
        choice = around[shortest : first + most + 1]
        stop = shortest + len(choice) - 1 - int(np.argmin(choice[::-1]))  # the last one of equals
        ranges.append((first, stop))
        first = stop
    return [*ranges, (first, len(loudness))]
