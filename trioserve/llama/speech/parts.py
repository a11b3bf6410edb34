"""The parts of a loaded model that its family uses, and the base of both kinds of utterances."""

from __future__ import annotations

import secrets
import zlib
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from trioserve.errors import OutputError
from trioserve.llama.context import Context
from trioserve.llama.library import lib
from trioserve.llama.speech.generator import RANDOM_SEED, SpeechGenerator
from trioserve.llama.speech.token_rows import TokenRows
from trioserve.llama.vocab import LlamaVocab
from trioserve.types import SpeechTask, TokenId


@attrs.define(eq=False, slots=False)
class Parts:
    """The parts of a model."""

    path: Path
    vocab: LlamaVocab
    context: Context
    generator: SpeechGenerator
    rows: TokenRows

    @cached_property
    def tokens(self) -> dict[bytes, TokenId]:
        """The tokens by their names."""
        found: dict[bytes, TokenId] = {}
        for token, name in enumerate(self.vocab.names):
            found.setdefault(name, token)
        return found

    def hidden(self, row: int) -> NDArray[np.float32]:
        """Return the hidden state of a row of the last batch, until the next one.

        Raises OutputError: it has numbers that are not finite.
        """
        pointer: Any = lib.llama_get_embeddings_ith(self.context.handle, row)
        if not pointer:
            raise OutputError(f"llama.cpp has no hidden state for row {row}.")
        state = np.ctypeslib.as_array(pointer, shape=(self.generator.width,))
        if not np.isfinite(state).all():
            raise OutputError("The model made a hidden state with numbers that are not finite.")
        return state


def frame_seed(seed: int, place: int) -> int:
    """Make the seed of a frame from that of its task: what others say has no part in it."""
    mixed = zlib.crc32(place.to_bytes(8, "little"), zlib.crc32(seed.to_bytes(8, "little")))
    return mixed % RANDOM_SEED


class SpeechUtterance:
    """The common part of utterances; see `trioserve.engine.speaker.Utterance`."""

    def __init__(self, parts: Parts, task: SpeechTask) -> None:
        self._parts, self._task = parts, task
        self.seed = task.seed if task.seed >= 0 else secrets.randbelow(RANDOM_SEED)
        self._n_seeds = 0

    def next_seed(self) -> int:
        """Return the seed of the next frame."""
        self._n_seeds += 1
        return frame_seed(self.seed, self._n_seeds)
