"""Decodes images, sound, video and PDFs. Runs in the decoding process only."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from fractions import Fraction
from io import BytesIO
from typing import TYPE_CHECKING, Any, TypeAlias

import av
import av.logging
from av.filter import Graph
from PIL import (
    BmpImagePlugin,
    ExifTags,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,  # noqa: F401 - Pillow imports it for its first EXIF data: too late
    WebPImagePlugin,
)

from trioserve.errors import InvalidMediaError
from trioserve.media.orders import MAX_TEXT, MediaLimits

if TYPE_CHECKING:
    from av.container import InputContainer
import math

#: Each opens one format. A file that claims to be another is refused.
_OPENERS: Mapping[str, Callable[[BytesIO], Image.Image]] = {
    "png": PngImagePlugin.PngImageFile,
    "jpeg": JpegImagePlugin.JpegImageFile,
    "webp": WebPImagePlugin.WebPImageFile,
    "gif": GifImagePlugin.GifImageFile,
    "bmp": BmpImagePlugin.BmpImageFile,
}

#: Rows are sent in bands of about this many pixels.
_BAND = 2**18

_WHITE = (255, 255, 255, 255)

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode_image(data: bytes, name: str, limits: MediaLimits) -> Image.Image:
    """Decode an image, or the first one of an animation, and turn it as its EXIF data say.

    Raises:
        InvalidMediaError: it is larger than the limits allow.
        Exception: the file cannot be read; the type varies.
    """
    image = _OPENERS[name](BytesIO(data))
    width, height = image.size
    if width * height > limits.max_pixels:
        raise InvalidMediaError(
            f"has {width} x {height} pixels, and {limits.max_pixels} in all are the most"
        )
    image.load()
    turn = _TURNS.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def rows(image: Image.Image, *, on_white: bool = False) -> Iterator[bytes]:
    """Give the pixels of an image in pieces: RGB, from the top.

    Unless it lies `on_white`, transparency is dropped: the colors that it hides show.
    """
    width, height = image.size
    step = max(1, _BAND // width)
    for top in range(0, height, step):
        band = image.crop((0, top, width, min(top + step, height)))
        if band.mode.startswith("I;16"):  # converting would cut off what is brighter than 255
            high = slice(0, None, 2) if band.mode == "I;16B" else slice(1, None, 2)
            band = Image.frombytes("L", band.size, band.tobytes()[high])
        if on_white:
            white = Image.new("RGBA", band.size, _WHITE)
            band = Image.alpha_composite(white, band.convert("RGBA"))
        yield band.convert("RGB").tobytes()


def _orientation(image: Image.Image) -> int:
    with suppress(Exception):  # invalid EXIF data turn nothing
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    return 1


ImageFile.LOAD_TRUNCATED_IMAGES = False
Image.MAX_IMAGE_PIXELS = None  # `decode` checks `MediaLimits`


try:
    import pypdfium2
except ImportError:  # it is the extra trioserve[pdf], and without it no PDF gets here
    pypdfium2 = None

codecs.lookup("utf-16-le")  # Python imports it for the first text: too late

#: Pixels of the longer side of a picture. Models see little more of a page.
_SIDE = 1536


def decode_pages(
    data: bytes, with_images: bool, limits: MediaLimits
) -> Iterator[tuple[str, Image.Image | None]]:
    """Read the pages of a PDF, one after the other: the text of each, and a picture of it.

    Raises:
        InvalidMediaError: it has no pages, or too many, or too much text.
        Exception: the file cannot be read; the type varies.
    """
    with pypdfium2.PdfDocument(data) as document:
        if not 0 < len(document) <= limits.max_frames:
            raise InvalidMediaError(f"has {len(document)} pages, and {limits.max_frames} at most")
        n_chars = 0
        for page in document:
            text = page.get_textpage().get_text_bounded().replace("\r\n", "\n")
            n_chars += len(text)
            if n_chars > MAX_TEXT:
                raise InvalidMediaError(f"has more than {MAX_TEXT} characters")
            yield text, _picture(page) if with_images else None
            page.close()


def _picture(page: pypdfium2.PdfPage) -> Image.Image | None:
    longest = max(page.get_size())
    if not longest > 0:
        return None
    image: Image.Image = page.render(scale=_SIDE / longest).to_pil()
    return image


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

#: The decoders that a file may use, by FFmpeg's names. FFmpeg has hundreds more, for rare formats
#: that are hardly tested.
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
        Exception: the file cannot be read; the type varies.
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
        InvalidMediaError: its decoder is not allowed.
        Exception: the file cannot be read; the type varies.
    """
    name = stream.codec_context.name
    if name not in _DECODERS:
        raise InvalidMediaError(f"is encoded as {name}, which is not taken")
    stream.codec_context.thread_count = 1
    for packet in container.demux(stream):
        with suppress(av.error.InvalidDataError):
            yield from stream.decode(packet)


