"""A radix tree over the keys of cells: it finds who holds the longest beginning of a prompt."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from trioserve.types import CellKey
from trioserve.types.task import shared_length


class _Node:
    """A run of keys, and the holders whose sequences go through all of it."""

    __slots__ = ("children", "holders", "keys", "parent")

    def __init__(self, keys: list[CellKey], parent: _Node | None, holders: set[int]) -> None:
        self.keys = keys
        self.parent = parent
        self.holders = holders
        self.children: dict[CellKey, _Node] = {}


class PrefixTree:
    """Stores the keys of each holder, and finds the one that shares most with a prompt.

    ::

        root ── [1 2 3] ────────┬── [4 5]    holders {a}
                holders {a, b}  └── [7]      holders {b}

    A sequence always ends at the end of a node. A node is dropped when its last holder leaves it.
    There may be several roots, by name: under different ones, sequences share nothing.
    """

    def __init__(self) -> None:
        self._roots: dict[Hashable, _Node] = {}
        self._names: dict[int, Hashable] = {}  # of the roots
        self._ends: dict[int, _Node] = {}
        self._lengths: dict[int, int] = {}

    def __contains__(self, holder: int) -> bool:
        return holder in self._ends

    def length(self, holder: int) -> int:
        return self._lengths.get(holder, 0)

    def extend(self, holder: int, keys: Sequence[CellKey], root: Hashable = None) -> None:
        """Append keys to a holder's sequence, which may be new; then it is under `root`."""
        rest = list(keys)
        if not rest:
            return
        node = self._ends.get(holder)
        if node is None:
            self._names[holder] = root
            node = self._roots.setdefault(root, _Node([], None, set()))
        self._lengths[holder] = self.length(holder) + len(rest)
        while rest:
            child = node.children.get(rest[0])
            if child is None:
                node = self._grow(node, rest, holder)
                break
            shared = shared_length(child.keys, rest)
            if shared < len(child.keys):
                child = self._split(child, shared)
            child.holders.add(holder)
            del rest[:shared]
            node = child
        self._ends[holder] = node

    def cut(self, holder: int, length: int) -> None:
        """Shorten a holder's sequence; with length 0, forget the holder."""
        if holder not in self._ends:
            return
        node, end = self._ends[holder], self._lengths[holder]
        while node.parent is not None and end - len(node.keys) >= length:
            end -= len(node.keys)
            node = self._leave(node, holder)
        if end > length:
            upper = self._split(node, len(node.keys) - (end - length))
            self._leave(node, holder)
            node = upper
        if length:
            self._ends[holder], self._lengths[holder] = node, length
        else:
            del self._ends[holder], self._lengths[holder]
            name = self._names.pop(holder)
            if not self._roots[name].children:
                del self._roots[name]

    def match(self, keys: list[CellKey], root: Hashable = None) -> tuple[int, frozenset[int]]:
        """Find the longest beginning of `keys` that any sequence has, and who has it."""
        length, holders = 0, frozenset[int]()
        for node, shared in self._path(keys, root):
            length += shared
            holders = frozenset(node.holders)
        return length, holders

    def match_whole(self, keys: list[CellKey], root: Hashable = None) -> tuple[int, frozenset[int]]:
        """Like `match`, of sequences that are a beginning of `keys` from end to end."""
        length, best, holders = 0, 0, frozenset[int]()
        for node, shared in self._path(keys, root):
            length += shared
            if shared == len(node.keys):
                ending = frozenset(holder for holder in node.holders if self._ends[holder] is node)
                if ending:
                    best, holders = length, ending
        return best, holders

    def _path(self, keys: list[CellKey], root: Hashable) -> Iterator[tuple[_Node, int]]:
        """Go down along `keys`: the nodes, and how much of each is shared."""
        node, start = self._roots.get(root), 0
        if node is None:
            return
        while start < len(keys) and (child := node.children.get(keys[start])) is not None:
            shared = shared_length(child.keys, keys[start : start + len(child.keys)])
            yield child, shared
            if shared < len(child.keys):
                return
            node, start = child, start + shared

    def keys(self, holder: int) -> list[CellKey]:
        """Put a holder's sequence together again."""
        parts: list[list[CellKey]] = []
        node: _Node | None = self._ends.get(holder)
        while node is not None:
            parts.append(node.keys)
            node = node.parent
        return [key for part in reversed(parts) for key in part]

    # -- the shape of the tree

    def _grow(self, node: _Node, keys: list[CellKey], holder: int) -> _Node:
        """Add keys below a node that has no child for them."""
        if node.parent is not None and not node.children and node.holders == {holder}:
            node.keys += keys
            return node
        child = _Node(keys, node, {holder})
        node.children[keys[0]] = child
        return child

    def _split(self, node: _Node, length: int) -> _Node:
        """Put a new node above, with the first `length` keys; returns that one."""
        assert node.parent is not None
        assert 0 < length < len(node.keys)
        upper = _Node(node.keys[:length], node.parent, set(node.holders))
        node.parent.children[node.keys[0]] = upper
        node.keys = node.keys[length:]
        node.parent = upper
        upper.children[node.keys[0]] = node
        return upper

    def _leave(self, node: _Node, holder: int) -> _Node:
        """Take a holder out of a node; returns the node above."""
        parent = node.parent
        assert parent is not None
        node.holders.remove(holder)
        if not node.holders:
            del parent.children[node.keys[0]]
        return parent

    def _nodes(self) -> Iterator[_Node]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the tree is well formed."""
        for node in self._nodes():
            assert node.keys and node.holders and node.parent is not None
            assert node.parent.children[node.keys[0]] is node
            if node.parent.parent is not None:
                assert node.holders <= node.parent.holders, "a child has a holder its parent lacks"
            below = [child.holders for child in node.children.values()]
            ending = {holder for holder in node.holders if self._ends[holder] is node}
            assert sum(map(len, below)) + len(ending) == len(node.holders), "a holder goes two ways"
        assert all(root.children for root in self._roots.values()), "a root without children"
        for holder, length in self._lengths.items():
            assert len(self.keys(holder)) == length
            assert holder in self.match(self.keys(holder), self._names[holder])[1]
