"""A model that speaks without a model: what it says can be read from the samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np

from trioserve.engine.backend import Matrix
from trioserve.engine.speaker import Rows, Samples, SpeechBackend, SpokenPrompt
from trioserve.errors import (
    DecodeError,
    DecodeInterruptedError,
    InvalidRequestError,
    KVCacheFullError,
    TrioServeError,
)
from trioserve.testing.backend import ScriptedBackend
from trioserve.testing.vocab import byte_vocab
from trioserve.types import DecodedAudio, SpeechTask, TokenId, Voice

#: The rows of a voice; those of bytes are their numbers.
VOICE_ROW = 300.0
#: The row that ends a text.
_BEGIN = 400.0


def heard(samples: Samples) -> str:
    """Read what a `ScriptedSpeaker` has said from all its samples."""
    frames = np.abs(samples[:: ScriptedSpeaker.n_samples])
    return bytes(np.rint(frames * 512).astype(np.uint8).tolist()).decode("utf-8", "replace")


@attrs.define(eq=False, kw_only=True)
class ScriptedSpeaker(SpeechBackend):
    """Says one byte of a text in each frame, whose samples are all equal; see `heard`.

    With a voice they are below 0, and with `seed` they are the same. It checks each batch as
    llama.cpp would.

    Attributes:
        n_slots, n_batch, n_ctx_seq: as those of a context.
        languages, takes_voices, max_piece: see `SpeechBackend`.
        window: frames that become sound together; the first ones of a text are half of it.
        failures: raised by the next calls of `decode`, one each.
        frame_failures: raised by the next frame or the next sound of a text, by its first token.
        meanwhile: called in each `decode`; an `interrupt` in it has an effect.
        on_sound: called in each `sound` with the task; an `interrupt_sound` in it has an effect.
        held: for each slot the cells that it holds.
        batches: the number of rows of each batch.
    """

    #: Samples in a frame.
    n_samples = 1920

    n_slots: int = 2
    n_batch: int = 64
    n_ctx_seq: int = 256
    languages: Sequence[str] = ("english", "german")
    takes_voices: bool = True
    max_piece: int = 50
    window: int = 4
    failures: list[DecodeError] = attrs.field(factory=list)
    frame_failures: dict[TokenId, TrioServeError] = attrs.field(factory=dict)
    meanwhile: Callable[[], None] = lambda: None
    on_sound: Callable[[SpeechTask], None] = lambda task: None
    held: dict[int, int] = attrs.field(init=False, factory=dict)
    batches: list[int] = attrs.field(init=False, factory=list)
    outputs: list[float] = attrs.field(init=False, factory=list)
    n_closed: int = attrs.field(init=False, default=0)  # utterances
    is_interrupted: bool = attrs.field(init=False, default=False)
    is_sound_interrupted: bool = attrs.field(init=False, default=False)
    closed: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self.info, self.vocab = ScriptedBackend().info, byte_vocab
        self.sample_rate, self.frame_rate = 24_000, 12.5
        self.voice_rate = 24_000 if self.takes_voices else 0
        self.n_ctx, self.n_seqs = self.n_slots * self.n_ctx_seq, self.n_slots
        self.thread_choices = (range(1, 2), range(1, 2))

    def set_threads(self, count: int) -> None:
        assert count > 0

    def tokenize(self, text: str) -> tuple[TokenId, ...]:
        """Make a token of each byte."""
        return byte_vocab.tokenize(text.strip())

    def take_voice(self, recording: DecodedAudio) -> Voice:
        """Make a row for each second, begun ones included."""
        assert recording.rate == self.voice_rate
        return Voice(np.full((int(recording.seconds) + 1, 1), VOICE_ROW, np.float32))

    def n_prompt(self, task: SpeechTask) -> int:
        if task.language and task.language not in self.languages:
            raise InvalidRequestError.at("language", f"must be one of {', '.join(self.languages)}.")
        n_voice = 0 if task.voice is None else len(task.voice.rows)
        return n_voice + max(map(len, task.pieces)) + 1

    def utterance(self, task: SpeechTask) -> ScriptedUtterance:
        return ScriptedUtterance(self, task)

    def decode(self, batch: Sequence[Rows]) -> list[int]:
        self.meanwhile()
        n_rows = sum(len(part.rows) for part in batch)
        assert 0 < n_rows <= self.n_batch
        if self.is_interrupted:
            self.is_interrupted = False
            raise DecodeInterruptedError("interrupted")
        if self.failures:
            raise self.failures.pop(0)
        seqs = [part.seq for part in batch]
        assert len(set(seqs)) == len(seqs) and set(seqs) <= set(range(self.n_slots))
        for part in batch:
            assert part.pos == self.held.get(part.seq, 0), "a gap, or a slot that is not forgotten"
            if part.pos + len(part.rows) > self.n_ctx_seq:
                raise KVCacheFullError("full")
        for part in batch:
            self.held[part.seq] = part.pos + len(part.rows)
        self.batches.append(n_rows)
        self.outputs = [float(part.rows[-1, 0]) for part in batch]
        return list(range(len(batch)))

    def forget(self, seq: int, start: int = 0) -> None:
        self.held[seq] = min(start, self.held.get(seq, 0))

    def interrupt(self) -> None:
        self.is_interrupted = True

    def interrupt_sound(self) -> None:
        self.is_sound_interrupted = True

    def close(self) -> None:
        self.closed = True


class ScriptedUtterance:
    """Says the bytes of a text one by one."""

    def __init__(self, backend: ScriptedSpeaker, task: SpeechTask) -> None:
        self._backend, self._task = backend, task
        self._tokens: tuple[TokenId, ...] = ()
        self._place = 0
        self._new: list[TokenId] = []
        self._window = 0

    def begin(self, piece: int) -> SpokenPrompt:
        """Put the voice before the bytes."""
        assert not self._new, "frames that never became sound"
        self._tokens, self._place = self._task.pieces[piece].tokens, 0
        self._window = (self._backend.window + 1) // 2
        voice = [] if self._task.voice is None else self._task.voice.rows[:, 0].tolist()
        rows = np.array([*voice, *self._tokens, _BEGIN], np.float32)[:, np.newaxis]
        return SpokenPrompt(rows, len(voice))

    def frame(self, row: int) -> Matrix | None:
        """Say the next byte, which is the row of the next batch."""
        last = _BEGIN if not self._place else float(self._tokens[self._place - 1])
        assert self._backend.outputs[row] == last, "the output of another speaker"
        self._fail()
        if self._place == len(self._tokens):
            return None
        token = self._tokens[self._place]
        self._place += 1
        self._new.append(token)
        return np.full((1, 1), token, np.float32)

    @property
    def is_due(self) -> bool:
        return len(self._new) >= self._window

    def sound(self) -> Samples:
        """Make equal samples of each byte."""
        self._backend.on_sound(self._task)
        if self._backend.is_sound_interrupted:
            self._backend.is_sound_interrupted = False
            raise DecodeInterruptedError("interrupted")
        sign = 1 if self._task.voice is None else -1
        levels = np.array(self._new, np.float32) * np.float32(sign / 512)
        self._new, self._window = [], self._backend.window
        return np.repeat(levels, self._backend.n_samples)

    def close(self) -> None:
        self._backend.n_closed += 1

    def _fail(self) -> None:
        failure = self._backend.frame_failures.pop(self._tokens[0], None)
        if failure is not None:
            raise failure
