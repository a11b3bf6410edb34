"""The batch of a scripted backend."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trioserve.types import TokenId


@attrs.define
class ScriptedBatch:
    """The rows of the next decode: token, position, sequence, whether logits are wanted."""

    n_batch: int
    rows: list[tuple[TokenId, int, int, bool]] = attrs.field(factory=list)

    def clear(self) -> None:
        """Forget all rows."""
        self.rows.clear()

    def add(self, token: TokenId, pos: int, seq: int, *, logits: bool) -> int:
        """Append a row."""
        assert len(self.rows) < self.n_batch, "the batch is full"
        self.rows.append((token, pos, seq, logits))
        return len(self.rows) - 1

    def add_each(
        self, tokens: Sequence[TokenId], positions: Sequence[int], seqs: Sequence[int]
    ) -> range:
        """Append a row with logits for each sequence."""
        start = len(self.rows)
        for token, pos, seq in zip(tokens, positions, seqs, strict=True):
            self.add(token, pos, seq, logits=True)
        return range(start, len(self.rows))

    def extend(self, tokens: Sequence[TokenId], pos: int, seq: int) -> int:
        """Append rows without logits."""
        for i, token in enumerate(tokens):
            self.add(token, pos + i, seq, logits=False)
        return len(self.rows) - 1

    def want_logits(self, row: int) -> None:
        """Mark a row."""
        token, pos, seq, _ = self.rows[row]
        self.rows[row] = (token, pos, seq, True)
