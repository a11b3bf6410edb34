"""`Work`: a slot's part of a tick."""

from __future__ import annotations

import attrs

from trioserve.engine.backend import Batch
from trioserve.engine.slot import Slot


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
        pos, stop = seq.position(start), start + self.n_cells
        if self.n_cells == 1:
            return batch.add(run.keys[start], pos, seq.id, logits=stop == len(run.keys))
        if run.draft:
            row = batch.add(run.keys[start], pos, seq.id, logits=True)
            for i, guess in enumerate(run.draft, start=1):
                batch.add(guess, pos + i, seq.id, logits=True)
            return row
        row = batch.extend(run.keys[start:stop], pos, seq.id)
        if stop == len(run.keys):
            batch.want_logits(row)
        return row
