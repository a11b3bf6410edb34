"""The text that a head has read of each sequence, and the sequences of model and head as one.

A head reads a token together with the hidden row that the model computed at the position before::

    token             t0    t1    t2    t3    t4         the newest, which the model has not read
    row of the model  r0    r1    r2    r3
    the head reads    -,t0  r0,t1 r1,t2 r2,t3 r3,t4      the last one gives the first guess

Rows exist only for the batch that was just decoded. So they are kept until the head reads them,
which may be much later, and the last one longer, for the next token. Where a text is cut further
back, the row before its end is gone: the model computes the last token again, which has it.
Positions without rows are a gap. In the head's sequence, what is behind it follows what is before::

    text              t0 t1 t2 t3 t4 t5 t6 t7 t8 t9
    the head reads    t0 t1 t2 t3    gap    t7 t8 t9
    at                 0  1  2  3            4  5  6
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import attrs
import numpy as np
from numpy.typing import NDArray

from trioserve.errors import InvalidRequestError
from trioserve.llama.context import Memory
from trioserve.types import TokenId

Rows = NDArray[np.float32]

#: Behind a saved state: sizes of its parts, and a mark.
_TAIL = struct.Struct("<i??IIQIQ8s")
_MARK = b"trioHED2"


@attrs.define
class HeadText:
    """One sequence, which has the same number in the model's context and in the head's.

    ::

        model   | ................................................. |
        head    | read .... | gap | read | guesses of the last draft |
                0                      n_read         n_read + len(tokens)
                                before | | rows ...... |
    """

    id: int
    #: By how many positions the head is behind: 1 if the cell of a token is at the position before.
    shift: int = 0
    n_read: int = 0
    #: Positions that the head has not read yet: their tokens, and their rows.
    tokens: list[TokenId] = attrs.field(factory=list)
    rows: list[Rows] = attrs.field(factory=list)
    #: The row before them, of shape (1, width); None: it is missing.
    before: Rows | None = None
    #: Parts before `n_read` that the head never reads: the first position of each, and its end.
    gaps: list[tuple[int, int]] = attrs.field(factory=list)
    #: Behind what was read, the head's sequence has cells that are not of the text.
    is_stale: bool = False
    #: The model has read something else, so the next position may be any.
    is_adrift: bool = False
    #: The last token that was read, if the model computes it again for its row.
    repeated: TokenId | None = None

    @property
    def end(self) -> int:
        """The position that the model computes next, or once it has computed a token again."""
        return self.n_read + len(self.tokens)

    @property
    def n_cells(self) -> int:
        """The number of the head's cells for the text so far; -1 for no token, with a shift."""
        return self.n_read - sum(stop - start for start, stop in self.gaps) - self.shift

    def append(self, pos: int, tokens: Sequence[TokenId], rows: Rows) -> None:
        """Take what the model has just computed from `pos` on. The rows are kept."""
        if self.repeated is not None:
            token, self.repeated = self.repeated, None
            if pos == self.n_read - 1 and tokens[0] == token:
                self.before = rows[:1].copy()
                pos, tokens, rows = pos + 1, tokens[1:], rows[1:]
        if pos != self.end or self.is_adrift:
            self._move(pos, self.before if self.is_adrift else None)
        if tokens:
            self.tokens += tokens
            self.rows.append(rows)

    def _move(self, pos: int, before: Rows | None = None) -> None:
        """Forget what is not read, and continue at any position, with the row before it."""
        self.tokens, self.rows, self.before = [], [], before
        self.is_adrift, self.repeated = False, None
        if pos < self.n_read:
            self.is_stale = True
            while self.gaps and self.gaps[-1][1] > pos:
                start, _ = self.gaps.pop()
                if start < pos:
                    self.gaps.append((start, pos))
        elif pos > self.n_read:
            # Its first cell is at the first position: a shift leaves out the first token of a text.
            start = max(self.n_read, self.shift)
            if self.gaps and self.gaps[-1][1] == start:
                start, _ = self.gaps.pop()
            self.gaps += [(start, pos)] if start < pos else []
        self.n_read = pos

    def skip(self, row: Rows) -> None:
        """Note that the model has read something that the head cannot: its last row."""
        self.tokens, self.rows, self.before = [], [], row
        self.is_adrift = True

    def drift(self) -> None:
        """Note that the model has another text, and the head has read nothing."""
        self._move(0)
        self.is_adrift = True

    def cut(self, length: int) -> None:
        """Shorten it to `length` positions."""
        if length < self.n_read or self.is_adrift:
            self._move(length)
        elif (n_left := length - self.n_read) < len(self.tokens):
            self.rows = [np.concatenate(self.rows)[:n_left]] if n_left else []
            del self.tokens[n_left:]

    def unread(self, width: int, n: int) -> Rows:
        """Return the row before each of the next `n` positions, and the last row: one more."""
        first = np.zeros((1, width), np.float32) if self.before is None else self.before
        return np.concatenate([first, *self.rows])[: n + 1]

    def settle(self, n: int) -> None:
        """Note that the head has read the next `n` positions."""
        if not n:
            return
        rows = np.concatenate(self.rows)
        self.before = rows[n - 1 : n].copy()
        self.rows = [rows[n:].copy()] if n < len(rows) else []
        del self.tokens[:n]
        self.n_read += n

    def drop(self, n: int) -> None:
        """Never read the next `n` positions."""
        tokens = self.tokens[n:]
        rows = np.concatenate(self.rows)
        self._move(self.n_read + n, rows[n - 1 : n].copy())
        self.tokens, self.rows = tokens, [rows[n:].copy()] if tokens else []

    def forget(self) -> None:
        """Note that the head has lost its sequence, which continues with the next token."""
        before = self.rows[-1][-1:].copy() if self.rows else self.before
        end, is_adrift = self.end - (self.repeated is not None), self.is_adrift
        self._move(0)
        self._move(end, before)
        self.is_adrift, self.is_stale = is_adrift, True

    def take(self, other: HeadText) -> None:
        """Become a copy of another text. Rows are never changed, so both may have the same."""
        self.n_read, self.before, self.gaps = other.n_read, other.before, list(other.gaps)
        self.tokens, self.rows = list(other.tokens), list(other.rows)
        self.is_stale, self.is_adrift = other.is_stale, other.is_adrift
        self.repeated = other.repeated


