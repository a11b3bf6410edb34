"""A slot: a place for one running request."""

from __future__ import annotations

import enum

from trioserve.engine.cache.checkpoints import next_place
from trioserve.engine.cache.sequences import KVSequence
from trioserve.engine.run import Run
from trioserve.errors import PermissionDeniedError
from trioserve.types import CacheRoot, CellKey, MediaChunk, SlotStatus, Task


class SlotState(enum.Enum):
    """What a slot does. It goes around: idle, prefill, decode, idle."""

    IDLE = "idle"
    PREFILL = "prefill"
    DECODE = "decode"


class Slot:
    """One slot, and the KV sequence that its run was given.

    ::

        run.keys, run.draft | seq.held ........... | pending ..... |
                            0          len(seq.held)
    """

    __slots__ = (
        "awaits_media",
        "id",
        "in_decode",
        "kept",
        "last_task",
        "last_used",
        "root",
        "run",
        "seq",
    )

    def __init__(self, slot_id: int) -> None:
        self.id = slot_id
        self.run: Run | None = None
        self.seq: KVSequence | None = None
        self.in_decode = False  # the run has logits to go on from, one token a step
        self.awaits_media = False  # its prompt has come to a chunk that is not encoded yet
        self.last_used = 0  # the step in which it was last given up
        self.last_task: Task | None = None
        #: While it is idle: the keys of what it computed last, and their root. Its sequence may be
        #: anything by now; the prefix cache knows what is left of them.
        self.kept: list[CellKey] = []
        self.root = CacheRoot()

    @property
    def state(self) -> SlotState:
        """What the slot does now."""
        if self.run is None:
            return SlotState.IDLE
        return SlotState.DECODE if self.in_decode else SlotState.PREFILL

    @property
    def n_held(self) -> int:
        """How many cells of the KV cache hold its run."""
        return 0 if self.seq is None else len(self.seq.held)

    @property
    def n_pending(self) -> int:
        """How many cells of its run are still to be decoded."""
        run = self.run
        return 0 if run is None else len(run.keys) + len(run.draft) - self.n_held

    @property
    def has_work(self) -> bool:
        """Whether it can go on in a step."""
        return self.run is not None and not self.run.paused and not self.awaits_media

    def room_for_draft(self, n_ctx: int) -> int:
        """How many tokens a draft may have in decode, in a sequence of `n_ctx` tokens.

        None while the next token is forced, or reasoning may have to be closed.
        """
        run = self.run
        assert run is not None and self.in_decode
        return 0 if run.forced or not run.is_free else max(0, n_ctx - len(run.keys) - 1)

    def up_to_place(self, n_cells: int) -> int:
        """Shorten a chunk of the prompt to end where a checkpoint is made."""
        if self.run is None or not self.run.places:
            return n_cells
        place = next_place(self.run.places, self.n_held)
        return n_cells if place is None else min(n_cells, place - self.n_held)

    # -- media in the prompt

    def _span(self) -> tuple[int, MediaChunk] | None:
        """Find the chunk that its next cell is of, or else the next one, and where it begins."""
        return None if self.run is None else self.run.task.prompt.span_from(self.n_held)

    def media_now(self) -> MediaChunk | None:
        """Return the chunk that its next cell is of; None: that is a token."""
        span = self._span()
        return span[1] if span is not None and span[0] <= self.n_held else None

    def media_ahead(self) -> list[MediaChunk]:
        """List the chunks of the prompt that are not held whole, unless the run is paused."""
        run = self.run
        if run is None or run.paused or self.in_decode:
            return []
        spans = run.task.prompt.spans
        return [chunk for start, chunk in spans if start + chunk.n_cells > self.n_held]

    def needs(self, chunk: MediaChunk) -> bool:
        """Whether the prompt has yet to get to a chunk, or one like it."""
        return any(one.id == chunk.id for one in self.media_ahead())

    @property
    def is_at_media(self) -> bool:
        """Whether it goes on with media."""
        return self.media_now() is not None

    @property
    def n_alike(self) -> int:
        """How many cells a step may have of a prompt: tokens up to media, or media to their end."""
        span = self._span()
        if span is None:
            return self.n_pending
        start, chunk = span
        return (start if start > self.n_held else start + chunk.n_cells) - self.n_held

    def take(self, run: Run, seq: KVSequence) -> None:
        """Start a run in a sequence that holds a beginning of it."""
        assert self.run is None
        assert len(seq.held) < len(run.keys), "one cell must be decoded, to have logits"
        self.run, self.seq = run, seq
        self.in_decode = self.awaits_media = False
        self.kept, self.last_task = [], run.task

    def give_up(self, step: int) -> tuple[Run, KVSequence]:
        """Take the run out, and its sequence."""
        assert self.run is not None and self.seq is not None
        run, seq = self.run, self.seq
        self.run = self.seq = None
        run.draft, run.n_ahead = [], 0
        if run.sampler is not None:
            run.sampler.detach()
        self.in_decode = self.awaits_media = False
        self.last_used = step
        return run, seq

    def remember(self, run: Run, seq: KVSequence) -> None:
        """Note what a run has left in its sequence."""
        self.kept, self.root = run.keys[: len(seq.held)], seq.root

    def check_owner(self, owner: str) -> None:
        """Raise PermissionDeniedError if what the idle slot has computed is not the owner's."""
        assert self.run is None
        if self.kept and self.root.owner != owner:
            raise PermissionDeniedError("The slot holds the text of another API key.")

    def status(self, n_ctx: int, *, speculative: bool = False) -> SlotStatus:
        """Describe the slot."""
        run = self.run
        return SlotStatus(
            id=self.id,
            state=self.state.value,
            n_ctx=n_ctx,
            task_id=run.task.id if run else None,
            n_prompt=run.n_prompt if run else 0,
            n_past=self.n_held if run else len(self.kept),
            n_cached=run.cached if run else 0,
            n_decoded=run.n_output if run else 0,
            paused=run.paused if run else False,
            encoding=self.awaits_media,
            has_new_line=run.has_new_line if run else False,
            speculative=speculative,
            task=self.last_task,
        )


def arrival(slot: Slot) -> int:
    """Order busy slots by the arrival of their runs."""
    assert slot.run is not None
    return slot.run.task.id


def lowest_priority(slots: list[Slot]) -> Slot:
    """Find the slot whose run matters least: a paused one, or the youngest of lowest priority."""

    def importance(slot: Slot) -> tuple[bool, int, int]:
        assert slot.run is not None
        return not slot.run.paused, slot.run.task.priority, -arrival(slot)

    return min(slots, key=importance)
