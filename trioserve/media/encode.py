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


class SoundEncoder:
    """Encodes sound of one channel, faster or slower, and gives the bytes as they are ready.

    Not for the event loop. One thread uses it at a time; `close` frees it, also before its end.

    Args:
        format: of the bytes.
        rate: the sample rate of the input, in Hz.
        speed: within `SPEEDS`; the pitch stays the same.
    """

    def __init__(self, format: SoundFormat, rate: int, speed: float = 1.0) -> None:
        av, form = import_module("av"), _FORMS[format]
        av.logging.set_level(None)
        self._written, self._n_read, self._rate = _Written(), 0, rate
        options = {**form.options, "flush_packets": "1", "fflags": "+bitexact"}
        opened = av.open(self._written, "w", format=form.container, options=options)
        self._container: OutputContainer = opened
        codec: AudioStream = self._container.add_stream(
            form.codec, rate=RATE, layout="mono", options=dict(form.of_codec)
        )
        if form.bit_rate:
            codec.bit_rate = form.bit_rate
        codec.codec_context.thread_count = 1
        self._codec, self._make_frame = codec, av.AudioFrame.from_ndarray
        self._errors = (av.error.BlockingIOError, av.error.EOFError)
        self._graph = _make_graph(rate, speed)
        self._container.start_encoding()  # writes the header, also if nothing follows

    def feed(self, samples: Samples) -> bytes:
        """Encode the next samples, of shape (n,). The bytes of some may come later."""
        if len(samples):
            clipped = np.clip(samples, -1.0, 1.0)[np.newaxis]
            frame = self._make_frame(np.ascontiguousarray(clipped, np.float32), "flt", "mono")
            frame.sample_rate, frame.pts = self._rate, self._n_read
            self._n_read += len(samples)
            self._encode(frame)
        return self._written.take()

    def finish(self) -> bytes:
        """Encode the end, and return the rest of the bytes. It must be called at most once."""
        if self._n_read:
            self._encode(None)
        self._container.mux(self._codec.encode(None))
        self.close()
        return self._written.take()

    def close(self) -> None:
        """Free the encoder."""
        self._container.close()

    def _encode(self, frame: AudioFrame | None) -> None:
        for piece in self._push(frame):
            self._container.mux(self._codec.encode(piece))

    def _push(self, frame: AudioFrame | None) -> Iterator[AudioFrame]:
        self._graph.push(frame)
        with suppress(*self._errors):
            while True:
                piece = cast("AudioFrame", self._graph.pull())
                piece.pts = None  # the encoder counts samples itself
                yield piece


def _make_graph(rate: int, speed: float) -> Graph:
    """Make the filters of a speed, which end at `RATE`."""
    graph: Graph = import_module("av.filter").Graph()
    graph.threads = 1
    time_base = Fraction(1, rate)
    source = graph.add_abuffer(sample_rate=rate, format="flt", layout="mono", time_base=time_base)
    tempos = [graph.add("atempo", repr(factor)) for factor in _factors(speed)]
    resampled = graph.add("aresample", str(RATE))
    graph.link_nodes(source, *tempos, resampled, graph.add("abuffersink")).configure()
    return graph


def _factors(speed: float) -> list[float]:
    """Split a speed into factors from 0.5 to 2: beyond, the filter leaves parts out."""
    if speed == 1:
        return []
    n = 1 if 0.5 <= speed <= 2 else 2
    return [speed ** (1 / n)] * n
