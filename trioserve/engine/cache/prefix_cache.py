"""The cheapest start of a prompt: a KV sequence, a copy in RAM, a checkpoint, or from scratch."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable
from itertools import pairwise

import attrs

from trioserve.engine.backend import Backend
from trioserve.engine.cache.disk_cache import DiskCache, Done
from trioserve.engine.cache.ram_cache import CachedState, RamCache
from trioserve.engine.cache.sequences import KVSequence, Sequences
from trioserve.errors import InvalidRequestError, KVCacheFullError, UnavailableError
from trioserve.log import get_logger
from trioserve.types import CacheRoot, CellKey, Prompt, SlotState
from trioserve.types.media import whole_chunks

#: The last tokens of a prompt may differ next time, even if its text is continued: the last word
#: may become longer.
UNCERTAIN_END = 4


@attrs.frozen
class CheckpointRules:
    """The number of checkpoints, and their places.

    Nothing is kept where memory can be cut.
    """

    #: For each slot, on average.
    per_slot: int = 32
    #: Cells between two checkpoints of a long prompt, besides those at positions that are known to
    #: be good; 0: only those.
    step: int = 8192
    #: Two positions that are at most this many cells apart count as one.
    min_gap: int = 16


DEFAULT_RULES = CheckpointRules()


def checkpoint_positions(
    n_prompt: int, divergence_points: tuple[int, ...], rules: CheckpointRules
) -> list[int]:
    """Choose where the prefill of a prompt stops for a checkpoint, in ascending order.

    ::

        | system prompt, tools | older messages | last message | begin of the answer |
                               ^                ^              ^
                           the `divergence_points`: another prompt differs from there on

    Positions close to the beginning or to an earlier one are left out. Then come positions that may
    be useful for any text.
    """
    positions = [0]
    for position in sorted(divergence_points):
        if positions[-1] + rules.min_gap < position < n_prompt:
            positions.append(position)
    others = [n_prompt - UNCERTAIN_END]
    if rules.step:
        others += range(rules.step, n_prompt, rules.step)
    for position in others:
        if position > 0 and all(abs(position - other) > rules.min_gap for other in positions):
            insort(positions, position)
    return positions[1:]


def divergence_point(positions: list[int], shared: int, rules: CheckpointRules) -> int:
    """Find the position where a prompt that shares so much diverges, or make one.

    One that is made takes the place of those soon after it.
    """
    i = bisect_right(positions, shared)
    if i and shared - positions[i - 1] <= rules.min_gap:
        return positions[i - 1]
    positions[i:] = [
        shared,
        *(position for position in positions[i:] if position > shared + rules.min_gap),
    ]
    return shared


def next_checkpoint(positions: list[int], n_held: int) -> int | None:
    """Find the first position that lies ahead, if there is one."""
    i = bisect_right(positions, n_held)
    return positions[i] if i < len(positions) else None


#: Cells of a unified KV cache that sequences may hold which no request uses. Attention looks at
#: all cells, in steps of 256, of every sequence: on a CPU, 4,000 idle ones make prefill 20 to
#: 100 % slower, and decode 6 to 48 %.
MAX_IDLE = 256

#: A prompt of at most this many cells has no checkpoints if it can be cut as long as its window is
#: not full. To make one takes a step more, and to prefill these again is not much.
FEW = 512

#: A sequence is copied to RAM if at least one token in this many is in no other sequence, and for
#: its beginning if that is at least one in this many. Computing fewer tokens again is faster than
#: copying the whole sequence.
OWN_SHARE = 16

#: Shorter sequences are neither copied nor kept in RAM.
SHORT = 8

#: Bytes of a state that is copied to RAM ahead of its eviction: a request that comes in the
#: meantime waits for about 20 ms; or for 2 ms.
MAX_AHEAD, MAX_SOON = 32 * 2**20, 4 * 2**20

#: The same for one that is written to disk: it would be lost if the process died.
MAX_WRITE_AHEAD = 256 * 2**20

_log = get_logger("trioserve")


class PrefixCache:
    """All sequences of a backend: running, kept for later prompts, and free ones.

    Every change is made here and in llama.cpp at the same time. Texts with different roots
    (`CacheRoot`) share nothing: the KV data depends on the LoRA adapters, and clients must not find
    out what others have sent. Used from the inference thread.

    Args:
        backend: where the sequences are.
        ram_limit: bytes of RAM for sequences that leave the KV cache, and for checkpoints.
        max_idle: cells that kept sequences may hold while others run; None: any number.
        checkpoints: how many to keep, where sequences cannot be cut.
        disk: gets what leaves RAM.
    """

    def __init__(
        self,
        backend: Backend,
        ram_limit: int = 0,
        *,
        max_idle: int | None = None,
        checkpoints: CheckpointRules = DEFAULT_RULES,
        disk: DiskCache | None = None,
    ) -> None:
        #: Sharing fewer tokens than this is not worth a copy or a wait, unless it is most of a
        #: prompt: many begin with the same few.
        self.min_shared = 32
        self._backend, self._memory = backend, backend.memory
        #: The sequences and their contents.
        self.held = Sequences(backend)
        self.can_cut = backend.can_cut
        self.ram = RamCache(
            ram_limit,
            cuttable=backend.cuttable,
            max_checkpoints=checkpoints.per_slot * backend.n_slots,
            is_useful=self._is_useful,
            on_evict=disk.put if disk is not None else lambda _entry: None,
        )
        self.disk = disk
        self.rules = checkpoints
        self.keeps_checkpoints = (
            not backend.can_cut and ram_limit > 0 and self.ram.max_checkpoints > 0
        )
        self._clock = 0
        #: The cell at which the prompt of the last request diverged from all that was cached.
        self._diverges_at = 0
        #: Of sequences: the size of the state, and the 256th of the cells that it was measured at.
        self._sizes: dict[int, tuple[int, int]] = {}
        #: In a cache that is split by sequence, a copy moves data and a kept sequence takes the
        #: place of a running one; in a unified one both are nearly free.
        self.unified = backend.unified
        can_swap_out = backend.unified and backend.can_cut and ram_limit > 0
        self.max_idle = max_idle if can_swap_out else None

    # -- looking

    def can_share(self, n_cells: int) -> bool:
        """True if a sequence can start with a part of a prompt of this length."""
        return self.keeps_checkpoints or n_cells <= self._backend.cuttable

    def find(self, keys: list[CellKey], root: CacheRoot) -> tuple[int, list[KVSequence]]:
        """Find the longest beginning of `keys` to start from in the KV cache, and who holds it."""
        length, holders = self.held.match(keys, root)
        if able := [seq for seq in holders if self.held.can_share(seq, length)]:
            return length, able
        checkpoint = self.ram.find_checkpoint(keys[:length], root)[0]
        length, whole = self.held.match_whole(keys, root)
        return (checkpoint, holders) if checkpoint > length else (length, whole)

    # -- starting and ending a request

    def start(self, keys: list[CellKey], root: CacheRoot, *, reuse: bool) -> KVSequence:
        """Get a sequence for a request, with as much of it there as can be had.

        At least the last cell is left to decode, for its logits. There must be a sequence that
        does not run.
        """
        self._clock += 1
        self._diverges_at = 0
        if reuse and self.keeps_checkpoints:
            shared = self.held.match(keys, root)[0], self.ram.find_shared(keys, root)
            self._diverges_at = max(shared)
        seq = self._start(keys[:-1], root) if reuse else self._empty()
        self.held.step_back(seq)
        seq.running, seq.root = True, root
        held = self.held
        if self.max_idle is not None and held.taken - held.taken_by_running() > self.max_idle:
            self.evict_one()  # one for each request that starts, so no request waits long
        return seq

    def _start(self, keys: list[CellKey], root: CacheRoot) -> KVSequence:
        length, holders = self.find(keys, root)
        in_ram, key = self.ram.find(keys, root)
        if self._pays(in_ram - length, keys) and self.held.loadable():
            if (loaded := self._swap_in(key, in_ram, root)) is not None:
                return loaded
            length, holders = self.find(keys, root)  # others had to go, in vain
        kept = [seq for seq in holders if not seq.running]
        for seq in kept:
            if len(seq.held) == length:
                return seq  # the prompt continues the whole sequence, so nothing is lost
        is_long = length >= self.min_shared
        if (is_long and self.unified) or (not kept and self._pays(length, keys)):
            others = [seq for seq in self.held.idle() if seq not in holders]
            source = self.held.source(holders)
            if others and (self.unified or len(source.held) <= OWN_SHARE * length):
                return self._copy(source, length, others)
        if kept and (is_long or length * 10 >= len(keys)):
            seq = min(kept, key=lambda seq: len(seq.held))
            if len(seq.held) >= length + self.min_shared:
                self.swap_out(seq)
            self._shorten(seq, length, self._state_at(seq, length))
            return seq
        return self._empty()

    def _pays(self, n_cells: int, keys: list[CellKey]) -> bool:
        """True if it is quicker to copy that part of a prompt than to prefill it."""
        return n_cells >= (SHORT if 2 * n_cells > len(keys) else self.min_shared)

    def release(self, seq: KVSequence) -> None:
        """Keep a request's sequence for later prompts, without a partial chunk of media."""
        self._clock += 1
        if self.can_cut and (length := whole_chunks(seq.held, len(seq.held))) < len(seq.held):
            self.held.cut(seq, length)
        seq.running = seq.from_ram = seq.from_disk = False
        seq.last_used = self._clock

    def evict_one(self) -> bool:
        """Evict the least recently used kept sequence, to RAM if possible.

        Returns whether there was one.
        """
        kept = [seq for seq in self.held.idle() if seq.held]
        if kept:
            self._evict(min(kept, key=lambda seq: seq.last_used))
        return bool(kept)

    def swap_out(self, seq: KVSequence) -> None:
        """Copy a sequence to RAM, unless it is short or already there, or RAM has no room."""
        if self._is_missing(seq) and self.ram.make_room(self._memory.size(seq.id)):
            self.ram.put(self._save(seq))

    def _save(self, seq: KVSequence, *, partial: bool = False) -> CachedState:
        state = self._memory.save(seq.id, partial=partial)
        return CachedState(list(seq.held), seq.root, state, is_checkpoint=partial)

    def tidy(self, *, is_soon: bool) -> bool:
        """Copy ahead what is evicted next; see `EngineLoop._tidy`."""
        if is_soon:
            return self.swap_out_ahead(MAX_SOON)
        return self.swap_out_ahead() or self.write_ahead()

    def swap_out_ahead(self, most: int = MAX_AHEAD) -> bool:
        """Copy the kept sequence to RAM that is evicted next: that of a request will be quicker.

        Nothing has to go for that. Returns whether there was one with a state of `most` bytes.
        """
        for seq in sorted(self.held.idle(), key=lambda seq: seq.last_used):
            if self._is_missing(seq) and self.held.own(seq) * OWN_SHARE >= len(seq.held):
                size = self._memory.size(seq.id)
                if size <= min(most, self.ram.limit - self.ram.size):
                    self.ram.put(self._save(seq))
                    return True
        return False

    # -- on disk

    def fetch(self, keys: list[CellKey], root: CacheRoot, token_s: float, done: Done) -> bool:
        """Begin to read what a prompt can start from, if this is faster than prefill.

        If it returns True, `done` gets the states, in another thread. They are for `take_in`.

        Args:
            keys: of the prompt.
            root: its root.
            token_s: the seconds that the prefill of a token takes; 0: not known.
            done: gets the result.
        """
        if self.disk is None or len(keys) <= SHORT:
            return False
        keys = keys[:-1]
        held, in_ram = self.held.match(keys, root)[0], self.ram.find_shared(keys, root)
        known = max(self.find(keys, root)[0], self.ram.find(keys, root)[0])

        def pays(n_keys: int, seconds: float) -> bool:
            is_faster = not token_s or seconds < (n_keys - known) * token_s
            return self._pays(n_keys - known, keys) and is_faster

        return self.disk.fetch(keys, root, n_held=max(held, in_ram), pays=pays, done=done)

    def take_in(self, states: Iterable[CachedState]) -> None:
        """Put what was read from disk into RAM, as far as it fits."""
        for state in states:
            self.ram.add(state)

    def write_ahead(self) -> bool:
        """Write a state to disk that would be lost if the process died.

        Returns whether there was one.
        """
        if self.disk is None or self.disk.is_paused:
            return False
        if self.disk.is_busy:
            return True
        for entry in self.ram.entries():
            if not self.disk.has(entry):
                self.disk.put(entry)
                return True
        for seq in sorted(self.held.idle(), key=lambda seq: -seq.last_used):
            is_new = self.held.can_read(seq) and self.disk.lacks(seq.held, seq.root)
            if is_new and self._memory.size(seq.id) <= MAX_WRITE_AHEAD:
                self.disk.put(self._save(seq))
                return True
        return False

    def write_all(self) -> None:
        """Write all there is to disk, the latest first, until there is no more time for it."""
        if self.disk is None:
            return
        self.disk.begin_exit()
        for seq in sorted(self.held.all, key=lambda seq: -seq.last_used):
            whole = whole_chunks(seq.held, len(seq.held)) == len(seq.held)
            if seq.held and whole and self._is_missing(seq) and not self.disk.is_over:
                self.disk.put(self._save(seq), wait=True)
        for entry in self.ram.entries():
            self.disk.put(entry, wait=True)

    def _is_missing(self, seq: KVSequence) -> bool:
        """True if RAM lacks a sequence that is worth a place there, and can be read."""
        is_worth = len(seq.held) >= SHORT and self.held.can_read(seq)
        return is_worth and not self.ram.holds(seq.held, seq.root)

    # -- how

    def _empty(self, among: list[KVSequence] | None = None) -> KVSequence:
        """Get an empty sequence: a free one, else the one that was unused for longest."""
        idle = among or self.held.idle()
        # In a split cache, those come first that have running neighbors: a batch is computed at
        # once where the numbers of its sequences are consecutive. RAM must keep what they hold.
        gathers = not self.unified and self.ram.limit > 0

        def order(seq: KVSequence) -> tuple[int, bool, int]:
            neighbors = self.held.all[max(0, seq.id - 1) : seq.id + 2]  # and itself, which is idle
            n_running = sum(one.running for one in neighbors) if gathers else 0
            return -n_running, bool(seq.held), seq.last_used

        seq = min(idle, key=order)
        self._evict(seq)
        return seq

    def _evict(self, seq: KVSequence) -> None:
        if self.held.own(seq) * OWN_SHARE >= len(seq.held):
            self.swap_out(seq)
        self.held.cut(seq, 0)

    def _copy(self, source: KVSequence, length: int, among: list[KVSequence]) -> KVSequence:
        """Give one of some sequences the beginning of another, which may be running."""
        # Before anything is dropped to make room.
        can_cut = self.held.can_cut(source, length)
        state = None if can_cut else self._state_at(source, length)
        target = self._empty(among)
        self.held.copy(source, target, length)
        if self.held.can_cut(target, length):
            self.held.cut(target, length)
        else:
            self._go_back(target, length, state)
        return target

    def _swap_in(self, key: int, length: int, root: CacheRoot) -> KVSequence | None:
        """Bring a sequence back from RAM; None when those that run leave no room for it."""
        entry = self.ram.get(key)
        state = self._checkpoint_at(entry.keys[:length], root)
        try:
            seq = self._load(entry.keys, root, entry.state)
        except InvalidRequestError as error:
            _log.warning("a state from the cache on disk cannot be used", reason=error.message)
            self.ram.drop(key)
            return None
        if seq is not None:
            seq.from_ram, seq.from_disk, entry.from_disk = True, entry.from_disk, False
            self._shorten(seq, length, state)
        return seq

    def _load(self, keys: list[CellKey], root: CacheRoot, state: bytes) -> KVSequence | None:
        """Fill a sequence from outside; None when those that run leave no room for it."""
        while self.held.taken + len(keys) > self._backend.n_ctx and self.evict_one():
            pass
        seq = self._empty(self.held.loadable())
        if self.held.taken + len(keys) > self._backend.n_ctx:
            return None
        self.held.load(seq, keys, root, state)
        return seq

    # -- where sequences cannot be cut

    def checkpoint_positions(self, prompt: Prompt, seq: KVSequence) -> list[int]:
        """Choose where the prefill of a prompt stops for a checkpoint; `seq` holds its beginning.

        A checkpoint comes before a chunk of media rather than within it. A prefill that starts at
        a checkpoint makes no other one soon after. Where the prompt diverges from a cached one,
        others may diverge, too. To be called after `start`.
        """
        if not self.keeps_checkpoints or len(prompt) <= min(self._backend.cuttable, FEW):
            return []
        points, start = prompt.divergence_points or self._turns(prompt), len(seq.held)
        if self._diverges_at >= max(start, self.min_shared):
            points = (*points, self._diverges_at)
        found = checkpoint_positions(len(prompt), points, self.rules)
        positions = sorted({whole_chunks(prompt.keys, position) for position in found} - {0})
        if self.ram.find_checkpoint(seq.held, seq.root)[0] < start:
            return positions
        return [one for one in positions if not start < one <= start + self.rules.min_gap]

    def _turns(self, prompt: Prompt) -> tuple[int, ...]:
        """Find where the first turns and the last ones of a raw prompt begin: at control tokens."""
        vocab = self._backend.vocab
        pieces, others = vocab.pieces, vocab.end_of_generation | {vocab.bos}
        marks = [
            cell
            for cell, key in enumerate(prompt.keys)
            if cell > self.rules.min_gap and key >= 0 and not pieces[key] and key not in others
        ]
        turns = marks[:1] + [
            mark for before, mark in pairwise(marks) if mark > before + self.rules.min_gap
        ]
        return (*turns[:2], *turns[2:][-3:])

    def keep_checkpoint(self, seq: KVSequence) -> None:
        """Keep the state that a sequence has now, so that others can start from here later.

        If not even one checkpoint fits into the RAM, no more are made.
        """
        length, key = self.ram.find_checkpoint(seq.held, seq.root)
        if length == len(seq.held):
            self.ram.get(key)
        elif self.ram.make_room(self._memory.size(seq.id, partial=True)):
            self.ram.put(self._save(seq, partial=True))
        else:
            self.keeps_checkpoints = False

    def _is_useful(self, checkpoint: CachedState) -> bool:
        keys, root = checkpoint.keys, checkpoint.root
        return self.held.match(keys, root)[0] == len(keys) or self.ram.holds(keys, root)

    def _state_at(self, seq: KVSequence, length: int) -> bytes | None:
        """Get the state that a sequence has at its end, or had at a checkpoint."""
        if not self.can_cut and length == len(seq.held):
            return self._memory.save(seq.id, partial=True)
        return self._checkpoint_at(seq.held[:length], seq.root)

    def _checkpoint_at(self, keys: list[CellKey], root: CacheRoot) -> bytes | None:
        length, key = self.ram.find_checkpoint(keys, root)
        return self.ram.get(key).state if length == len(keys) else None

    def _shorten(self, seq: KVSequence, length: int, state: bytes | None) -> None:
        """Shorten a sequence, with a checkpoint where it cannot be cut."""
        if self.held.can_cut(seq, length):
            self.held.cut(seq, length)
        elif length < len(seq.held):
            self._go_back(seq, length, state)

    def _go_back(self, seq: KVSequence, length: int, state: bytes | None) -> None:
        """Put a sequence back to where a state was kept. If that fails, it is empty."""
        keys = seq.held[:length]
        if not self.held.rewind(seq, length, state):
            reached, key = self.ram.find_checkpoint(keys, seq.root)
            if reached == length:
                self.ram.drop(key)

    # -- to a file and back

    def save(self, keys: list[CellKey], root: CacheRoot) -> SlotState:
        """Read as much of a text as the KV cache or RAM holds.

        That is the sequence that holds all of it, even if another request has continued it; else
        the longest one that is a beginning of it; else an empty state. At least one sequence must
        not be running.

        Raises:
            UnavailableError: another request has continued the sequence, and is within a chunk
            of media.
        """
        seq, key = self._best(keys, root)
        if seq is None and key is not None:
            entry = self.ram.get(key)
            return SlotState(keys=tuple(entry.keys), root=root, state=entry.state)
        seq = seq or self._empty()
        if whole_chunks(seq.held, len(seq.held)) < len(seq.held):
            raise UnavailableError("The text is being continued with an image; try again.")
        state = self._memory.save(seq.id)
        return SlotState(keys=tuple(seq.held), root=root, state=state)

    def restore(self, saved: SlotState) -> None:
        """Keep a result of `save`, from here or elsewhere, for prompts that begin like it.

        At least one sequence must not be running.

        Raises:
            KVCacheFullError: the running requests leave no room for it.
            InvalidRequestError: the state does not fit the context, or is of other tokens.
        """
        if not self.held.loadable():
            raise KVCacheFullError("The KV cache is being copied; try again.")
        seq = self._load(list(saved.keys), saved.root, saved.state)
        if seq is None:
            raise KVCacheFullError("The KV cache has no room beside what runs.")
        self.release(seq)
        if not seq.ends_at(self._memory.last(seq.id)):
            self.held.cut(seq, 0)
            raise InvalidRequestError("The state is not that of the tokens.")

    def erase(self, keys: list[CellKey], root: CacheRoot) -> int:
        """Drop what `save` would read, unless a request uses it; returns the number of keys."""
        seq, key = self._best(keys, root)
        if self.disk is not None:
            self.disk.erase(keys, root)
        n_held = 0
        if key is not None:
            n_held = len(self.ram.get(key).keys)
            self.ram.drop(key)
        if seq is not None:
            n_held = len(seq.held)
            if not seq.running:
                self.held.cut(seq, 0)
        self.ram.drop_useless()
        return min(n_held, len(keys))

    def _best(self, keys: list[CellKey], root: CacheRoot) -> tuple[KVSequence | None, int | None]:
        """Find a text in the KV cache and in RAM: all of it, or a beginning of it."""
        length, holders = self.held.match(keys, root)
        if length < len(keys):
            length, holders = self.held.match_whole(keys, root)
        in_ram, key = self.ram.find_whole(keys, root)
        seq = min(holders, key=lambda seq: (seq.running, len(seq.held)), default=None)
        if in_ram > length:
            seq = None
        return seq, key if key >= 0 else None

    def counters(self) -> dict[str, int]:
        """Return the fields of `EngineCounters` for the bytes of each tier."""
        n_bytes = sum(self._size(seq) for seq in self.held.all if seq.held)
        on_disk = self.disk.counters() if self.disk is not None else {}
        return {"kv_bytes": n_bytes, "ram_bytes": self.ram.size, **on_disk}

    def _size(self, seq: KVSequence) -> int:
        """Measure the state of a sequence, at every 256th cell: llama.cpp goes through all."""
        step = len(seq.held) // 256
        known = self._sizes.get(seq.id)
        if known is None or known[0] != step:
            known = self._sizes[seq.id] = step, self._memory.size(seq.id)
        return known[1]

    def check_integrity(self) -> None:
        """Raise AssertionError unless the caches agree with llama.cpp."""
        self.held.check_integrity()
        self.ram.check_integrity()
