"""The batch of a scripted backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs

from trioserve.engine.rollback import Rollback
from trioserve.types import TokenId


@attrs.define
class ScriptedBatch:
    """The rows of the next decode: token, position, sequence, whether logits are wanted."""

    n_batch: int
    rows: list[tuple[TokenId, int, int, bool]] = attrs.field(factory=list)

    def clear(self) -> None:
        self.rows.clear()

    def add(self, token: TokenId, pos: int, seq: int, *, logits: bool) -> int:
        assert len(self.rows) < self.n_batch, "the batch is full"
        self.rows.append((token, pos, seq, logits))
        return len(self.rows) - 1

    def add_each(
        self, tokens: Sequence[TokenId], positions: Sequence[int], seqs: Sequence[int]
    ) -> range:
        start = len(self.rows)
        for token, pos, seq in zip(tokens, positions, seqs, strict=True):
            self.add(token, pos, seq, logits=True)
        return range(start, len(self.rows))

    def advance(self, tokens: Sequence[TokenId]) -> None:
        self.rows[:] = [
            (token, pos + 1, seq, logits)
            for token, (_, pos, seq, logits) in zip(tokens, self.rows, strict=True)
        ]

    def extend(self, tokens: Sequence[TokenId], pos: int, seq: int) -> int:
        for i, token in enumerate(tokens):
            self.add(token, pos + i, seq, logits=False)
        return len(self.rows) - 1

    def want_logits(self, row: int) -> None:
        token, pos, seq, _ = self.rows[row]
        self.rows[row] = (token, pos, seq, True)


def check_evenness(rows: Sequence[tuple[TokenId, int, int, bool]], rollback: Rollback) -> None:
    """Assert that drafts are of one length, behind the other streams, and before one prompt."""
    if not rollback.is_even:
        return
    counts = Counter(seq for _, _, seq, _ in rows)
    n_outputs = Counter(seq for _, _, seq, logits in rows if logits)
    drafted = [seq for seq in counts if n_outputs[seq] > 1]
    assert len({counts[seq] for seq in drafted}) <= 1, "drafts of several lengths"
    assert all(counts[seq] == n_outputs[seq] for seq in drafted), "more than a draft"
    order = list(counts)
    others = order[order.index(drafted[-1]) + 1 :] if drafted else []
    assert len(others) <= 1, "several prompts behind drafts"
    assert order == [*(seq for seq in order if seq not in {*drafted, *others}), *drafted, *others]
