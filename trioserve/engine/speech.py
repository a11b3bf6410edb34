"""The speech engine: what several requests say, computed in one batch a step.

A speaker adds the rows of a text to the batches, and then one row a step, made of its last frame.
Frames come before texts, so that a new speaker does not hold up one who is in the middle of a word.
What a speaker has said becomes sound a few frames at a time, and that of one speaker a step: it
takes longer than the step's batch. Another thread would not help: frames wait for the same
projector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

import attrs
import numpy as np

from trioserve.engine.backend import Matrix
from trioserve.engine.decoder import MIN_INTERRUPTED, Interrupts
from trioserve.engine.loop import Cancel, Command, Pause, Submit
from trioserve.engine.slotted import SlottedEngine, SlottedRequest
from trioserve.engine.speaker import Rows, SpeechBackend, Utterance
from trioserve.errors import (
    DecodeError,
    DecodeInterruptedError,
    EngineError,
    InputTooLongError,
    InvalidRequestError,
    KVCacheFullError,
    NotSupportedError,
    TrioServeError,
)
from trioserve.types import (
    AnyTask,
    FinishReason,
    SlotStatus,
    Sound,
    SpeechTask,
    Spoken,
    Timings,
)

_NO_ROWS: Matrix = np.empty((0, 0), np.float32)


@attrs.define(eq=False)
class SpeechState(SlottedRequest):
    """The state of a task in the engine; its sequence has the number of its slot."""

    task: SpeechTask
    utterance: Utterance | None = attrs.field(init=False, default=None)
    piece: int = attrs.field(init=False, default=0)
    #: To be computed: the rest of a text, or the row of the last frame. The first is at `pos`.
    rows: Matrix = attrs.field(init=False, default=_NO_ROWS, repr=False)
    pos: int = attrs.field(init=False, default=0)
    is_text: bool = attrs.field(init=False, default=True)  # and not a frame
    #: Why there are no more frames of this text, once that is so.
    end: FinishReason | None = attrs.field(init=False, default=None)
    is_paused: bool = attrs.field(init=False, default=False)
    n_prompt: int = attrs.field(init=False, default=0)
    n_frames: int = attrs.field(init=False, default=0)
    is_heard: bool = attrs.field(init=False, default=False)
    _due_since: float = attrs.field(init=False, default=0.0)
    _first_at: float = attrs.field(init=False, default=0.0)

    @property
    def is_due(self) -> bool:
        """True if frames are to become sound before there are more of them."""
        return self.end is not None or (self.utterance is not None and self.utterance.is_due)

    def turn(self) -> tuple[bool, float]:
        """Whose frames become sound first: those of a speaker who was not heard yet."""
        return self.is_heard, self._due_since

    def begin(self, piece: int) -> int:
        """Begin with a text; returns how many rows it shares with the one before."""
        assert self.utterance is not None
        prompt = self.utterance.begin(piece)
        self.piece, self.pos = piece, prompt.n_shared if piece else 0
        self.rows, self.is_text, self.end = prompt.rows[self.pos :], True, None
        return self.pos

    def advance(self, n_rows: int) -> None:
        """Note that some of the rows were computed."""
        self.n_prompt += n_rows if self.is_text else 0
        self.pos += n_rows
        self.rows = self.rows[n_rows:]

    def add_frame(self, row: int, n_ctx: int) -> None:
        """Make a frame of the output of a row of the last batch, in a context of `n_ctx` cells."""
        assert self.utterance is not None
        made = self.utterance.frame(row)
        self.is_text, self._due_since = False, monotonic()
        if made is None:
            self.end = FinishReason.EOS
            return
        self.rows = made
        self.n_frames += 1
        if self.n_frames == 1:
            self._first_at = self._due_since
        if self.n_frames == self.task.max_frames or self.pos == n_ctx:
            self.end = FinishReason.LIMIT

    def close(self) -> None:
        if self.utterance is not None:
            self.utterance.close()

    def timings(self) -> Timings:
        assert self.admitted_at is not None
        now = monotonic()
        first_at = self._first_at if self.n_frames else now
        return Timings(
            queue_ms=self.queue_ms,
            prompt_n=self.n_prompt,
            prompt_ms=(first_at - self.admitted_at) * 1e3,
            predicted_n=self.n_frames,
            predicted_ms=(now - first_at) * 1e3,
        )


_Parts = Sequence[tuple[SpeechState, Rows]]


class SpeechEngine(SlottedEngine[SpeechState]):
    """Says texts.

    Args:
        backend: the model. The engine owns it, and closes it when its thread ends.
        notify: see `EngineLoop`.
    """

    def __init__(self, backend: SpeechBackend, notify: Callable[[], None]) -> None:
        super().__init__(backend, notify)
        self.backend = backend
        self._sounds = Interrupts(backend.interrupt_sound, self.inbox.has_come)
        self._most_parts = backend.n_slots

    # -- from any thread

    def check(self, task: AnyTask) -> None:
        self.check_works()
        if not isinstance(task, SpeechTask):
            raise NotSupportedError("This model speaks, and does nothing else.")
        if not task.pieces or not all(map(len, task.pieces)):
            raise InvalidRequestError.at(task.param, "has nothing to say.")
        task.prompt.check(self.vocab.n_tokens, task.param)
        # One cell at least is for sound.
        n_rows, most = self.backend.n_prompt(task), self.n_ctx_seq - 1
        if n_rows > most:
            raise InputTooLongError(
                n_rows,
                most,
                f"'{task.param}' is too large: a sentence with its voice takes {n_rows} tokens, "
                f"where the context of the model holds {most}.",
                param=task.param,
            )

    def cancel(self, task_id: int) -> None:
        super().cancel(task_id)
        self._sounds.cancel(task_id)

    # -- on the inference thread

    @property
    def has_work(self) -> bool:
        if any(not request.is_paused for request in self._running):
            return True
        return bool(self._free_slots) and len(self._waiting) > 0

    def _obey(self, command: Command) -> None:
        match command:
            case Submit(SpeechTask() as task):
                self._waiting.push(SpeechState(task))
            case Cancel(task_id):
                self._drop(task_id)
            case Pause(task_id, paused):
                waiting = self._waiting.get(task_id)
                for request in (*self._running, *([waiting] if waiting else [])):
                    if request.task.id == task_id:
                        request.is_paused = paused

    def _remove(self, request: SpeechState) -> None:
        super()._remove(request)
        self.backend.forget(request.slot)
        request.close()

    def _fail_all(self, error: EngineError) -> None:
        for request in self._running:
            request.close()
        super()._fail_all(error)

    def _close(self) -> None:
        for request in self._running:
            request.close()
        super()._close()

    def _step(self) -> bool:
        counters = self._counters
        counters.steps += 1
        self._admit()
        for request in [one for one in self._running if one.utterance is None]:
            self._try(self._begin, request)
        self._n_readers = len(self._running)
        parts = self._pack()
        if parts:
            self._collect(parts, self._compute(parts))
        due = [one for one in self._running if one.is_due and not one.is_paused]
        if due:  # one a step: meanwhile the others say nothing
            self._try(self._speak, min(due, key=SpeechState.turn))
        counters.step_s += monotonic() - self.heartbeat
        return self.has_work

    def _try(self, act: Callable[..., None], request: SpeechState, *args: object) -> None:
        """Do something for a request, which fails alone."""
        try:
            act(request, *args)
        except TrioServeError as error:
            self._fail(request, error)

    def _begin(self, request: SpeechState) -> None:
        request.utterance = self.backend.utterance(request.task)
        request.begin(0)

    def _pack(self) -> _Parts:
        """Fill a batch: with the rows of frames, and then with texts, in the order of admission."""
        parts, room = list[tuple[SpeechState, Rows]](), self._n_batch
        ready = [one for one in self._running if not (one.is_paused or one.is_due)]
        for request in sorted(ready, key=lambda one: one.is_text)[: self._most_parts]:
            if n_rows := min(room, len(request.rows)):
                rows, is_last = request.rows[:n_rows], n_rows == len(request.rows)
                parts.append((request, Rows(rows, request.pos, request.slot, is_last)))
                room -= n_rows
        return parts

    def _compute(self, parts: _Parts) -> Sequence[int]:
        """Compute a batch; returns the row of each part, or nothing."""
        batch, found = [rows for _, rows in parts], list[int]()
        sizes = [len(rows.rows) for rows in batch]
        n_rows, largest = sum(sizes), max(sizes)
        try:
            with self._interrupts.watching():
                if largest >= MIN_INTERRUPTED:
                    task_id = parts[sizes.index(largest)][0].task.id
                    self._interrupts.begin(task_id, largest, n_rows - largest)
                self._threads.run(n_rows, lambda: found.extend(self.backend.decode(batch)))
        except DecodeInterruptedError:
            return ()
        except KVCacheFullError as error:
            if len(parts) > 1:  # nothing was computed: try with less
                self._most_parts = len(parts) // 2
            else:
                self._fail(parts[0][0], error)
            return ()
        except DecodeError as error:
            for request, _ in parts:
                self._fail(request, error)
            return ()
        self._most_parts = self.n_slots
        return found

    def _collect(self, parts: _Parts, rows: Sequence[int]) -> None:
        """Make frames of the outputs of a batch."""
        if not rows:
            return
        n_text = sum(len(part.rows) for request, part in parts if request.is_text)
        n_frames = sum(part.wanted for _, part in parts)
        self._count_batch((request for request, _ in parts), n_frames, n_text)
        for (request, part), row in zip(parts, rows, strict=True):
            request.advance(len(part.rows))
            self._counters.n_tokens_max = max(self._counters.n_tokens_max, request.pos)
            if part.wanted:
                self._try(SpeechState.add_frame, request, row, self.n_ctx_seq)

    def _speak(self, request: SpeechState) -> None:
        """Send the new frames as sound; after the end of a text, begin with the next one."""
        assert request.utterance is not None
        try:
            with self._sounds.watching():
                self._sounds.begin(request.task.id, 1, 0)
                samples = request.utterance.sound()
        except DecodeInterruptedError:  # it is cancelled, or has its turn again
            return
        if len(samples):
            request.is_heard = True
            self._emit(Sound(request.task.id, samples, request.piece))
        if request.end is None:
            return
        if request.end is FinishReason.EOS and request.piece + 1 < len(request.task.pieces):
            self.backend.forget(request.slot, request.begin(request.piece + 1))
            return
        self._remove(request)
        self._emit(
            Spoken(
                task_id=request.task.id,
                reason=request.end,
                timings=request.timings(),
                slot_id=request.slot,
            )
        )

    # -- a look at it

    def _n_held(self) -> int:
        return sum(request.pos for request in self._running)

    def _slot_status(self, request: SpeechState) -> SlotStatus:
        return SlotStatus(
            id=request.slot,
            state="prefill" if request.is_text else "decode",
            n_ctx=self.n_ctx_seq,
            task_id=request.task.id,
            n_prompt=len(request.task.prompt),
            n_past=request.pos,
            n_decoded=request.n_frames,
            paused=request.is_paused,
        )
