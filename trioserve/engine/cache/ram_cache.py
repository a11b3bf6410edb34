"""KV sequences that left the KV cache, kept in RAM under a limit of bytes."""

from __future__ import annotations

from collections import OrderedDict

import attrs

from trioserve.engine.cache.prefix_tree import PrefixTree
from trioserve.types import Adapters, TokenId


@attrs.frozen
class _Entry:
    tokens: list[TokenId]
    state: bytes


class RamCache:
    """States of sequences by tokens and adapters; the one unused for longest goes first.

    Args:
        limit: the most bytes of state to hold.
        can_cut: whether a state can be restored in part.
    """

    def __init__(self, limit: int, *, can_cut: bool) -> None:
        self.limit = limit
        self.size = 0
        self._can_cut = can_cut
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
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

    def put(self, tokens: list[TokenId], adapters: Adapters, state: bytes) -> None:
        """Keep a state. What it holds from end to end need not be kept as well."""
        for key in list(self._tree.match_whole(tokens, adapters)[1]):
            self.drop(key)
        if not self.make_room(len(state)):
            return
        key, self._next = self._next, self._next + 1
        self._entries[key] = _Entry(list(tokens), state)
        self._tree.extend(key, tokens, adapters)
        self.size += len(state)

    def holds(self, tokens: list[TokenId], adapters: Adapters) -> bool:
        """Whether all of `tokens` is here already."""
        return self._tree.match(tokens, adapters)[0] == len(tokens)

    def find(self, tokens: list[TokenId], adapters: Adapters) -> tuple[int, int]:
        """Find the longest beginning of `tokens`: its length, and the key for `get`."""
        match = self._tree.match if self._can_cut else self._tree.match_whole
        length, keys = match(tokens, adapters)
        return length, min(keys, default=-1)

    def find_whole(self, tokens: list[TokenId], adapters: Adapters) -> tuple[int, int]:
        """Find an entry with all of `tokens`, or else the longest that is a beginning of them."""
        length, keys = self._tree.match(tokens, adapters)
        if length < len(tokens):
            length, keys = self._tree.match_whole(tokens, adapters)
        return length, min(keys, default=-1)

    def get(self, key: int) -> _Entry:
        """Read an entry, which counts as a use."""
        self._entries.move_to_end(key)
        return self._entries[key]

    def drop(self, key: int) -> None:
        """Forget an entry."""
        self.size -= len(self._entries.pop(key).state)
        self._tree.cut(key, 0)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the sizes add up."""
        self._tree.check_integrity()
        assert self.size == sum(len(entry.state) for entry in self._entries.values())
        assert self.size <= self.limit
        for key, entry in self._entries.items():
            assert self._tree.tokens(key) == entry.tokens
