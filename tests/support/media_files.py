"""Files with images, sound and video, made as they are needed."""

from __future__ import annotations

import io
import math
import struct
import wave
from collections.abc import Iterable, Sequence
from typing import Any

import av
import numpy as np
from PIL import Image

RED = (255, 0, 0)


def image_file(format: str = "PNG", size: tuple[int, int] = (8, 4), **options: Any) -> bytes:
    """A red image in one of Pillow's formats."""
    return encode(Image.new("RGB", size, RED), format, **options)


def encode(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """An image as a file."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def wav_file(seconds: float = 0.5, rate: int = 44_100, channels: int = 2) -> bytes:
    """A tone of 440 Hz on the first channel, with half of the loudness."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        silence = bytes(2 * (channels - 1))
        out.writeframes(b"".join(struct.pack("<h", s) + silence for s in _tone(seconds, rate)))
    return file.getvalue()


def _tone(seconds: float, rate: int) -> Iterable[int]:
    return (int(2**14 * math.sin(2 * math.pi * 440 * i / rate)) for i in range(int(seconds * rate)))


def float_wav(samples: Iterable[float], rate: int = 16_000) -> bytes:
    """A WAV file of 32-bit floats, whatever they are."""
    data = np.array(list(samples), np.float32).tobytes()
    format = struct.pack("<HHIIHH", 3, 1, rate, 4 * rate, 4, 32)
    body = b"WAVEfmt " + struct.pack("<I", len(format)) + format
    body += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def av_file(
    format: str,
    sound: str | None = None,
    video: str | None = None,
    seconds: float = 1.0,
    rate: int = 48_000,
) -> bytes:
    """A file of FFmpeg's with a tone, and a video of 24 frames a second that turns red."""
    file = io.BytesIO()
    with av.open(file, "w", format=format) as out:
        tone = out.add_stream(sound, rate=rate) if sound else None
        pictures: Any = out.add_stream(video, rate=24) if video else None
        if pictures is not None:
            pictures.width, pictures.height, pictures.pix_fmt = 64, 48, "yuv420p"
            n_frames = int(24 * seconds)
            for i in range(n_frames):
                image = Image.new("RGB", (64, 48), (255 * i // n_frames, 0, 0))
                out.mux(pictures.encode(av.VideoFrame.from_image(image)))
            out.mux(pictures.encode())
        if tone is not None:
            with av.open(io.BytesIO(wav_file(seconds, rate))) as source:
                for frame in source.decode(audio=0):
                    frame.pts = None
                    out.mux(tone.encode(frame))
            out.mux(tone.encode())
    return file.getvalue()


def video_file(images: Sequence[Image.Image], format: str = "mp4", codec: str = "libx264") -> bytes:
    """Images, 24 a second."""
    file = io.BytesIO()
    with av.open(file, "w", format=format) as out:
        stream: Any = out.add_stream(codec, rate=24)
        stream.width, stream.height, stream.pix_fmt = *images[0].size, "yuv420p"
        for image in images:
            out.mux(stream.encode(av.VideoFrame.from_image(image)))
        out.mux(stream.encode())
    return file.getvalue()
