"""The contents of every KV sequence; they are changed here and in llama.cpp at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from trioserve.engine.backend import Backend
from trioserve.engine.cache.prefix_tree import PrefixTree
from trioserve.types import CacheRoot, CellKey
from trioserve.types.media import chunk_start, n_folded, whole_chunks

#: Cells of each sequence whose memory is not given back: short texts would ask for it again soon.
KEPT = 256


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

    In a split cache, each sequence has separate cells, and the spans tell which texts are shared.
    In an elastic one, both counts matter.
    """

    def __init__(self, n_seqs: int) -> None:
        self._spans: list[list[_Span]] = [[] for _ in range(n_seqs)]
        # The span at the end of each sequence, while no other sequence uses it: new cells go there.
        self._own: list[_Span | None] = [None] * n_seqs
        self.lengths = [0] * n_seqs
        self.taken = self.total = 0  # shared cells count once, or for each sequence

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
        self.total += n_cells

    def copy(self, source: int, target: int, n_cells: int) -> None:
        """Note that an empty sequence now has the first `n_cells` of another."""
        assert not self._spans[target]
        self._own[source] = None
        self.lengths[target] = n_cells
        self.total += n_cells
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
        self.total -= excess
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

    def own(self, seq: int) -> int:
        """Count the cells of a sequence that no other sequence shares."""
        freed = 0
        for span in self._spans[seq]:
            others = (used for other, used in span.uses.items() if other != seq)
            freed += max(0, span.uses[seq] - max(others, default=0))
        return freed

    def taken_by(self, seqs: set[int]) -> int:
        """Count the cells that a set of sequences uses."""
        spans = {id(span): span for seq in seqs for span in self._spans[seq]}
        return sum(
            max(used for seq, used in span.uses.items() if seq in seqs) for span in spans.values()
        )

    def check_integrity(self, lengths: list[int]) -> None:
        """Raise AssertionError unless the ledger agrees with the lengths of the sequences."""
        spans = {id(span): span for spans in self._spans for span in spans}
        assert sum(map(len, spans.values())) == self.taken
        assert self.lengths == lengths
        assert self.total == sum(lengths)
        for seq, length in enumerate(lengths):
            assert sum(span.uses[seq] for span in self._spans[seq]) == length


@attrs.define(eq=False)
class KVSequence:
    """A sequence of the KV cache: the tokens it holds, and its checkpoints.

    ::

        held    | known .............. | not yet |
                0                                len(held)

    `held` has a key for each cell that llama.cpp holds, computed under `root`. The tree and the
    ledger of cells learn of new keys when they are asked something, not with every token.
    """

    id: int
    held: list[CellKey] = attrs.field(factory=list)
    root: CacheRoot = attrs.field(default=CacheRoot())
    running: bool = False
    last_used: int = 0
    #: Its beginning was in RAM when its request started, and before that on disk.
    from_ram: bool = False
    from_disk: bool = False
    #: The ends of chunks of media with fewer positions than cells: the number of cells up to
    #: that end, and how many of them add no position.
    folds: list[tuple[int, int]] = attrs.field(factory=list)

    def position(self, cell: int) -> int:
        """The position of a cell that is a token, or the first of a chunk.

        It may be the one that comes next.
        """
        if not self.folds:  # as nearly always
            return cell
        return cell - next((folded for end, folded in reversed(self.folds) if end <= cell), 0)

    def note_media(self) -> None:
        """Note that what is held ends in media."""
        if folded := n_folded(self.held[-1]):
            n_before = self.folds[-1][1] if self.folds else 0
            self.folds.append((len(self.held), n_before + folded))

    def fill(self, keys: list[CellKey]) -> None:
        """Set the cell keys of an empty sequence."""
        self.held, self.folds = keys, []
        if min(keys, default=0) < 0:
            ends = ((end, n_folded(key)) for end, key in enumerate(keys, start=1) if key < 0)
            n_before = 0
            for end, folded in ends:
                n_before += folded
                self.folds += [(end, n_before)] if folded else []

    def shorten(self, length: int) -> None:
        """Forget the rest. That is not in the middle of a chunk."""
        if length < len(self.held):
            assert whole_chunks(self.held, length) == length, "a chunk of media would be cut"
            del self.held[length:]
            while self.folds and self.folds[-1][0] > length:
                self.folds.pop()

    def ends_at(self, position: int) -> bool:
        """True if this can be llama.cpp's last position of these cells.

        Inside a chunk, positions are the projector's business.
        """
        if not self.held or self.held[-1] >= 0:
            return position == self.position(len(self.held)) - 1
        start = chunk_start(self.held)
        return 0 <= position - self.position(start) < len(self.held) - start


