"""KV sequences that left the KV cache, kept in RAM under a limit of bytes."""

from __future__ import annotations

from collections import OrderedDict

import attrs

from trioserve.engine.cache.prefix_tree import PrefixTree
from trioserve.types import CacheRoot, CellKey


@attrs.frozen
class Entry:
    """What was swapped out of a sequence."""

    keys: list[CellKey]
    state: bytes


class RamCache:
    """States of sequences by their roots and keys; the one unused for longest goes first.

    Args:
        limit: the most bytes of state to hold.
        can_cut: whether a state can be restored in part.
    """

    def __init__(self, limit: int, *, can_cut: bool) -> None:
        self.limit = limit
        self.size = 0
        self._can_cut = can_cut
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._tree: PrefixTree[int] = PrefixTree()
        self._next = 0

    def __len__(self) -> int:
        return len(self._entries)

    def make_room(self, size: int) -> bool:
        """Drop entries until `size` bytes fit; returns False when they never can."""
        if size > self.limit:
            return False
        while self.size + size > self.limit:
            self.drop(next(iter(self._entries)))
        return True

    def put(self, keys: list[CellKey], root: CacheRoot, state: bytes) -> None:
        """Keep a state. What it holds from end to end need not be kept as well."""
        for entry_id in list(self._tree.match_whole(keys, root)[1]):
            self.drop(entry_id)
        if not self.make_room(len(state)):
            return
        entry_id, self._next = self._next, self._next + 1
        self._entries[entry_id] = Entry(list(keys), state)
        self._tree.extend(entry_id, keys, root)
        self.size += len(state)

    def holds(self, keys: list[CellKey], root: CacheRoot) -> bool:
        """Whether all of `keys` is here already."""
        return self._tree.match(keys, root)[0] == len(keys)

    def find(self, keys: list[CellKey], root: CacheRoot) -> tuple[int, int]:
        """Find the longest beginning of `keys`: its length, and the id for `get`."""
        match = self._tree.match if self._can_cut else self._tree.match_whole
        length, entry_ids = match(keys, root)
        return length, min(entry_ids, default=-1)

    def find_whole(self, keys: list[CellKey], root: CacheRoot) -> tuple[int, int]:
        """Find an entry with all of `keys`, or else the longest that is a beginning of them."""
        length, entry_ids = self._tree.match(keys, root)
        if length < len(keys):
            length, entry_ids = self._tree.match_whole(keys, root)
        return length, min(entry_ids, default=-1)

    def get(self, entry_id: int) -> Entry:
        """Read an entry, which counts as a use."""
        self._entries.move_to_end(entry_id)
        return self._entries[entry_id]

    def drop(self, entry_id: int) -> None:
        """Forget an entry."""
        self.size -= len(self._entries.pop(entry_id).state)
        self._tree.cut(entry_id, 0)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the sizes add up."""
        self._tree.check_integrity()
        assert self.size == sum(len(entry.state) for entry in self._entries.values())
        assert self.size <= self.limit
        for entry_id, entry in self._entries.items():
            assert self._tree.keys(entry_id) == entry.keys
