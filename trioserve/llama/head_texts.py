"""What a drafting head has read of each sequence, and the sequences of model and head as one.

A head reads a token together with the hidden row that the model computed at the position before::

    token             t0    t1    t2    t3    t4         the newest, which the model has not read
    row of the model  r0    r1    r2    r3
    the head reads    -,t0  r0,t1 r1,t2 r2,t3 r3,t4      the last one gives the first guess

Rows exist only for the batch that was just decoded. So they are kept until the head reads them, and
the last ones longer, for a text that is cut there and continued. Where a text is cut further back,
the row is missing, and the head gets zeros for that one position.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from trioserve.errors import InvalidRequestError
from trioserve.llama.context import Memory
from trioserve.types import TokenId

Rows = NDArray[np.float32]

#: Rows of each sequence that are kept after the head has read them.
KEPT_ROWS = 16

#: Behind a saved state: sizes of its parts, and a mark.
_TAIL = struct.Struct("<i?QQQIQ8s")
_MARK = b"trioHEAD"


@attrs.define
class HeadText:
    """One sequence, which has the same number in the model's context and in the head's.

    ::

        model   | ................................................. |
        head    | read ............... | guesses of the last draft |
                0                 n_read         n_read + len(tokens)
                      | before ...... | rows ........ |
    """

    id: int
    n_read: int = 0
    #: Positions that the head has not read yet: their tokens, and their rows.
    tokens: list[TokenId] = attrs.field(factory=list)
    rows: list[Rows] = attrs.field(factory=list)
    #: The last rows before them; empty where they are missing.
    before: Rows | None = None
    #: From here on, the head's sequence has what is not of the text; None: it has no such cells.
    stale_from: int | None = None
    #: The head has not seen what came before: the next position is where it begins.
    is_adrift: bool = False

    @property
    def end(self) -> int:
        """The position that the model computes next."""
        return self.n_read + len(self.tokens)

    def append(self, pos: int, tokens: Sequence[TokenId], rows: Rows) -> None:
        """Take what the model has just computed from `pos` on."""
        if self.is_adrift or pos != self.end:
            before = self.before if self.is_adrift else None
            self.begin_at(pos, before)
        self.tokens += tokens
        self.rows.append(rows)

    def begin_at(self, pos: int, before: Rows | None = None) -> None:
        """Forget all, and continue at a position, with the rows before it."""
        self.n_read, self.before = pos, before
        self.tokens, self.rows = [], []
        self.stale_from, self.is_adrift = 0, False

    def note_guesses(self) -> None:
        """Note that the head has gone on with guesses."""
        if self.stale_from is None:
            self.stale_from = self.n_read

    def skip(self, row: Rows) -> None:
        """Note that the model has read something that the head cannot: its last row."""
        self.begin_at(self.end, row)
        self.is_adrift = True

    def cut(self, length: int) -> None:
        """Shorten it to `length` positions."""
        if self.is_adrift or not length:
            self.begin_at(length)
        elif length >= self.n_read:
            n_left = length - self.n_read
            if n_left < len(self.tokens):
                self.rows = [np.concatenate(self.rows)[:n_left]] if n_left else []
                del self.tokens[n_left:]
        else:
            n_gone = self.n_read - length
            kept = None
            if self.before is not None and n_gone < len(self.before):
                kept = self.before[:-n_gone]
            self.n_read, self.before = length, kept
            self.tokens, self.rows = [], []
            self.stale_from = length if self.stale_from is None else min(self.stale_from, length)

    def unread(self, width: int) -> Rows:
        """Return the row before each position that was not read, and the last row: one more."""
        first = np.zeros((1, width), np.float32) if self.before is None else self.before[-1:]
        return np.concatenate([first, *self.rows])

    def settle(self) -> None:
        """Note that the head has read all."""
        known = [] if self.before is None else [self.before]
        if rows := [*known, *self.rows]:
            self.before = np.concatenate(rows)[-KEPT_ROWS:].copy()
        self.n_read = self.end
        self.tokens, self.rows = [], []

    def take(self, other: HeadText) -> None:
        """Become a copy of another text. Rows are never changed, so both may have the same."""
        self.n_read, self.before = other.n_read, other.before
        self.tokens, self.rows = list(other.tokens), list(other.rows)
        self.stale_from, self.is_adrift = other.stale_from, other.is_adrift


class HeadMemory:
    """The sequences of a model together with those of its head: `KVMemory` of both.

    Whatever happens to a sequence of the model happens to the head's sequence of the same number.

    Args:
        model: the sequences of the model.
        head: those of the head, in a unified cache.
        texts: what the head has read.
        width: numbers in a row.
        shift: by how many positions the head is behind: 1 if the cell of a token is at the
            position before it.
    """

    def __init__(
        self, model: Memory, head: Memory, texts: Sequence[HeadText], *, width: int, shift: int
    ) -> None:
        self._model, self._head = model, head
        self._texts = texts
        self._width, self._shift = width, shift

    def tidy(self, text: HeadText) -> None:
        """Remove from the head's sequence what is not of the text."""
        if text.stale_from is not None:
            self._head.remove(text.id, text.stale_from - self._shift)
            text.stale_from = None

    def forget(self, text: HeadText) -> None:
        """Empty the head's sequence. It continues with the next token of the text."""
        is_adrift = text.is_adrift
        text.settle()
        text.begin_at(text.n_read, text.before)
        text.is_adrift = is_adrift
        self.tidy(text)

    def remove(self, seq: int, start: int) -> bool:
        """See `Memory.remove`."""
        could = self._model.remove(seq, start)
        self._texts[seq].cut(max(0, start))
        if not start:
            self._head.remove(seq, 0)  # its cells are free at once
        return could

    def trim(self, seq: int, n_cells: int) -> None:
        """See `Memory.trim`."""
        self._model.trim(seq, n_cells)

    def copy(self, source: int, target: int) -> None:
        """See `Memory.copy`."""
        self._model.copy(source, target)
        if source != target:
            self.tidy(self._texts[source])
            self._head.remove(target, 0)
            self._head.copy(source, target)
            self._texts[target].take(self._texts[source])

    def first(self, seq: int) -> int:
        """See `Memory.first`."""
        return self._model.first(seq)

    def last(self, seq: int) -> int:
        """See `Memory.last`."""
        return self._model.last(seq)

    def size(self, seq: int, *, partial: bool = False) -> int:
        """See `Memory.size`."""
        size = self._model.size(seq, partial=partial)
        if partial:
            return size
        text = self._texts[seq]
        self.tidy(text)
        n_bytes = sum(rows.nbytes for rows in text.rows) + 4 * len(text.tokens)
        n_bytes += 0 if text.before is None else text.before.nbytes
        return size + self._head.size(seq) + n_bytes + _TAIL.size

    def save(self, seq: int, *, partial: bool = False) -> bytes:
        """See `Memory.save`. The state of the head follows that of the model."""
        state = self._model.save(seq, partial=partial)
        if partial:
            return state
        text = self._texts[seq]
        self.tidy(text)
        of_head = self._head.save(seq)
        before = b"" if text.before is None else text.before.tobytes()
        rows = b"".join(one.tobytes() for one in text.rows)
        tokens = np.array(text.tokens, np.int32).tobytes()
        tail = _TAIL.pack(
            text.n_read,
            text.is_adrift,
            len(before),
            len(rows),
            len(of_head),
            self._width,
            len(state),
            _MARK,
        )
        return b"".join((state, of_head, before, rows, tokens, tail))

    def restore(self, seq: int, data: bytes) -> None:
        """See `Memory.restore`. A state without that of a head is one of the model."""
        state, of_head = split(data)
        self._model.restore(seq, state)
        text = self._texts[seq]
        self._head.remove(seq, 0)
        text.begin_at(self._model.last(seq) + 1)
        text.is_adrift = True
        if of_head:
            self._restore_head(text, of_head)

    def _restore_head(self, text: HeadText, data: memoryview) -> None:
        n_read, is_adrift, n_before, n_rows, size, width, _, _ = _TAIL.unpack(data[-_TAIL.size :])
        if width != self._width:
            return
        try:
            self._head.restore(text.id, bytes(data[:size]))
        except InvalidRequestError:
            return  # there is no room for it
        before, rows = data[size : size + n_before], data[size + n_before :][:n_rows]
        tokens = data[size + n_before + n_rows : -_TAIL.size]
        text.n_read, text.stale_from = n_read, None
        text.before = _rows(before, width) if n_before else None
        if tokens:
            text.tokens = np.frombuffer(tokens, np.int32).tolist()
            text.rows = [_rows(rows, width)]
        text.is_adrift = is_adrift

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


def _rows(data: memoryview, width: int) -> Rows:
    return np.frombuffer(data, np.float32).reshape(-1, width)