#: Tokens, positions, sequences and rows of a batch.
Batch = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], Rows]


class HeadTexts:
    """The texts of all sequences. What is new is sorted by text when one of them is looked at."""

    def __init__(self, n_seqs: int, shift: int) -> None:
        self._all = [HeadText(i, shift) for i in range(n_seqs)]
        self._log: list[Batch] = []
        self.n_logged = 0  # rows that are not sorted yet

    def log(self, batch: Batch) -> None:
        """Take what the model has just computed. The arrays are kept."""
        self._log.append(batch)
        self.n_logged += len(batch[0])

    def __getitem__(self, seq: int) -> HeadText:
        self._sort()
        return self._all[seq]

    def __iter__(self) -> Iterator[HeadText]:
        self._sort()
        return iter(self._all)

    def _sort(self) -> None:
        if not self._log:
            return
        log, self._log, self.n_logged = self._log, [], 0
        columns = map(np.concatenate, zip(*log, strict=True)) if len(log) > 1 else log[0]
        tokens, positions, seqs, rows = columns
        order = np.argsort(seqs, kind="stable")
        bounds = (np.flatnonzero(np.diff(seqs[order])) + 1).tolist()
        for start, stop in pairwise([0, *bounds, len(order)]):
            own = order[start:stop]
            text = self._all[seqs[own[0]]]
            text.append(int(positions[own[0]]), tokens[own].tolist(), rows[own])


class NoCells:
    """The sequences of a head that keeps nothing of them."""

    def last(self, seq: int) -> int:
        """Say that there is nothing, as of an empty sequence."""
        return -1

    def remove(self, seq: int, start: int) -> bool:
        """Do nothing."""
        return True

    def copy(self, source: int, target: int) -> None:
        """Do nothing."""

    def size(self, seq: int) -> int:
        """Return the size of nothing."""
        return 0

    def save(self, seq: int) -> bytes:
        """Return nothing."""
        return b""

    def restore(self, seq: int, data: bytes) -> None:
        """Do nothing."""