def decode_sound(data: bytes, name: str, rate: int, limits: MediaLimits) -> Iterator[bytes]:
    """Decode sound to samples of one channel at a rate, in pieces.

    Raises:
        InvalidMediaError: the file has no sound, or more than the limits allow.
        Exception: the file cannot be read; the type varies.
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


#: Larger frames are made smaller: models see little more of a frame.
_MAX_FRAME_PIXELS = 2**19

_ROTATIONS = {
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    270: Image.Transpose.ROTATE_270,
}


def decode_video(
    data: bytes, name: str, fps: float, limits: MediaLimits
) -> Iterator[tuple[float, Image.Image]]:
    """Decode a video at `fps` frames a second; 0: all frames.

    Yields each frame with the second at which it is shown.

    Raises:
        InvalidMediaError: it has no frames, or more or larger ones than the limits allow.
        Exception: the file cannot be read; the type varies.
    """
    chosen = _at_rate(_frames(data, name, limits), fps) if fps else _frames(data, name, limits)
    count = 0
    for count, (at, frame) in enumerate(chosen, 1):
        if count > limits.max_frames:
            raise InvalidMediaError(
                f"has more than {limits.max_frames} frames, "
                + (f"at {fps:g} a second" if fps else "and all were requested")
            )
        yield at, _image(frame)
    if not count:
        raise InvalidMediaError("has no frames")


def _at_rate(
    frames: Iterator[tuple[float, av.VideoFrame]], fps: float
) -> Iterator[tuple[float, av.VideoFrame]]:
    """Choose frames as FFmpeg's filter ``fps`` does: each counts from the tick next to its time."""
    tick = 0
    shown: av.VideoFrame | None = None
    for at, frame in frames:
        now = math.floor(at * fps + 0.5)
        while shown is not None and tick < now:
            yield tick / fps, shown
            tick += 1
        shown = frame
    if shown is not None:
        yield tick / fps, shown


def _frames(data: bytes, name: str, limits: MediaLimits) -> Iterator[tuple[float, av.VideoFrame]]:
    """All frames, with the second from the first one on at which each is shown."""
    with open_container(data, name) as container:
        if not container.streams.video:
            raise InvalidMediaError("has no video")
        stream = container.streams.video[0]
        _check_size(stream.codec_context.width, stream.codec_context.height, limits)
        begin: float | None = None
        for frame in frames_of(container, stream):
            assert isinstance(frame, av.VideoFrame)
            _check_size(frame.width, frame.height, limits)
            time = frame.time or 0.0
            begin = time if begin is None else begin
            if not time - begin <= limits.max_seconds:
                raise InvalidMediaError(f"is longer than {limits.max_seconds:g} seconds")
            yield time - begin, frame


def _check_size(width: int, height: int, limits: MediaLimits) -> None:
    if width * height > limits.max_pixels:
        raise InvalidMediaError(
            f"has frames of {width} x {height} pixels, and {limits.max_pixels} in all are the most"
        )


def _image(frame: av.VideoFrame) -> Image.Image:
    scale = min(1.0, math.sqrt(_MAX_FRAME_PIXELS / (frame.width * frame.height)))
    width, height = max(1, int(frame.width * scale)), max(1, int(frame.height * scale))
    rgb = frame.reformat(width=width, height=height, format="rgb24", threads=1)
    plane = rgb.planes[0]
    image = Image.frombuffer("RGB", (width, height), bytes(plane), "raw", "RGB", plane.line_size, 1)
    turn = _ROTATIONS.get(frame.rotation % 360)
    return image if turn is None else image.transpose(turn)
