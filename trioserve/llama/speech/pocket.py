"""Pocket TTS: the backbone makes a hidden state a frame, and a flow net a latent of it.

The model was trained on single sentences, so each text of a task follows the voice alone. It tells
the end of a text a little early: some frames are added, up to a limit by the length of the text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from trioserve.engine.backend import Matrix
from trioserve.engine.speaker import Samples, SpokenPrompt
from trioserve.errors import ModelLoadError
from trioserve.llama.speech.parts import Parts, SpeechUtterance
from trioserve.types import SpeechTask, TokenId

FRAME_RATE = 12.5

#: Tokens in a text above which words are skipped.
MAX_PIECE = 50
#: Texts of fewer words get blanks before them, in some packs.
_FEW_WORDS, _BLANKS = 5, " " * 8
#: The frames after the end: of texts with few tokens, and of others.
_FEW_TOKENS, _AFTER_FEW, _AFTER = 6, 5, 3
#: Frames that become sound together, the first ones of a task sooner. With 8, as llama.cpp's helper
#: has it, each takes 4% less time, but the other speakers are held up for twice as long.
_WINDOWS = (2, 4)


@attrs.frozen
class Pack:
    """The settings of a variant of the weights."""

    temperature: float = 0.0  # 0: as libmtmd has it
    n_after_end: int = 0  # frames; 0: by the length of the text
    pads_short: bool = False
    max_piece: int = MAX_PIECE


#: libmtmd's table, and the bundled voice, which loses its place in long sentences.
_PACKS: Mapping[str, Pack] = {
    "english": Pack(0.3),
    "english_2026-01": Pack(0.7, pads_short=True),
    "english_2026-04": Pack(0.3),
    "french_24l": Pack(0.7, n_after_end=8),
    "bundled": Pack(0.3, max_piece=32),
}


class Pocket:
    """Texts as this family takes them."""

    languages: Sequence[str] = ()

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.pack = _PACKS.get(parts.generator.variant, Pack())
        self.max_piece = self.pack.max_piece
        begin = parts.tokens.get(b"<|audio_bos|>")
        if begin is None:
            raise ModelLoadError(f"The vocabulary of {parts.path} lacks <|audio_bos|>.")
        self._begin = begin
        before = parts.tokens.get(b"<|bos_before_voice|>")  # some packs have none
        self._before_voice = () if before is None else (before,)

    def tokenize(self, text: str) -> tuple[TokenId, ...]:
        prepared = prepare(text, pads_short=self.pack.pads_short)
        return self.parts.vocab.tokenize(prepared, parse_special=False) if prepared else ()

    def prompt(self, tokens: Sequence[TokenId], task: SpeechTask) -> SpokenPrompt:
        """Put the voice before the text, and after it what begins the sound."""
        rows = self.parts.rows([*tokens, self._begin])
        if task.voice is None:
            return SpokenPrompt(rows, 0)
        before = self.parts.rows(self._before_voice)
        shared = np.concatenate([before, task.voice.rows])
        return SpokenPrompt(np.concatenate([shared, rows]), len(shared))

    def n_prompt(self, task: SpeechTask) -> int:
        n_voice = 0 if task.voice is None else len(self._before_voice) + len(task.voice.rows)
        return n_voice + max(map(len, task.pieces)) + 1

    def utterance(self, task: SpeechTask) -> PocketUtterance:
        return PocketUtterance(self, task)


class PocketUtterance(SpeechUtterance):
    """See `trioserve.engine.speaker.Utterance`."""

    def __init__(self, family: Pocket, task: SpeechTask) -> None:
        super().__init__(family.parts, task)
        self._family = family
        self._features: list[Samples] = []
        self._state = b""
        self._n = self._most = self._after = self._window = 0
        self._end: int | None = None

    def begin(self, piece: int) -> SpokenPrompt:
        tokens = self._task.pieces[piece].tokens
        self._features, self._state = [], b""
        self._n, self._end = 0, None
        self._most = math.ceil((len(tokens) / 3 + 2) * FRAME_RATE)
        few = len(tokens) <= _FEW_TOKENS
        self._after = self._family.pack.n_after_end or (_AFTER_FEW if few else _AFTER)
        return self._family.prompt(tokens, self._task)

    def frame(self, row: int) -> Matrix | None:
        made = self._parts.generator.frame(
            self._parts.hidden(row),
            self.next_seed(),
            temperature=self._family.pack.temperature,
        )
        if made.is_end and self._end is None:
            self._end = self._n
        if self._n >= self._most or (self._end is not None and self._n >= self._end + self._after):
            return None
        self._features.append(made.features)
        self._n += 1
        return made.row

    def close(self) -> None:
        pass  # there is nothing of C in it

    @property
    def is_due(self) -> bool:
        return len(self._features) >= _WINDOWS[self._window]

    def sound(self) -> Samples:
        if not self._features:
            return np.empty(0, np.float32)
        samples, self._state = self._parts.generator.sound(
            np.concatenate(self._features), self._state
        )
        self._features = []
        self._window = min(self._window + 1, len(_WINDOWS) - 1)
        return samples


def prepare(text: str, *, pads_short: bool) -> str:
    """Write a text as the model's makers did: a capital at first, and a full stop at the end."""
    text = text.replace("\r", " ").replace("\n", " ").replace(";", ",").strip(" ")
    if not text:
        return ""
    if "a" <= text[0] <= "z":
        text = text[0].upper() + text[1:]
    if text[-1].isascii() and text[-1].isalnum():
        text += "."
    n_words = sum(map(bool, text.split(" ")))
    return _BLANKS + text if pads_short and n_words < _FEW_WORDS else text