class HeadMemory:
    """The sequences of a model together with those of its head: `KVMemory` of both.

    Whatever happens to a sequence of the model happens to the head's sequence of the same number.

    Args:
        model: the sequences of the model.
        head: those of the head, in a unified cache, or in none.
        texts: what the head has read.
        width: numbers in a row.
        needs_rows: the head reads each token with the row before.
    """

    def __init__(
        self,
        model: Memory,
        head: Memory | NoCells,
        texts: HeadTexts,
        *,
        width: int,
        needs_rows: bool,
    ) -> None:
        self._model, self._head = model, head
        self._texts = texts
        self._width, self._needs_rows = width, needs_rows
        self.first, self.last, self.trim = model.first, model.last, model.trim

    def tidy(self, text: HeadText) -> None:
        """Remove from the head's sequence what is not of the text."""
        if text.is_stale:
            self._head.remove(text.id, max(0, text.n_cells))
            text.is_stale = False

    def forget(self, text: HeadText) -> None:
        """Empty the head's sequence. It continues with the next token of the text."""
        text.forget()
        self.tidy(text)

    def remove(self, seq: int, start: int) -> bool:
        """See `Memory.remove`."""
        could = self._model.remove(seq, start)
        self._texts[seq].cut(max(0, start))
        if not start:
            self._head.remove(seq, 0)  # its cells are free at once
        return could

    def step_back(self, seq: int, token: TokenId) -> bool:
        """See `KVMemory.step_back`: the row of the last token may be missing."""
        text = self._texts[seq]
        if text.repeated is not None:  # by a request that ended before it had it
            text.cut(text.end - 1)
        is_known = text.before is not None or bool(text.tokens) or text.is_adrift
        last = self._model.last(seq)
        if is_known or not self._needs_rows or not text.end == last + 1 > 0:
            return False
        if not self._model.remove(seq, last):
            return False
        text.repeated = token
        return True

    def copy(self, source: int, target: int) -> None:
        """See `Memory.copy`."""
        self._model.copy(source, target)
        if source != target:
            self.tidy(self._texts[source])
            self._head.remove(target, 0)
            self._head.copy(source, target)
            self._texts[target].take(self._texts[source])

    def size(self, seq: int, *, partial: bool = False) -> int:
        """See `Memory.size`."""
        size = self._model.size(seq, partial=partial)
        if partial:
            return size
        text = self._texts[seq]
        self.tidy(text)
        n_bytes = sum(rows.nbytes for rows in text.rows) + 4 * len(text.tokens)
        n_bytes += 8 * len(text.gaps) + (0 if text.before is None else text.before.nbytes)
        return size + self._head.size(seq) + n_bytes + _TAIL.size

    def save(self, seq: int, *, partial: bool = False) -> bytes:
        """See `Memory.save`. The state of the head follows that of the model."""
        state = self._model.save(seq, partial=partial)
        if partial:
            return state
        text = self._texts[seq]
        if text.repeated is not None:
            text.cut(text.end - 1)
        self.tidy(text)
        of_head = self._head.save(seq)
        tail = _TAIL.pack(
            text.n_read,
            text.before is not None,
            text.is_adrift,
            len(text.tokens),
            len(text.gaps),
            len(of_head),
            self._width,
            len(state),
            _MARK,
        )
        rows = [] if text.before is None else [text.before]
        numbers = np.array([*text.tokens, *chain.from_iterable(text.gaps)], np.int32)
        parts = [one.tobytes() for one in (*rows, *text.rows, numbers)]
        return b"".join((state, of_head, *parts, tail))

    def restore(self, seq: int, data: bytes) -> None:
        """See `Memory.restore`. A state without that of a head is one of the model."""
        state, of_head = split(data)
        self._model.restore(seq, state)
        self._head.remove(seq, 0)
        self._texts[seq].drift()
        if of_head:
            self._restore_head(self._texts[seq], of_head)

    def _restore_head(self, text: HeadText, data: memoryview) -> None:
        tail = _TAIL.unpack(data[-_TAIL.size :])
        n_read, has_before, is_adrift, n_tokens, n_gaps, size, width, _, _ = tail
        if width != self._width:
            return
        try:
            self._head.restore(text.id, bytes(data[:size]))
        except InvalidRequestError:
            return  # there is no room for it
        n_rows = has_before + n_tokens
        rows = np.frombuffer(data, np.float32, n_rows * width, size).reshape(n_rows, width).copy()
        start = size + rows.nbytes
        numbers = np.frombuffer(data, np.int32, n_tokens + 2 * n_gaps, start).tolist()
        text.n_read, text.is_adrift, text.is_stale = n_read, is_adrift, False
        text.before = rows[:1] if has_before else None
        text.tokens, text.rows = numbers[:n_tokens], [rows[has_before:]] if n_tokens else []
        bounds = numbers[n_tokens:]
        text.gaps = list(zip(bounds[::2], bounds[1::2], strict=True))

    def rewind(self, seq: int, length: int, data: bytes) -> bool:
        """See `Memory.rewind`."""
        could = self._model.rewind(seq, length, data)
        self.remove(seq, length if could else 0)
        return could


def split(data: bytes) -> tuple[bytes, memoryview]:
    """Divide a saved state into that of the model, and that of the head, which may be empty."""
    if len(data) < _TAIL.size or not data.endswith(_MARK):
        return data, memoryview(b"")
    size = _TAIL.unpack(data[-_TAIL.size :])[-2]
    return data[:size], memoryview(data)[size:]
