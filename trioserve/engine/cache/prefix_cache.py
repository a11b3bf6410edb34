"""What every KV sequence holds, and the cheapest way to start a prompt from it."""

from __future__ import annotations

import attrs

from trioserve.engine.backend import Backend
from trioserve.engine.cache.cells import CellLedger
from trioserve.engine.cache.prefix_tree import PrefixTree
from trioserve.engine.cache.ram_cache import RamCache
from trioserve.errors import InvalidRequestError, KVCacheFullError
from trioserve.types import Adapters, SlotState, TokenId

#: Cells of a unified KV cache that sequences may hold which no request uses. Attention looks at
#: all cells, in steps of 256, whoever they belong to: on a CPU, 4,000 idle ones make prefill 20 to
#: 100 % slower, and decode 6 to 48 %.
MAX_IDLE = 256

#: A sequence is copied to RAM where at least one token in so many is its own. Where others hold
#: nearly all of it, the rest is computed again sooner than all of it is copied.
OWN_SHARE = 16


@attrs.define
class Sequence:
    """One KV sequence.

    ::

        held    | indexed ............ | not yet |
                0                len in tree     len(held)

    `held` is what llama.cpp holds, exactly, computed with `adapters`. The tree learns of new tokens
    when it is asked something, not with every token.
    """

    id: int
    held: list[TokenId] = attrs.field(factory=list)
    adapters: Adapters = ()
    running: bool = False
    last_used: int = 0


