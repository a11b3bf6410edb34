"""Sound to samples, with PyAV. Runs in the process of its own only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from io import BytesIO
from typing import TYPE_CHECKING, Any, TypeAlias

import av
import av.logging
from av.filter import Graph

from trioserve.errors import InvalidMediaError
from trioserve.media.limits import MediaLimits

if TYPE_CHECKING:
    from av.container import InputContainer

AnyFrame: TypeAlias = av.AudioFrame | av.VideoFrame

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


#: Labels in a file need not be UTF-8. PyAV 19 takes them as they are, without being asked.
_ANY_LABELS: dict[str, Any] = (
    {"metadata_errors": "ignore"} if int(av.__version__.split(".")[0]) < 19 else {}
)


def open_container(data: bytes, name: str) -> InputContainer:
    """Open a file of a format, whatever else it may look like.

    Raises:
        Exception: of many kinds; the file cannot be read.
    """
    container: InputContainer = av.open(
        BytesIO(data),
        mode="r",
        format=_READERS[name],
        container_options={"codec_whitelist": ",".join(_DECODERS), "protocol_whitelist": ""},
        **_ANY_LABELS,
    )
    return container


def frames_of(
    container: InputContainer, stream: av.AudioStream | av.VideoStream
) -> Iterator[AnyFrame]:
    """Decode a stream, in this thread. What cannot be decoded is left out, as players do.

    Raises:
        InvalidMediaError: its decoder is none of those that are taken.
        Exception: of many kinds; the file cannot be read.
    """
    name = stream.codec_context.name
    if name not in _DECODERS:
        raise InvalidMediaError(f"is encoded as {name}, which is not taken")
    stream.codec_context.thread_count = 1
    for packet in container.demux(stream):
        with suppress(av.error.InvalidDataError):
            yield from stream.decode(packet)


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
        for piece in _converted(frames_of(container, stream), rate):
            n_left -= piece.samples
            if n_left < 0:
                raise InvalidMediaError(f"is longer than {limits.max_seconds:g} seconds")
            yield bytes(piece.planes[0])[: 4 * piece.samples]


def _converted(
    frames: Iterator[av.AudioFrame | av.VideoFrame], rate: int
) -> Iterator[av.AudioFrame]:
    """Convert to floats of one channel, which is the mean of those in the file."""
    graph: Graph | None = None
    form = None
    for frame in frames:
        assert isinstance(frame, av.AudioFrame)
        if graph is not None and form != _form(frame):  # as in files that were joined
            yield from _push(graph, None)
            graph = None
        if graph is None:
            form = _form(frame)
            graph = _make_graph(frame, rate)
        yield from _push(graph, frame)
    if graph is not None:
        yield from _push(graph, None)


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


def _push(graph: Graph, frame: av.AudioFrame | None) -> Iterator[av.AudioFrame]:
    """Put in a frame, or the end, and take out what is ready."""
    graph.push(frame)
    with suppress(av.error.BlockingIOError, av.error.EOFError):
        while True:
            piece = graph.pull()
            assert isinstance(piece, av.AudioFrame)
            yield piece


av.logging.set_level(None)
