"""States that left the KV cache and may be needed again, in RAM, under a limit of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import attrs

from trioserve.engine.cache.prefix_tree import PrefixTree
from trioserve.types import CacheRoot, CellKey
from trioserve.types.media import whole_chunks


@attrs.define(eq=False)
class CachedState:
    """A state, and the keys that it was computed for."""

    keys: list[CellKey]
    root: CacheRoot
    state: bytes
    #: The state is from a partial `KVMemory.save`, not of a whole sequence.
    is_checkpoint: bool = False
    #: It was read from a file, and not used yet.
    from_disk: bool = False


class RamCache:
    """States of sequences by their roots and keys, and checkpoints; both share one limit.

    The least recently used state is evicted first. Before that, checkpoints are evicted that no
    sequence can be rewound to, because none still holds their keys.

    Args:
        limit: the most bytes of state to hold.
        cuttable: the most keys of a state that can be restored in part.
        max_checkpoints: the most checkpoints to hold.
        is_useful: whether a sequence can go back to a checkpoint.
        on_evict: gets what has to go for lack of room.
    """

    def __init__(
        self,
        limit: int,
        *,
        cuttable: int,
        max_checkpoints: int = 0,
        is_useful: Callable[[CachedState], bool] = lambda _entry: True,
        on_evict: Callable[[CachedState], object] = lambda _entry: None,
    ) -> None:
        self.limit = limit
        self.size = 0
        self.max_checkpoints = max_checkpoints
        self._cuttable = cuttable
        self._is_useful, self._on_evict = is_useful, on_evict
        self._entries: OrderedDict[int, CachedState] = OrderedDict()
        self._tree = PrefixTree()  # of whole sequences
        self._checkpoints = PrefixTree()
        self.n_checkpoints = 0
        self._next = 0

    def __len__(self) -> int:
        return len(self._entries)

    def make_room(self, size: int) -> bool:
        """Drop entries until `size` bytes fit; returns False when they never can."""
        if size > self.limit:
            return False
        if self.size + size > self.limit:
            self.drop_useless(self._evict)
        while self.size + size > self.limit:
            self._evict(next(iter(self._entries)))
        return True

    def put(self, entry: CachedState) -> None:
        """Keep a state, in place of those that it begins with, or a checkpoint of new keys."""
        if not entry.is_checkpoint:
            for entry_id in list(self._tree.match_whole(entry.keys, entry.root)[1]):
                self.drop(entry_id)
        elif self.n_checkpoints >= self.max_checkpoints:
            self.drop_useless(self._evict)
            if self.n_checkpoints >= self.max_checkpoints:
                self._evict(self._all_checkpoints()[0])
        if self.make_room(len(entry.state)):
            self._add(entry)

    def _add(self, entry: CachedState) -> None:
        entry_id, self._next = self._next, self._next + 1
        self._entries[entry_id] = entry
        self._tree_of(entry).extend(entry_id, entry.keys, entry.root)
        self.n_checkpoints += entry.is_checkpoint
        self.size += len(entry.state)

    def _tree_of(self, entry: CachedState) -> PrefixTree:
        return self._checkpoints if entry.is_checkpoint else self._tree

    def _all_checkpoints(self) -> list[int]:
        return [entry_id for entry_id, entry in self._entries.items() if entry.is_checkpoint]

    def holds(self, keys: list[CellKey], root: CacheRoot) -> bool:
        return self._tree.match(keys, root)[0] == len(keys)

    def find(self, keys: list[CellKey], root: CacheRoot) -> tuple[int, int]:
        """Find the longest beginning of `keys` to start from: its length, and the id for `get`.

        The entry may have more keys. Then it can be cut, or there is a checkpoint at that length.
        """
        length, entry_ids = self._tree.match(keys, root)
        able = [one for one in entry_ids if len(self._entries[one].keys) <= self._cuttable]
        if not able:
            checkpoint = self.find_checkpoint(keys[:length], root)[0]
            length, whole_ids = self._tree.match_whole(keys, root)
            able = [*entry_ids] if checkpoint > length else [*whole_ids]
            length = max(length, checkpoint)
        return whole_chunks(keys, length), min(able, default=-1)

    def find_whole(self, keys: list[CellKey], root: CacheRoot) -> tuple[int, int]:
        """Find an entry with all of `keys`, or else the longest that is a beginning of them."""
        length, entry_ids = self._tree.match(keys, root)
        if length < len(keys):
            length, entry_ids = self._tree.match_whole(keys, root)
        return length, min(entry_ids, default=-1)

    def find_shared(self, keys: list[CellKey], root: CacheRoot) -> int:
        """Count the leading keys that any whole sequence has."""
        return self._tree.match(keys, root)[0]

    def find_checkpoint(self, keys: list[CellKey], root: CacheRoot) -> tuple[int, int]:
        """Find the last checkpoint on the way along `keys`: its length, and the id for `get`."""
        length, entry_ids = self._checkpoints.match_whole(keys, root)
        return length, min(entry_ids, default=-1)

    def get(self, entry_id: int) -> CachedState:
        """Read an entry, which counts as a use."""
        self._entries.move_to_end(entry_id)
        return self._entries[entry_id]

    def drop(self, entry_id: int) -> None:
        entry = self._entries.pop(entry_id)
        self.size -= len(entry.state)
        self.n_checkpoints -= entry.is_checkpoint
        self._tree_of(entry).cut(entry_id, 0)

    def _evict(self, entry_id: int) -> None:
        self._on_evict(self._entries[entry_id])
        self.drop(entry_id)

    def drop_useless(self, drop: Callable[[int], object] | None = None) -> None:
        """Forget, or `drop`, the checkpoints that no sequence can go back to."""
        for entry_id in self._all_checkpoints():
            if not self._is_useful(self._entries[entry_id]):
                (drop or self.drop)(entry_id)

    def add(self, entry: CachedState) -> None:
        """Keep a state from elsewhere, unless it is here already or does not fit."""
        keys, root = entry.keys, entry.root
        is_here = (
            self.find_checkpoint(keys, root)[0] == len(keys)
            if entry.is_checkpoint
            else self.holds(keys, root)
        )
        if not is_here:
            self.put(entry)

    def entries(self) -> list[CachedState]:
        """List what is here, the most recently used first."""
        return list(reversed(self._entries.values()))

    def check_integrity(self) -> None:
        """Raise AssertionError unless the sizes add up."""
        self._tree.check_integrity()
        self._checkpoints.check_integrity()
        assert self.size == sum(len(entry.state) for entry in self._entries.values())
        assert self.size <= self.limit
        assert self.n_checkpoints == len(self._all_checkpoints()) <= self.max_checkpoints
        for entry_id, entry in self._entries.items():
            assert self._tree_of(entry).keys(entry_id) == entry.keys
            if entry.is_checkpoint:
                ids = self._checkpoints.match_whole(entry.keys, entry.root)[1]
                assert ids == {entry_id}, "two checkpoints at one place"
