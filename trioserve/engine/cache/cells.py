"""How many cells of the KV cache are taken, when sequences share some of them."""

from __future__ import annotations


class _Span:
    """Cells that were filled together, and how many of them each sequence still uses."""

    __slots__ = ("uses",)

    def __init__(self) -> None:
        self.uses: dict[int, int] = {}

    def __len__(self) -> int:
        return max(self.uses.values(), default=0)


class CellLedger:
    """Counts cells as llama.cpp's unified cache takes them.

    A copy of a sequence takes no cells: both use the same ones. They are free again when the last
    sequence that uses them is cut or gone::

        sequence 0   [ span a: 0..7 ][ span b: 0..2 ]
        sequence 1   [ span a: 0..4 ][ span c: 0..9 ]     8 + 3 + 10 cells
    """

    def __init__(self, n_seqs: int) -> None:
        self._spans: list[list[_Span]] = [[] for _ in range(n_seqs)]
        # The span at the end of each sequence, while no other sequence uses it: new cells go there.
        self._own: list[_Span | None] = [None] * n_seqs
        self.lengths = [0] * n_seqs
        self.taken = 0

    def append(self, seq: int, n_cells: int) -> None:
        """Note that a sequence has grown."""
        span = self._own[seq]
        if span is None:
            span = self._own[seq] = _Span()
            span.uses[seq] = 0
            self._spans[seq].append(span)
        span.uses[seq] += n_cells
        self.lengths[seq] += n_cells
        self.taken += n_cells

    def copy(self, source: int, target: int, n_cells: int) -> None:
        """Note that an empty sequence now has the first `n_cells` of another."""
        assert not self._spans[target]
        self._own[source] = None
        self.lengths[target] = n_cells
        for span in self._spans[source]:
            if n_cells <= 0:
                break
            used = min(n_cells, span.uses[source])
            span.uses[target] = used
            self._spans[target].append(span)
            n_cells -= used

    def cut(self, seq: int, length: int) -> None:
        """Note that a sequence was shortened to `length` cells."""
        spans = self._spans[seq]
        excess = self.lengths[seq] - length
        self.lengths[seq] = length
        while excess > 0:
            span = spans[-1]
            before, used = len(span), span.uses[seq]
            if used <= excess:
                del span.uses[seq]
                spans.pop()
            else:
                span.uses[seq] = used - excess
            excess -= used
            self.taken -= before - len(span)
        self._own[seq] = spans[-1] if spans and len(spans[-1].uses) == 1 else None

    def freed_by(self, seq: int) -> int:
        """How many cells would be free if a sequence were gone."""
        freed = 0
        for span in self._spans[seq]:
            others = (used for other, used in span.uses.items() if other != seq)
            freed += max(0, span.uses[seq] - max(others, default=0))
        return freed

    def taken_by(self, seqs: set[int]) -> int:
        """How many cells a set of sequences uses."""
        spans = {id(span): span for seq in seqs for span in self._spans[seq]}
        return sum(
            max(used for seq, used in span.uses.items() if seq in seqs) for span in spans.values()
        )

    def check_integrity(self, lengths: list[int]) -> None:
        """Raise AssertionError unless the ledger agrees with the lengths of the sequences."""
        spans = {id(span): span for spans in self._spans for span in spans}
        assert sum(map(len, spans.values())) == self.taken
        assert self.lengths == lengths
        for seq, length in enumerate(lengths):
            assert sum(span.uses[seq] for span in self._spans[seq]) == length
