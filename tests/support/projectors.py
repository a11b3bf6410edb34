"""A projector that writes media as text, for what is above the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from trioserve.engine.projector import Embeddings
from trioserve.errors import InvalidMediaError
from trioserve.testing.vocab import byte_vocab
from trioserve.types import (
    DecodedAudio,
    DecodedImage,
    DecodedMedia,
    MediaChunk,
    Prompt,
)


class WordProjector:
    """Writes ``(image 8x4)`` in place of an image, and ``(sound 0.5s)`` in place of sound."""

    max_chunk = 0
    audio_rate = 16_000

    def __init__(self, *, sees: bool = True, hears: bool = True) -> None:
        self.sees = sees
        self.hears = hears

    def prepare(
        self,
        parts: Sequence[str | DecodedMedia],
        *,
        add_special: bool,
        parse_special: bool = True,
        stop: Callable[[int], bool] = lambda _n: False,
    ) -> Prompt:
        """Write text and words."""
        text = ""
        for index, part in enumerate(parts):
            assert not stop(len(text))
            text += part if isinstance(part, str) else _word(part, index)
        return Prompt(byte_vocab.tokenize(text, add_special=add_special))

    def encode(self, chunk: MediaChunk) -> Embeddings:
        """Encode nothing: there are no chunks."""
        return np.zeros((chunk.n_cells, 1), np.float32)

    def interrupt(self) -> None:
        """Do nothing."""

    def set_threads(self, count: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def _word(media: DecodedMedia, index: int) -> str:
    if isinstance(media, DecodedImage):
        if media.width < 2:
            raise InvalidMediaError("The image is too narrow.", index=index)
        return f"(image {media.width}x{media.height})"
    if isinstance(media, DecodedAudio):
        return f"(sound {media.seconds:.1f}s)"
    return f"(video of {len(media.frames)})"
