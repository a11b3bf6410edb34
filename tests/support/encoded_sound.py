"""Reads files of sound again."""

from __future__ import annotations

from io import BytesIO

import av
import numpy as np
from numpy.typing import NDArray

from trioserve.media.encode import RATE


def sound_in(data: bytes, format: str) -> NDArray[np.float32]:
    """Decode a file of one channel; returns its samples at `RATE`."""
    if format == "pcm":
        return np.frombuffer(data, "<i2").astype(np.float32) / np.float32(2**15)
    resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)
    with av.open(BytesIO(data), "r") as container:
        frames = [
            each
            for frame in container.decode(container.streams.audio[0])
            for each in resampler.resample(frame)
        ]
        frames += resampler.resample(None)
    return np.concatenate([each.to_ndarray()[0] for each in frames], dtype=np.float32)
