"""What every KV sequence holds, and the cheapest way to start a prompt from it."""

from __future__ import annotations

import attrs

from trioserve.engine.backend import Backend
from trioserve.engine.cache.cells import CellLedger
from trioserve.engine.cache.prefix_tree import PrefixTree
from trioserve.engine.cache.ram_cache import RamCache
from trioserve.errors import InvalidRequestError, KVCacheFullError
from trioserve.types import CacheRoot, CellKey, SlotState

#: Cells of a unified KV cache that sequences may hold which no request uses. Attention looks at
#: all cells, in steps of 256, of every sequence: on a CPU, 4,000 idle ones make prefill 20 to
#: 100 % slower, and decode 6 to 48 %.
MAX_IDLE = 256

#: A sequence is copied to RAM where at least one token in so many is its own. Where others hold
#: nearly all of it, the rest is computed again sooner than all of it is copied.
OWN_SHARE = 16


@attrs.define
class KVSequence:
    """One KV sequence.

    ::

        held    | indexed ............ | not yet |
                0                len in tree     len(held)

    `held` has a key for each cell that llama.cpp holds, computed under `root`. The tree learns
    of new keys when it is asked something, not with every token.
    """

    id: int
    held: list[CellKey] = attrs.field(factory=list)
    root: CacheRoot = attrs.field(default=CacheRoot())
    running: bool = False
    last_used: int = 0

    def position(self, cell: int) -> int:
        """The position of a cell. They are the same as long as prompts are tokens alone."""
        return cell


