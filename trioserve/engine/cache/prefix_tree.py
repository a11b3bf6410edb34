"""Which sequence holds the longest beginning of a prompt: a radix tree over token ids."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from trioserve.types import TokenId

Key = TypeVar("Key", bound=Hashable)


def shared_length(a: list[TokenId], b: list[TokenId]) -> int:
    """Count the leading tokens that two lists have in common."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    low, high = 0, limit - 1  # comparing slices is quick: halve until the difference is found
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class _Node(Generic[Key]):
    """A run of tokens, and the keys whose sequences go through all of it."""

    __slots__ = ("children", "keys", "parent", "tokens")

    def __init__(self, tokens: list[TokenId], parent: _Node[Key] | None, keys: set[Key]) -> None:
        self.tokens = tokens
        self.parent = parent
        self.keys = keys
        self.children: dict[TokenId, _Node[Key]] = {}


class PrefixTree(Generic[Key]):
    """Knows token sequences by a key, and finds the one that shares most with a prompt.

    ::

        root ── [1 2 3] ──┬── [4 5]      keys {a}
                keys {a,b}└── [7]        keys {b}

    A sequence always ends at the end of a node. A node goes when its last key does. There may be
    several roots, by name: under different ones, sequences share nothing.
    """

    def __init__(self) -> None:
        self._roots: dict[Hashable, _Node[Key]] = {}
        self._names: dict[Key, Hashable] = {}  # of the roots
        self._ends: dict[Key, _Node[Key]] = {}
        self._lengths: dict[Key, int] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._ends

    def length(self, key: Key) -> int:
        """How many tokens are known of a key's sequence."""
        return self._lengths.get(key, 0)

    def extend(self, key: Key, tokens: Sequence[TokenId], root: Hashable = None) -> None:
        """Append tokens to a key's sequence, which may be new; then it is under `root`."""
        rest = list(tokens)
        if not rest:
            return
        node = self._ends.get(key) or self._plant(key, root)
        self._lengths[key] = self.length(key) + len(rest)
        while rest:
            child = node.children.get(rest[0])
            if child is None:
                node = self._grow(node, rest, key)
                break
            shared = shared_length(child.tokens, rest)
            if shared < len(child.tokens):
                child = self._split(child, shared)
            child.keys.add(key)
            del rest[:shared]
            node = child
        self._ends[key] = node

    def cut(self, key: Key, length: int) -> None:
        """Shorten a key's sequence; with length 0, forget the key."""
        if key not in self._ends:
            return
        node, end = self._ends[key], self._lengths[key]
        while node.parent is not None and end - len(node.tokens) >= length:
            end -= len(node.tokens)
            node = self._leave(node, key)
        if end > length:
            upper = self._split(node, len(node.tokens) - (end - length))
            self._leave(node, key)
            node = upper
        if length:
            self._ends[key], self._lengths[key] = node, length
        else:
            del self._ends[key], self._lengths[key]
            name = self._names.pop(key)
            if not self._roots[name].children:
                del self._roots[name]

    def match(self, tokens: list[TokenId], root: Hashable = None) -> tuple[int, frozenset[Key]]:
        """Find the longest beginning of `tokens` that any sequence has, and who has it."""
        length, holders = 0, frozenset[Key]()
        for node, shared in self._path(tokens, root):
            length += shared
            holders = frozenset(node.keys)
        return length, holders

    def match_whole(
        self, tokens: list[TokenId], root: Hashable = None
    ) -> tuple[int, frozenset[Key]]:
        """Like `match`, of sequences that are a beginning of `tokens` from end to end."""
        length, best, holders = 0, 0, frozenset[Key]()
        for node, shared in self._path(tokens, root):
            length += shared
            if shared == len(node.tokens):
                ending = frozenset(key for key in node.keys if self._ends[key] is node)
                if ending:
                    best, holders = length, ending
        return best, holders

    def _path(self, tokens: list[TokenId], root: Hashable) -> Iterator[tuple[_Node[Key], int]]:
        """Go down along `tokens`: the nodes, and how much of each is shared."""
        node, start = self._roots.get(root), 0
        if node is None:
            return
        while start < len(tokens) and (child := node.children.get(tokens[start])) is not None:
            shared = shared_length(child.tokens, tokens[start : start + len(child.tokens)])
            yield child, shared
            if shared < len(child.tokens):
                return
            node, start = child, start + shared

    def tokens(self, key: Key) -> list[TokenId]:
        """Put a key's sequence together again."""
        parts: list[list[TokenId]] = []
        node: _Node[Key] | None = self._ends.get(key)
        while node is not None:
            parts.append(node.tokens)
            node = node.parent
        return [token for part in reversed(parts) for token in part]

    # -- the shape of the tree

    def _plant(self, key: Key, name: Hashable) -> _Node[Key]:
        """Find the root that a new key begins at."""
        self._names[key] = name
        return self._roots.setdefault(name, _Node([], None, set()))

    def _grow(self, node: _Node[Key], tokens: list[TokenId], key: Key) -> _Node[Key]:
        """Add tokens below a node that has no child for them."""
        if node.parent is not None and not node.children and node.keys == {key}:
            node.tokens += tokens
            return node
        child = _Node(tokens, node, {key})
        node.children[tokens[0]] = child
        return child

    def _split(self, node: _Node[Key], length: int) -> _Node[Key]:
        """Put a new node above, with the first `length` tokens; returns that one."""
        assert node.parent is not None
        assert 0 < length < len(node.tokens)
        upper = _Node(node.tokens[:length], node.parent, set(node.keys))
        node.parent.children[node.tokens[0]] = upper
        node.tokens = node.tokens[length:]
        node.parent = upper
        upper.children[node.tokens[0]] = node
        return upper

    def _leave(self, node: _Node[Key], key: Key) -> _Node[Key]:
        """Take a key out of a node; returns the node above."""
        parent = node.parent
        assert parent is not None
        node.keys.remove(key)
        if not node.keys:
            del parent.children[node.tokens[0]]
        return parent

    def _nodes(self) -> Iterator[_Node[Key]]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the tree is well formed."""
        for node in self._nodes():
            assert node.tokens and node.keys and node.parent is not None
            assert node.parent.children[node.tokens[0]] is node
            if node.parent.parent is not None:
                assert node.keys <= node.parent.keys, "a child has a key its parent lacks"
            below = [child.keys for child in node.children.values()]
            ending = {key for key in node.keys if self._ends[key] is node}
            assert sum(map(len, below)) + len(ending) == len(node.keys), "a key goes two ways"
        assert all(root.children for root in self._roots.values()), "a root that nobody needs"
        for key, length in self._lengths.items():
            assert len(self.tokens(key)) == length
            assert key in self.match(self.tokens(key), self._names[key])[1]
