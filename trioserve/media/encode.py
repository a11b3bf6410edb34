"""Encodes sound that the server has made, piece by piece. What strangers send is not read here.

PyAV is imported with the first encoder, in a worker thread: it takes 0.2 s and some 30 MB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from fractions import Fraction
from importlib import import_module
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import attrs
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from av import AudioFrame
    from av.audio.stream import AudioStream
    from av.container import OutputContainer
    from av.filter import Graph

#: Samples of one channel, from -1 to 1.
Samples: TypeAlias = NDArray[np.float32]

SoundFormat: TypeAlias = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]

#: The sample rate of all that is encoded, in Hz: OpenAI's ``pcm`` has no other.
RATE = 24000

#: The slowest and the fastest speed, as OpenAI has them.
SPEEDS = 0.25, 4.0


@attrs.frozen
class _Form:
    """A format: its type in HTTP, and the names that FFmpeg has for its container and codec."""

    content_type: str
    container: str
    codec: str
    bit_rate: int = 0
    options: Mapping[str, str] = attrs.field(factory=dict)  # of the container
    of_codec: Mapping[str, str] = attrs.field(factory=dict)


#: Speech of one channel needs no more bits than these. What has to be known at the end, such as the
#: length, is not written: the beginning was sent long before.
_FORMS: Mapping[SoundFormat, _Form] = {
    "mp3": _Form("audio/mpeg", "mp3", "libmp3lame", 64_000, {"write_xing": "0"}),
    "opus": _Form("audio/ogg", "ogg", "libopus", 32_000, {"page_duration": "100000"}),
    "aac": _Form("audio/aac", "adts", "aac", 64_000),
    "flac": _Form("audio/flac", "flac", "flac", of_codec={"frame_size": "2400"}),
    "wav": _Form("audio/wav", "wav", "pcm_s16le"),
    "pcm": _Form("audio/pcm", "s16le", "pcm_s16le"),
}

SOUND_FORMATS: tuple[SoundFormat, ...] = tuple(_FORMS)

CONTENT_TYPES: Mapping[SoundFormat, str] = {
    name: form.content_type for name, form in _FORMS.items()
}


class _Written:
    """A file that can only be written, and from which what was written is taken."""

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: bytes) -> int:
        self._data += data
        return len(data)

    def take(self) -> bytes:
        data = bytes(self._data)
        self._data.clear()
        return data


class _Filter:
    """Filters of FFmpeg for the sound of one channel, one after another."""

    def __init__(self, rate: int, *filters: tuple[str, str]) -> None:
        av = import_module("av")
        self._make_frame, self._rate, self._n_read = av.AudioFrame.from_ndarray, rate, 0
        self._pauses = (av.error.BlockingIOError, av.error.EOFError)
        self._graph: Graph = import_module("av.filter").Graph()
        self._graph.threads = 1
        source = self._graph.add_abuffer(
            sample_rate=rate, format="flt", layout="mono", time_base=Fraction(1, rate)
        )
        rest = [self._graph.add(name, value) for name, value in filters]
        self._graph.link_nodes(source, *rest, self._graph.add("abuffersink")).configure()

    def push(self, samples: Samples) -> Iterator[AudioFrame]:
        """Put in samples, of shape (n,), and take out what is ready."""
        if not len(samples):
            return
        frame = self._make_frame(
            np.ascontiguousarray(samples[np.newaxis], np.float32), "flt", "mono"
        )
        frame.sample_rate, frame.pts = self._rate, self._n_read
        self._n_read += len(samples)
        yield from self._through(frame)

    def end(self) -> Iterator[AudioFrame]:
        """Take out the rest."""
        if self._n_read:
            yield from self._through(None)

    def _through(self, frame: AudioFrame | None) -> Iterator[AudioFrame]:
        self._graph.push(frame)
        with suppress(*self._pauses):
            while True:
                yield cast("AudioFrame", self._graph.pull())


class Tempo:
    """Makes speech faster or slower, with the same pitch. Used as `SoundEncoder`.

    Args:
        rate: the sample rate, in Hz.
        speed: within `SPEEDS`.
    """

    def __init__(self, rate: int, speed: float) -> None:
        # One filter does not take less than 0.5, and above 2 it leaves parts out.
        n = 1 if 0.5 <= speed <= 2 else 2
        self._filter = _Filter(rate, *[("atempo", repr(speed ** (1 / n)))] * n)

    def feed(self, samples: Samples) -> Samples:
        """Change the next samples, of shape (n,). Some may come later."""
        return _joined(self._filter.push(samples))

    def finish(self) -> Samples:
        """Return the rest of the samples. It must be called at most once."""
        return _joined(self._filter.end())


def _joined(frames: Iterator[AudioFrame]) -> Samples:
    parts = [frame.to_ndarray()[0] for frame in frames]
    return np.concatenate([np.empty(0, np.float32), *parts], dtype=np.float32)


def with_lengths(head: bytes, size: int) -> bytes:
    """Write lengths into the head of a WAV file that ends after `size` bytes.

    `SoundEncoder` sends the head before it knows them. A head that has them stays as it is.
    """
    place = head.find(b"data", 12) + 4
    if head[:4] != b"RIFF" or place < 12 or head[place : place + 4] != b"\xff" * 4:
        return head
    whole, data = (n.to_bytes(4, "little") for n in (size - 8, size - place - 4))
    return b"".join([head[:4], whole, head[8:place], data, head[place + 4 :]])


class SoundEncoder:
    """Encodes sound of one channel, and gives the bytes as they are ready.

    Not for the event loop. One thread uses it at a time; `close` frees it, also before its end.

    Args:
        format: of the bytes.
        rate: the sample rate of the input, in Hz.
    """

    def __init__(self, format: SoundFormat, rate: int) -> None:
        av, form = import_module("av"), _FORMS[format]
        av.logging.set_level(None)
        self._written = _Written()
        options = {**form.options, "flush_packets": "1", "fflags": "+bitexact"}
        opened = av.open(self._written, "w", format=form.container, options=options)
        self._container: OutputContainer = opened
        self._codec: AudioStream = self._container.add_stream(
            form.codec, rate=RATE, layout="mono", options=dict(form.of_codec)
        )
        if form.bit_rate:
            self._codec.bit_rate = form.bit_rate
        self._codec.codec_context.thread_count = 1
        self._resampled = _Filter(rate, ("aresample", str(RATE)))
        self._container.start_encoding()  # writes the header, also if nothing follows

    def feed(self, samples: Samples) -> bytes:
        """Encode the next samples, of shape (n,). The bytes of some may come later."""
        self._encode(self._resampled.push(np.clip(samples, -1.0, 1.0)))
        return self._written.take()

    def finish(self) -> bytes:
        """Encode the end, and return the rest of the bytes. It must be called at most once."""
        self._encode(self._resampled.end())
        self._container.mux(self._codec.encode(None))
        self.close()
        return self._written.take()

    def close(self) -> None:
        """Free the encoder."""
        self._container.close()

    def _encode(self, frames: Iterator[AudioFrame]) -> None:
        for frame in frames:
            frame.pts = None  # the encoder counts samples itself
            self._container.mux(self._codec.encode(frame))