class PrefixCache:
    """All sequences of a backend: running, kept for later prompts, and free ones.

    Every change is made here and in llama.cpp at the same time. Nothing is shared between texts
    with different roots (`CacheRoot`): what was computed with some LoRA adapters is no use with
    others, and what one client sent is not for others to find. Used from the inference thread.

    Args:
        backend: where the sequences are.
        ram_limit: bytes of RAM for sequences that leave the KV cache.
        max_idle: cells that kept sequences may hold while others run; None: any number.
    """

    def __init__(
        self, backend: Backend, ram_limit: int = 0, *, max_idle: int | None = None
    ) -> None:
        #: Sharing fewer tokens than this is not worth a copy, a wait or a place in RAM.
        self.min_shared = 32
        self._backend = backend
        self.sequences = [KVSequence(i) for i in range(backend.n_seqs)]
        self.ram = RamCache(ram_limit, can_cut=backend.can_cut)
        self._tree: PrefixTree[int] = PrefixTree()
        self._cells = CellLedger(backend.n_seqs)
        self._clock = 0
        self._copies_wait = False  # copies that llama.cpp makes with the next decode
        #: In a cache that is split by sequence, a copy moves data and a kept sequence takes the
        #: place of a running one; in a unified one both are nearly free.
        self._unified = backend.unified
        can_swap_out = backend.unified and backend.can_cut and ram_limit > 0
        self.max_idle = max_idle if can_swap_out else None

    # -- looking

    @property
    def can_share(self) -> bool:
        """Whether one sequence can start with a part of another."""
        return self._backend.can_cut

    @property
    def taken(self) -> int:
        """Cells in use."""
        return self._cells.taken

    def taken_by_running(self) -> int:
        """Cells that running sequences use."""
        return self.taken_by({seq.id for seq in self.sequences if seq.running})

    def taken_by(self, seq_ids: set[int]) -> int:
        """Cells that a set of sequences uses."""
        return self._cells.taken_by(seq_ids)

    def find(self, keys: list[CellKey], root: CacheRoot) -> tuple[int, list[KVSequence]]:
        """Find the longest beginning of `keys` in the KV cache, and who holds it."""
        self._index()
        match = self._tree.match if self._backend.can_cut else self._tree.match_whole
        length, holders = match(keys, root)
        return length, [self.sequences[i] for i in holders]

    def _index(self) -> None:
        for seq in self.sequences:
            known = self._tree.length(seq.id)
            if known < len(seq.held):
                self._tree.extend(seq.id, seq.held[known:], seq.root)

    # -- starting and ending a run

    def start(self, keys: list[CellKey], root: CacheRoot, *, reuse: bool) -> KVSequence:
        """Get a sequence for a run, with as much of it there as can be had.

        At least the last cell is left to decode, for its logits. There must be a sequence that
        does not run.
        """
        self._clock += 1
        seq = self._start(keys[:-1], root) if reuse else self._empty()
        seq.running, seq.root = True, root
        self._swap_out_idle()
        return seq

    def _start(self, keys: list[CellKey], root: CacheRoot) -> KVSequence:
        length, holders = self.find(keys, root)
        in_ram, key = self.ram.find(keys, root)
        if in_ram >= length + self.min_shared and not self._copies_wait:
            return self._swap_in(key, in_ram, root)
        kept = [seq for seq in holders if not seq.running]
        for seq in kept:
            if len(seq.held) == length:
                return seq  # it goes on where it ended, and nothing is lost
        if length >= self.min_shared and (self._unified or not kept):
            others = [seq for seq in self._idle() if seq not in holders]
            if others:
                target = self._empty(others)
                self._copy(holders[0], target, length)
                return target
        if kept and (length >= self.min_shared or length * 10 >= len(keys)):
            seq = min(kept, key=lambda seq: len(seq.held))
            self.cut(seq, length)
            return seq
        return self._empty()

    def release(self, seq: KVSequence) -> None:
        """Keep what a run leaves behind, for later prompts."""
        self._clock += 1
        seq.running = False
        seq.last_used = self._clock

    def append(self, seq: KVSequence, keys: list[CellKey]) -> None:
        """Note that a decode has added cells to a sequence."""
        self._copies_wait = False
        seq.held += keys
        self._cells.append(seq.id, len(keys))

    def cut(self, seq: KVSequence, length: int) -> None:
        """Shorten a sequence. With length 0 it is free."""
        if length < len(seq.held) or not length:
            self._backend.seq_rm(seq.id, seq.position(length))
            self._tree.cut(seq.id, min(length, self._tree.length(seq.id)))
            self._cells.cut(seq.id, length)
            del seq.held[length:]

    def evict_one(self) -> bool:
        """Make cells free: the kept sequence that was unused for longest goes, to RAM if it can.

        Returns whether there was one.
        """
        kept = [seq for seq in self._idle() if seq.held]
        if kept:
            self._evict(min(kept, key=lambda seq: seq.last_used))
        return bool(kept)

    def swap_out(self, seq: KVSequence) -> None:
        """Copy a sequence to RAM, unless it is short or already there, or there is no room."""
        if len(seq.held) < self.min_shared or self._copies_wait:
            return
        if self.ram.holds(seq.held, seq.root):
            return
        if self.ram.make_room(self._backend.state_size(seq.id)):
            self.ram.put(seq.held, seq.root, self._backend.state_get(seq.id))

    def _swap_out_idle(self) -> None:
        """Swap out a kept sequence, where kept ones slow down those that run.

        It is one for each run that starts: no run waits long, and their number does not grow.
        """
        if self.max_idle is not None and self.taken - self.taken_by_running() > self.max_idle:
            self.evict_one()

    # -- how

    def _idle(self) -> list[KVSequence]:
        return [seq for seq in self.sequences if not seq.running]

    def _empty(self, among: list[KVSequence] | None = None) -> KVSequence:
        """Get an empty sequence: a free one, else the one that was unused for longest."""
        idle = among or self._idle()
        seq = min(idle, key=lambda seq: (bool(seq.held), seq.last_used))
        self._evict(seq)
        return seq

    def _evict(self, seq: KVSequence) -> None:
        if self._cells.freed_by(seq.id) * OWN_SHARE >= len(seq.held):
            self.swap_out(seq)
        self.cut(seq, 0)

    def _copy(self, source: KVSequence, target: KVSequence, length: int) -> None:
        """Give an empty sequence the beginning of another, which may be running."""
        self._backend.seq_cp(source.id, target.id)
        if length < len(source.held):
            self._backend.seq_rm(target.id, source.position(length))
        self._cells.copy(source.id, target.id, length)
        target.held, target.root = source.held[:length], source.root
        self._copies_wait = not self._unified

    def _swap_in(self, key: int, length: int, root: CacheRoot) -> KVSequence:
        """Bring a sequence back from RAM, or give an empty one if those that run need the room."""
        entry = self.ram.get(key)
        seq = self._load(entry.keys, root, entry.state)
        if seq is None:
            return self._empty()
        self.cut(seq, length)
        return seq

    def _load(self, keys: list[CellKey], root: CacheRoot, state: bytes) -> KVSequence | None:
        """Fill a sequence from outside; None when those that run leave no room for it."""
        while self.taken + len(keys) > self._backend.n_ctx and self.evict_one():
            pass
        seq = self._empty()
        if self.taken + len(keys) > self._backend.n_ctx:
            return None
        self._backend.state_set(seq.id, state)
        seq.held, seq.root = list(keys), root
        self._cells.append(seq.id, len(keys))
        return seq

    # -- to a file and back

    def export(self, keys: list[CellKey], root: CacheRoot) -> SlotState:
        """Read what is there of a text, from the KV cache or from RAM.

        That is the sequence which holds all of it, even if another run has gone on from there;
        else the longest one that is a beginning of it; else nothing, with a state that says so.
        There must be a sequence that does not run.
        """
        seq, key = self._best(keys, root)
        if seq is None and key is not None:
            entry = self.ram.get(key)
            return SlotState(tokens=tuple(entry.keys), root=root, state=entry.state)
        seq = seq or self._empty()
        state = self._backend.state_get(seq.id)
        return SlotState(tokens=tuple(seq.held), root=root, state=state)

    def adopt(self, saved: SlotState) -> None:
        """Keep what `export` gave, here or elsewhere, for prompts that begin like it.

        There must be a sequence that does not run.

        Raises:
            KVCacheFullError: those that run leave no room for it.
            InvalidRequestError: the state does not fit the context, or is of other tokens.
        """
        if self._copies_wait:
            raise KVCacheFullError("The KV cache is being copied; try again.")
        seq = self._load(list(saved.tokens), saved.root, saved.state)
        if seq is None:
            raise KVCacheFullError("The KV cache has no room beside what runs.")
        self.release(seq)
        if self._backend.seq_pos_max(seq.id) != seq.position(len(saved.tokens)) - 1:
            self.cut(seq, 0)
            raise InvalidRequestError("The state is not that of the tokens.")

    def forget(self, keys: list[CellKey], root: CacheRoot) -> int:
        """Drop what `export` would read, unless it runs; returns how many of `keys` that had."""
        seq, key = self._best(keys, root)
        n_held = 0
        if key is not None:
            n_held = len(self.ram.get(key).keys)
            self.ram.drop(key)
        if seq is not None:
            n_held = len(seq.held)
            if not seq.running:
                self.cut(seq, 0)
        return min(n_held, len(keys))

    def _best(self, keys: list[CellKey], root: CacheRoot) -> tuple[KVSequence | None, int | None]:
        """Find a text in the KV cache, and in RAM: all of it, or what is a beginning of it."""
        self._index()
        length, holders = self._tree.match(keys, root)
        if length < len(keys):
            length, holders = self._tree.match_whole(keys, root)
        in_ram, key = self.ram.find_whole(keys, root)
        seqs = [self.sequences[i] for i in holders]
        seq = min(seqs, key=lambda seq: (seq.running, len(seq.held)), default=None)
        if in_ram > length:
            seq = None
        return seq, key if key >= 0 else None

    def check_integrity(self) -> None:
        """Raise AssertionError unless the tree, the cells and llama.cpp agree on what is held."""
        self._index()
        self._tree.check_integrity()
        self.ram.check_integrity()
        self._cells.check_integrity([len(seq.held) for seq in self.sequences])
        for seq in self.sequences:
            assert self._tree.keys(seq.id) == seq.held
            last = self._backend.seq_pos_max(seq.id)
            assert last == seq.position(len(seq.held)) - 1, f"sequence {seq.id} ends at {last}"
