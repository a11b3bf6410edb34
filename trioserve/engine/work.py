"""What a step decodes: `DecodeRows`, a token of each output, and `Work`, drafts and prompts."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trioserve.engine.backend import Batch
from trioserve.engine.cache.prefix_cache import PrefixCache
from trioserve.engine.cache.sequences import KVSequence
from trioserve.engine.projector import Embeddings, MediaPiece
from trioserve.engine.run import Run
from trioserve.engine.slot import Slot
from trioserve.types import CellKey, MediaChunk


@attrs.frozen
class Work:
    """Decode the next `n_cells` pending cells of a slot."""

    slot: Slot
    n_cells: int
    in_decode: bool

    def fill(self, batch: Batch) -> int:
        """Put them into the batch; returns the row to sample from.

        That is the last one. It has logits if nothing is pending then. Where there is a draft, it
        is the row before the draft, and each row of the draft has logits, too.
        """
        run, seq = self.slot.run, self.slot.seq
        assert run is not None and seq is not None
        start = len(seq.held)
        pos, keys = seq.position(start), run.keys[start : start + self.n_cells]
        row = batch.extend(keys, pos, seq.id)
        if start + len(keys) == len(run.keys):
            batch.want_logits(row)
        for i, guess in enumerate(run.draft, start=len(keys)):
            batch.add(guess, pos + i, seq.id, logits=True)
        return row

    def note(self, cache: PrefixCache) -> None:
        """Note that they were decoded."""
        run, seq = self.slot.run, self.slot.seq
        assert run is not None and seq is not None
        start = len(seq.held)
        cache.append(seq, run.keys[start : start + self.n_cells] + run.draft)
        run.n_ahead = 0


@attrs.frozen
class MediaWork(Work):
    """Decode the next `n_cells` cells of a chunk of media, which a prompt has come to."""

    chunk: MediaChunk
    embeddings: Embeddings = attrs.field(repr=False)

    def piece(self) -> MediaPiece:
        """Say what the backend is to decode."""
        run, seq = self.slot.run, self.slot.seq
        assert run is not None and seq is not None
        span = run.task.prompt.span_from(len(seq.held))
        assert span is not None and span[1] is self.chunk
        start = len(seq.held) - span[0]
        return MediaPiece(
            chunk=self.chunk,
            embeddings=self.embeddings,
            start=start,
            stop=start + self.n_cells,
            pos=seq.position(span[0]),
            seq=seq.id,
            logits=len(seq.held) + self.n_cells == len(run.keys),
        )


@attrs.frozen
class DecodeRows:
    """Slots in decode that have no draft: each goes on by its newest token.

    That is nearly all of what steps do, for up to hundreds of slots, so what is needed of them is
    in columns.
    """

    slots: Sequence[Slot]
    runs: Sequence[Run]
    seqs: Sequence[KVSequence]
    keys: Sequence[CellKey]  # the newest of each

    @classmethod
    def of(cls, slots: Sequence[Slot]) -> DecodeRows:
        """Look at the slots."""
        runs = [slot.run for slot in slots if slot.run is not None]
        seqs = [slot.seq for slot in slots if slot.seq is not None]
        return cls(slots, runs, seqs, [run.keys[-1] for run in runs])

    def fill(self, batch: Batch) -> range:
        """Put them into the batch; returns the row of each."""
        positions = [
            seq.position(len(seq.held)) if seq.folds else len(seq.held) for seq in self.seqs
        ]
        return batch.add_each(self.keys, positions, [seq.id for seq in self.seqs])


@attrs.frozen
class Plan:
    """What a step decodes."""

    decode_rows: DecodeRows
    others: Sequence[Work]  # drafts, and parts of prompts: tokens of all of them, or media
    is_media: bool = False

    @classmethod
    def of(cls, steps: list[Slot], others: list[Work], *, by_sequence: bool) -> Plan:
        """Make a plan: one token each of `steps`, and others.

        With `by_sequence`, the rows of a batch are in the order of their sequences. In a split KV
        cache, llama.cpp computes those together whose sequences have consecutive numbers.
        """
        if not by_sequence:
            return cls(DecodeRows.of(steps), others)
        if not others:
            return cls(DecodeRows.of(sorted(steps, key=_sequence)), others)
        pieces = [*others, *(Work(slot, 1, in_decode=True) for slot in steps)]
        return cls(DecodeRows.of([]), sorted(pieces, key=lambda piece: _sequence(piece.slot)))

    @classmethod
    def of_media(cls, works: Sequence[MediaWork]) -> Plan:
        """Make a plan of nothing but media."""
        return cls(DecodeRows.of([]), works, is_media=True)

    def __len__(self) -> int:
        """Count the slots in it."""
        return len(self.decode_rows.slots) + len(self.others)

    @property
    def slots(self) -> list[Slot]:
        """The slots, in the order of the rows of `fill`."""
        return [*self.decode_rows.slots, *(piece.slot for piece in self.others)]

    @property
    def n_cells(self) -> int:
        """How many cells it fills."""
        return len(self.decode_rows.slots) + sum(piece.n_cells for piece in self.others)

    @property
    def n_prefill(self) -> int:
        """How many cells of prompts it fills."""
        return sum(piece.n_cells for piece in self.others if not piece.in_decode)

    @property
    def n_decode(self) -> int:
        """How many outputs go on."""
        return len(self) - sum(not piece.in_decode for piece in self.others)

    def fill(self, batch: Batch) -> list[int]:
        """Put all of it into the batch; returns the row to sample from of each slot."""
        return [*self.decode_rows.fill(batch), *(piece.fill(batch) for piece in self.others)]

    def media(self) -> list[MediaPiece]:
        """Say what of media is to be decoded, in the order of the slots."""
        return [work.piece() for work in self.others if isinstance(work, MediaWork)]

    def note(self, cache: PrefixCache) -> None:
        """Note that all of it was decoded."""
        cache.append_each(self.decode_rows.seqs, self.decode_rows.keys)
        for piece in self.others:
            piece.note(cache)


def _sequence(slot: Slot) -> int:
    assert slot.seq is not None
    return slot.seq.id