class Sequences:
    """The sequences of a backend, the tree of their keys, and the cells that they take."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._memory = backend, backend.memory
        self.all = [KVSequence(i) for i in range(backend.n_seqs)]
        self._tree = PrefixTree()
        self._window = backend.window
        self._cells = CellLedger(backend.n_seqs)
        self._n_unknown = 0  # cells that the ledger does not know yet
        #: Sequences that llama.cpp copies with the next decode, and those that it copies to.
        self._sources: set[int] = set()
        self._targets: set[int] = set()
        #: The state that was read last, and its sequence: it may be copied several times.
        self._state: tuple[int, bytes] | None = None
        #: By sequence: the length and the state that `take_back` returns to, if it needs one.
        self._before: dict[int, tuple[int, bytes]] = {}

    @property
    def taken(self) -> int:
        """Cells in use: of the cache that is nearest to being full, where there are two.

        In an elastic cache, copies do not count as long as there is room for them.
        """
        if not self._backend.unified:
            n_beyond = self._cells.total - self._backend.n_ctx_copies
            return max(self._cells.taken, n_beyond) + self._n_unknown
        if self._window:
            return max(self._cells.taken + self._n_unknown, self._in_windows(self.all))
        return self._cells.taken + self._n_unknown

    @property
    def copied(self) -> int:
        """Cells with copies that do not count as taken. A unified cache has none."""
        if self._backend.unified:
            return 0
        return self._cells.total + self._n_unknown - self.taken

    def taken_by_running(self) -> int:
        """Cells that running sequences use."""
        return self.taken_by({seq.id for seq in self.all if seq.running})

    def taken_by(self, seq_ids: set[int], n_new: int = 0, n_shared: int = 0) -> int:
        """Cells that a set of sequences uses, with another one of `n_new` cells.

        The first `n_shared` of these are a copy of what one of the set holds.
        """
        taken = self._ledger().taken_by(seq_ids)
        if not self._backend.unified:
            total = sum(len(self.all[i].held) for i in seq_ids)
            return n_new + max(taken - n_shared, total - self._backend.n_ctx_copies)
        if self._window:
            taken = max(taken, self._in_windows(self.all[i] for i in seq_ids))
        return taken + n_new - max(0, n_shared - self._window)

    def _in_windows(self, seqs: Iterable[KVSequence]) -> int:
        return sum(min(len(seq.held), self._window) for seq in seqs)

    def own(self, seq: KVSequence) -> int:
        """Count the cells of a sequence that are in no other sequence."""
        return self._ledger().own(seq.id)

    def idle(self) -> list[KVSequence]:
        """Those that no request has."""
        return [seq for seq in self.all if not seq.running]

    def can_cut(self, seq: KVSequence, length: int) -> bool:
        """True if a sequence can be cut there: anywhere, or as its window still reaches back.

        In a unified cache, copies share the cells of a window, and llama.cpp does not use a shared
        cell again that has left the windows of all: the cells would run out.
        """
        backend, window = self._backend, self._backend.sliding_window
        if backend.can_cut:
            is_whole, may_be = not (window and backend.unified), True
        else:
            is_whole, may_be = len(seq.held) <= backend.cuttable, not backend.unified and window > 0
        reach = max(0, seq.position(length) - window)
        return is_whole or (may_be and self._memory.first(seq.id) <= reach)

    def can_share(self, seq: KVSequence, length: int) -> bool:
        """True if a request can have that much of a sequence, cut or copied, without a checkpoint.

        A copy of a state lacks what is behind the window.
        """
        if seq.running and not self._backend.unified and len(seq.held) > self._backend.cuttable:
            return False
        return self.can_cut(seq, length)

    # -- looking

    def match(self, keys: list[CellKey], root: CacheRoot) -> tuple[int, list[KVSequence]]:
        """Find the longest beginning of `keys` that any sequence has, and who has it.

        It does not end within a chunk of media.
        """
        self._index()
        length, holders = self._tree.match(keys, root)
        return whole_chunks(keys, length), [self.all[i] for i in holders]

    def match_whole(self, keys: list[CellKey], root: CacheRoot) -> tuple[int, list[KVSequence]]:
        """Like `match`, of sequences that are a beginning of `keys` from end to end."""
        self._index()
        length, holders = self._tree.match_whole(keys, root)
        return length, [self.all[i] for i in holders]

    def _index(self) -> None:
        for seq in self.all:
            if seq.held and (known := self._tree.length(seq.id)) < len(seq.held):
                self._tree.extend(seq.id, seq.held[known:], seq.root)

    def _ledger(self) -> CellLedger:
        if self._n_unknown:
            for seq in self.all:
                self._count(seq)
        return self._cells

    def _count(self, seq: KVSequence) -> None:
        n_cells = len(seq.held) - self._cells.lengths[seq.id]
        if n_cells:
            self._cells.append(seq.id, n_cells)
            self._n_unknown -= n_cells

    def can_read(self, seq: KVSequence) -> bool:
        """True if its state is there: no copy to it waits for the next decode."""
        return seq.id not in self._targets

    def loadable(self) -> list[KVSequence]:
        """List the idle sequences that a state may be put into: those without a copy that waits."""
        waiting = self._sources | self._targets
        return [seq for seq in self.idle() if seq.id not in waiting]

    # -- changes

    def _decoded(self) -> None:
        self._state = None
        if self._targets:
            self._sources.clear()
            self._targets.clear()

    def append(self, seq: KVSequence, keys: list[CellKey]) -> None:
        """Note that a decode has added cells to a sequence."""
        self._decoded()
        seq.held += keys
        if keys[-1] < 0:
            seq.note_media()
        self._n_unknown += len(keys)

    def append_each(self, seqs: Sequence[KVSequence], keys: Sequence[CellKey]) -> None:
        """Note that a decode has added one cell to each of some sequences."""
        if self._state is not None or self._targets:
            self._decoded()
        for seq, key in zip(seqs, keys, strict=True):
            seq.held.append(key)
        self._n_unknown += len(keys)

    def cut(self, seq: KVSequence, length: int) -> None:
        """Shorten a sequence. With length 0 it is free; others need one that can be cut."""
        if length < len(seq.held) or not length:
            self._memory.remove(seq.id, seq.position(length))
            self._note_cut(seq, length)

    def step_back(self, seq: KVSequence) -> None:
        """Remove the last token of a sequence if it must be computed again to continue."""
        if seq.held and seq.held[-1] >= 0 and self._memory.step_back(seq.id, seq.held[-1]):
            self._note_cut(seq, len(seq.held) - 1)

    def rewind(self, seq: KVSequence, length: int, state: bytes | None) -> bool:
        """Shorten a sequence that cannot be cut, to where a state was kept.

        Returns whether it could; if not, the sequence is empty.
        """
        if state is not None and self._memory.rewind(seq.id, seq.position(length), state):
            self._note_cut(seq, length)
            return True
        self.cut(seq, 0)
        return False

    def expect_to_take_back(self, seq: KVSequence) -> None:
        """Keep the state that `take_back` after the next decode returns to."""
        self._before[seq.id] = len(seq.held), self._memory.save(seq.id, partial=True)

    def take_back(self, seq: KVSequence, n_cells: int) -> None:
        """Remove the last cells, of those that the last decode has added.

        More may be gone: all that it has added where a state is needed, and everything if that, or
        a window, turns out not to be whole.
        """
        kept, length = self._before.pop(seq.id, None), len(seq.held) - n_cells
        if not n_cells:
            return
        if kept is not None:
            self.rewind(seq, *kept)
            return
        window = 0 if self._backend.can_cut else self._backend.sliding_window
        is_whole = (
            not window
            or len(seq.held) <= self._backend.cuttable
            or self._memory.first(seq.id) <= max(0, seq.position(length) - window)
        )
        if is_whole and self._memory.remove(seq.id, seq.position(length)):
            self._note_cut(seq, length)
        else:
            self.cut(seq, 0)

    def _note_cut(self, seq: KVSequence, length: int) -> None:
        if self._state is not None and self._state[0] == seq.id:
            self._state = None
        self._count(seq)
        self._tree.cut(seq.id, min(length, self._tree.length(seq.id)))
        self._cells.cut(seq.id, length)
        if len(seq.held) > max(length, KEPT):
            self._memory.trim(seq.id, max(length, KEPT))
        seq.shorten(length)

    def copy(self, source: KVSequence, target: KVSequence, length: int) -> None:
        """Give an empty sequence the beginning of another, which may be running.

        Where sequences cannot be cut, it gets all of it, and must be rewound before it is used.
        """
        if self._backend.unified:
            self._memory.copy(source.id, target.id)
        elif self._copies_state(source, target):
            self._memory.restore(target.id, self._state_of(source))
        else:
            self._memory.copy(source.id, target.id)
            self._sources.add(source.id)
            self._targets.add(target.id)
        if not self._backend.can_cut:
            length = len(source.held)
        elif length < len(source.held):
            self._memory.remove(target.id, source.position(length))
            self._memory.trim(target.id, max(length, KEPT))
        self._count(source)
        self._cells.copy(source.id, target.id, length)
        target.fill(source.held[:length])
        target.root = source.root

    def _copies_state(self, source: KVSequence, target: KVSequence) -> bool:
        """True if a state is copied in a split cache; else llama.cpp copies a part."""
        # llama.cpp copies all of a part, empty cells included, with the next decode. Where
        # sequences cannot be cut, that would overwrite what the target is rewound to.
        if not self._backend.can_cut or self._backend.is_elastic:
            return True
        is_free = target.id not in self._sources | self._targets
        is_short = 4 * len(source.held) <= self._backend.n_ctx_seq
        return is_short and is_free and self.can_read(source)

    def source(self, holders: list[KVSequence]) -> KVSequence:
        """Choose which of some sequences to copy: one whose state was read, else the shortest."""
        read = -1 if self._state is None else self._state[0]
        return min(holders, key=lambda seq: (seq.id != read, len(seq.held)))

    def _state_of(self, seq: KVSequence) -> bytes:
        if self._state is None or self._state[0] != seq.id:
            self._state = seq.id, self._memory.save(seq.id)
        return self._state[1]

    def load(self, seq: KVSequence, keys: list[CellKey], root: CacheRoot, state: bytes) -> None:
        """Fill an empty sequence with a state from outside."""
        self._memory.restore(seq.id, state)
        seq.fill(list(keys))
        seq.root = root
        self._cells.append(seq.id, len(keys))

    def check_integrity(self) -> None:
        """Raise AssertionError unless the tree and the cells agree with llama.cpp."""
        self._index()
        self._tree.check_integrity()
        taken = self.taken
        self._ledger().check_integrity([len(seq.held) for seq in self.all])
        assert self._n_unknown == 0 and self.taken == taken
        for seq in self.all:
            assert self._tree.keys(seq.id) == seq.held
            last = self._memory.last(seq.id)
            assert seq.ends_at(last), f"sequence {seq.id} ends at {last}"
