"""Sound to samples, with PyAV. Runs in the process of its own only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from io import BytesIO
from typing import TYPE_CHECKING

import av
import av.logging
from av.filter import Graph

from trioserve.errors import InvalidMediaError
from trioserve.media.limits import MediaLimits

if TYPE_CHECKING:
    from av.container import InputContainer

#: The reader of each format, by FFmpeg's name.
_READERS = {
    "wav": "wav",
    "mp3": "mp3",
    "flac": "flac",
    "ogg": "ogg",
    "aac": "aac",
    "mp4": "mov",
    "webm": "matroska",
}

#: The decoders that a file may ask for, by FFmpeg's names. It has hundreds, for formats that nobody
#: sends and that few have tested.
_DECODERS = (
    "pcm_u8", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le", "pcm_s32be",
    "pcm_f32le", "pcm_f32be", "pcm_f64le", "pcm_f64be", "pcm_alaw", "pcm_mulaw", "adpcm_ms",
    "adpcm_ima_wav", "mp3", "mp3float", "flac", "vorbis", "opus", "libopus", "aac", "alac",
    "h264", "hevc", "vp8", "vp9", "libdav1d", "av1",
)  # fmt: skip


def open_container(data: bytes, name: str) -> InputContainer:
    """Open a file of a format, whatever else it may look like.

    Raises:
        Exception: of many kinds; the file cannot be read.
    """
    return av.open(
        BytesIO(data),
        mode="r",
        format=_READERS[name],
        metadata_errors="ignore",
        container_options={"codec_whitelist": ",".join(_DECODERS), "protocol_whitelist": ""},
    )


def use_decoder(stream: av.AudioStream | av.VideoStream) -> None:
    """Prepare to decode a stream, in this thread.

    Raises:
        InvalidMediaError: its decoder is none of those that are taken.
    """
    name = stream.codec_context.name
    if name not in _DECODERS:
        raise InvalidMediaError(f"is encoded as {name}, which is not taken")
    stream.codec_context.thread_count = 1


def decode(data: bytes, name: str, rate: int, limits: MediaLimits) -> Iterator[bytes]:
    """Decode sound to samples of one channel at a rate, in pieces.

    Raises:
        InvalidMediaError: there is none, or more than the limits allow.
        Exception: of many kinds; the file cannot be read.
    """
    n_left = int(limits.max_seconds * rate)
    with open_container(data, name) as container:
        if not container.streams.audio:
            raise InvalidMediaError("has no sound")
        stream = container.streams.audio[0]
        use_decoder(stream)
        for piece in _converted(container.decode(stream), rate):
            n_left -= piece.samples
            if n_left < 0:
                raise InvalidMediaError(f"is longer than {limits.max_seconds:g} seconds")
            yield bytes(piece.planes[0])[: 4 * piece.samples]


def _converted(frames: Iterator[av.AudioFrame], rate: int) -> Iterator[av.AudioFrame]:
    """Convert to floats of one channel, which is the mean of those in the file."""
    graph: Graph | None = None
    form = None
    for frame in frames:
        if graph is None:
            form = _form(frame)
            graph = _make_graph(frame, rate)
        elif form != _form(frame):
            raise InvalidMediaError("has sound whose form changes in the middle")
        graph.push(frame)
        yield from _pull(graph)
    if graph is not None:
        graph.push(None)
        yield from _pull(graph)


def _form(frame: av.AudioFrame) -> tuple[str, str, int]:
    return frame.format.name, frame.layout.name, frame.sample_rate


def _make_graph(frame: av.AudioFrame, rate: int) -> Graph:
    n_channels = frame.layout.nb_channels
    mean = "+".join(f"{1 / n_channels}*c{channel}" for channel in range(n_channels))
    graph = Graph()
    graph.threads = 1
    graph.link_nodes(
        graph.add_abuffer(
            sample_rate=frame.sample_rate,
            format=frame.format.name,
            layout=frame.layout.name,
            time_base=Fraction(1, frame.sample_rate),
        ),
        graph.add("pan", f"mono|c0={mean}"),
        graph.add("aresample", str(rate)),
        graph.add("aformat", "sample_fmts=flt"),
        graph.add("abuffersink"),
    ).configure()
    return graph


def _pull(graph: Graph) -> Iterator[av.AudioFrame]:
    with suppress(av.error.BlockingIOError, av.error.EOFError):
        while True:
            piece = graph.pull()
            assert isinstance(piece, av.AudioFrame)
            yield piece


av.logging.set_level(None)