class PrefixCache:
    """All sequences of a backend: running, kept for later prompts, and free ones.

    Every change is made here and in llama.cpp at the same time. What was computed with some LoRA
    adapters is no use with others: each set of them has a root of its own in the trees. Used from
    the inference thread.

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
        self.sequences = [Sequence(i) for i in range(backend.n_seqs)]
        self.ram = RamCache(ram_limit, can_cut=backend.can_cut)
        self._tree: PrefixTree[int] = PrefixTree()
        self._cells = CellLedger(backend.n_seqs)
        self._clock = 0
        self._copies_wait = False  # copies that llama.cpp makes with the next decode
        #: In a cache that is split by sequence, a copy moves data and a kept sequence takes the
        #: place of a running one; in a unified one both are nearly free.
        self._unified = backend.unified
        can_thin_out = backend.unified and backend.can_cut and ram_limit > 0
        self.max_idle = max_idle if can_thin_out else None

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
        return self._cells.taken_by({seq.id for seq in self.sequences if seq.running})

    def find(self, tokens: list[TokenId], adapters: Adapters = ()) -> tuple[int, list[Sequence]]:
        """Find the longest beginning of `tokens` in the KV cache, and who holds it."""
        self._index()
        match = self._tree.match if self._backend.can_cut else self._tree.match_whole
        length, holders = match(tokens, adapters)
        return length, [self.sequences[i] for i in holders]

    def _index(self) -> None:
        for seq in self.sequences:
            known = self._tree.length(seq.id)
            if known < len(seq.held):
                self._tree.extend(seq.id, seq.held[known:], seq.adapters)

    # -- starting and ending a run

    def start(self, tokens: list[TokenId], adapters: Adapters = (), *, reuse: bool) -> Sequence:
        """Get a sequence for a run, with as much of its tokens in it as can be had.

        At least the last token is left to decode, for its logits. There must be a sequence that
        does not run.
        """
        self._clock += 1
        seq = self._start(tokens[:-1], adapters) if reuse else self._empty()
        seq.running, seq.adapters = True, adapters
        self._thin_out()
        return seq

    def _start(self, tokens: list[TokenId], adapters: Adapters) -> Sequence:
        length, holders = self.find(tokens, adapters)
        in_ram, key = self.ram.find(tokens, adapters)
        if in_ram >= length + self.min_shared and not self._copies_wait:
            return self._restore(key, in_ram, adapters)
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
        if kept and (length >= self.min_shared or length * 10 >= len(tokens)):
            seq = min(kept, key=lambda seq: len(seq.held))
            self.cut(seq, length)
            return seq
        return self._empty()

    def release(self, seq: Sequence) -> None:
        """Keep what a run leaves behind, for later prompts."""
        self._clock += 1
        seq.running = False
        seq.last_used = self._clock

    def append(self, seq: Sequence, tokens: list[TokenId]) -> None:
        """Note that a decode has added tokens to a sequence."""
        self._copies_wait = False
        seq.held += tokens
        self._cells.append(seq.id, len(tokens))

    def cut(self, seq: Sequence, length: int) -> None:
        """Shorten a sequence. With length 0 it is free."""
        if length < len(seq.held) or not length:
            self._backend.seq_rm(seq.id, length)
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

    def stow(self, seq: Sequence) -> None:
        """Copy a sequence to RAM, unless it is short or already there, or there is no room."""
        if len(seq.held) < self.min_shared or self._copies_wait:
            return
        if self.ram.holds(seq.held, seq.adapters):
            return
        if self.ram.make_room(self._backend.state_size(seq.id)):
            self.ram.put(seq.held, seq.adapters, self._backend.state_get(seq.id))

    def _thin_out(self) -> None:
        """Send a kept sequence to RAM where they slow down those that run.

        One for each that starts: so nobody waits long, and they do not get more.
        """
        if self.max_idle is not None and self.taken - self.taken_by_running() > self.max_idle:
            self.evict_one()

    # -- how

    def _idle(self) -> list[Sequence]:
        return [seq for seq in self.sequences if not seq.running]

    def _empty(self, among: list[Sequence] | None = None) -> Sequence:
        """Get an empty sequence: a free one, else the one that was unused for longest."""
        idle = among or self._idle()
        seq = min(idle, key=lambda seq: (bool(seq.held), seq.last_used))
        self._evict(seq)
        return seq

    def _evict(self, seq: Sequence) -> None:
        if self._cells.freed_by(seq.id) * OWN_SHARE >= len(seq.held):
            self.stow(seq)
        self.cut(seq, 0)

    def _copy(self, source: Sequence, target: Sequence, length: int) -> None:
        """Give an empty sequence the beginning of another, which may be running."""
        self._backend.seq_cp(source.id, target.id)
        if length < len(source.held):
            self._backend.seq_rm(target.id, length)
        self._cells.copy(source.id, target.id, length)
        target.held, target.adapters = source.held[:length], source.adapters
        self._copies_wait = not self._unified

    def _restore(self, key: int, length: int, adapters: Adapters) -> Sequence:
        """Bring a sequence back from RAM, or give an empty one if those that run need the room."""
        entry = self.ram.get(key)
        seq = self._load(entry.tokens, adapters, entry.state)
        if seq is None:
            return self._empty()
        self.cut(seq, length)
        return seq

    def _load(self, tokens: list[TokenId], adapters: Adapters, state: bytes) -> Sequence | None:
        """Fill a sequence from outside; None when those that run leave no room for it."""
        while self.taken + len(tokens) > self._backend.n_ctx and self.evict_one():
            pass
        seq = self._empty()
        if self.taken + len(tokens) > self._backend.n_ctx:
            return None
        self._backend.state_set(seq.id, state)
        seq.held, seq.adapters = list(tokens), adapters
        self._cells.append(seq.id, len(tokens))
        return seq

    # -- to a file and back

    def export(self, tokens: list[TokenId], adapters: Adapters) -> SlotState:
        """Read what is there of a text, from the KV cache or from RAM.

        That is the sequence which holds all of it, even if another run has gone on from there;
        else the longest one that is a beginning of it; else nothing, with a state that says so.
        There must be a sequence that does not run.
        """
        seq, key = self._best(tokens, adapters)
        if seq is None and key is not None:
            entry = self.ram.get(key)
            return SlotState(tokens=tuple(entry.tokens), adapters=adapters, state=entry.state)
        seq = seq or self._empty()
        state = self._backend.state_get(seq.id)
        return SlotState(tokens=tuple(seq.held), adapters=adapters, state=state)

    def adopt(self, saved: SlotState) -> None:
        """Keep what `export` gave, here or elsewhere, for prompts that begin like it.

        There must be a sequence that does not run.

        Raises:
            KVCacheFullError: those that run leave no room for it.
            InvalidRequestError: the state does not fit the context, or is of other tokens.
        """
        if self._copies_wait:
            raise KVCacheFullError("The KV cache is being copied; try again.")
        seq = self._load(list(saved.tokens), saved.adapters, saved.state)
        if seq is None:
            raise KVCacheFullError("The KV cache has no room beside what runs.")
        self.release(seq)
        if self._backend.seq_pos_max(seq.id) != len(saved.tokens) - 1:
            self.cut(seq, 0)
            raise InvalidRequestError("The state is not that of the tokens.")

    def forget(self, tokens: list[TokenId], adapters: Adapters) -> int:
        """Drop what `export` would read, unless it runs; returns how many of `tokens` that had."""
        seq, key = self._best(tokens, adapters)
        n_held = 0
        if key is not None:
            n_held = len(self.ram.get(key).tokens)
            self.ram.drop(key)
        if seq is not None:
            n_held = len(seq.held)
            if not seq.running:
                self.cut(seq, 0)
        return min(n_held, len(tokens))

    def _best(
        self, tokens: list[TokenId], adapters: Adapters
    ) -> tuple[Sequence | None, int | None]:
        """Find a text in the KV cache, and in RAM: all of it, or what is a beginning of it."""
        self._index()
        length, holders = self._tree.match(tokens, adapters)
        if length < len(tokens):
            length, holders = self._tree.match_whole(tokens, adapters)
        in_ram, key = self.ram.find_whole(tokens, adapters)
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
            assert self._tree.tokens(seq.id) == seq.held
            last = self._backend.seq_pos_max(seq.id)
            assert last == len(seq.held) - 1, f"sequence {seq.id}: {last} + 1 != {len(seq.held)}"
