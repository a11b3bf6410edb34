"""What the draft model has seen of each slot's text: its KV sequences, kept in step."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trioserve.engine.backend import DraftRequest
from trioserve.llama.memory import Memory
from trioserve.types import CacheRoot, TokenId
from trioserve.types.task import shared_length

#: With no more new tokens than this, a slot is not behind. A copy saves more than this, too.
FEW = 16


@attrs.define
class Text:
    """The KV sequence of a slot; both have the same number.

    ::

        held    | keys of the slot .......... | guesses, right or wrong |
                0                       n_agreed                 len(held)
    """

    id: int
    held: list[TokenId] = attrs.field(factory=list)
    root: CacheRoot = attrs.field(default=CacheRoot())
    n_agreed: int = 0  # keys that are known to be the slot's; more may be
    is_closed: bool = False  # no more drafts, until the slot has another text


class Texts:
    """The sequences of the draft model's context."""

    def __init__(self, memory: Memory, n_seqs: int) -> None:
        self._memory = memory
        self._all = [Text(i) for i in range(n_seqs)]

    def follow(self, request: DraftRequest) -> Text:
        """Cut a slot's sequence to what it has in common with the slot's text, less the last key.

        If much is missing that the sequence of another slot has, it gets a copy of that.
        """
        text, keys = self._all[request.slot_id], request.keys
        if text.root != request.root:
            self.clear(text)
            text.root = request.root
        n_known = text.n_agreed
        maybe_shared = list(keys[n_known : len(text.held)])
        n_shared = n_known + shared_length(text.held[n_known:], maybe_shared)
        if len(keys) - n_shared > FEW:
            n_shared = self._copy_longer(text, keys, n_shared)
        n_shared = min(n_shared, len(keys) - 1)
        if n_shared < len(text.held):
            self._memory.remove(text.id, n_shared)
            del text.held[n_shared:]
        text.n_agreed = n_shared
        return text

    def _copy_longer(self, text: Text, keys: Sequence[TokenId], n_shared: int) -> int:
        """Take over another sequence with a longer beginning of the keys; returns its length."""
        wanted = list(keys)
        alike = [other for other in self._all if other is not text and other.root == text.root]
        lengths = {other.id: shared_length(other.held, wanted) for other in alike}
        best = max(lengths, key=lengths.__getitem__, default=None)
        if best is None or lengths[best] < n_shared + FEW:
            return n_shared
        self._memory.remove(text.id, 0)
        self._memory.copy(best, text.id)
        text.held = list(self._all[best].held)
        return lengths[best]

    def reopen(self, slot_id: int) -> None:
        """Note that a slot has another text. What it shares with the last one is found later."""
        text = self._all[slot_id]
        text.n_agreed, text.is_closed = 0, False

    def clear(self, text: Text) -> None:
        """Forget all of a text."""
        self._memory.remove(text.id, 0)
        text.held, text.n_agreed = [], 0

    def check_integrity(self) -> None:
        """Raise AssertionError unless llama.cpp holds what the texts say."""
        for text in self._all:
            assert self._memory.last(text.id) == len(text.held) - 1
            assert text.n_agreed <= len(text.held)

    def make_room(self, requests: Sequence[DraftRequest]) -> None:
        """Forget the texts of slots without a request.

        If these hold nothing, close one of the others: that which is most behind, or the longest.
        """
        in_use = {request.slot_id for request in requests}
        idle = [text for text in self._all if text.id not in in_use and text.held]
        for text in idle:
            self.clear(text)
        if not idle:
            wanting = [(request, self._all[request.slot_id]) for request in requests]
            _, text = max(wanting, key=lambda pair: _dispensable(*pair))
            self.clear(text)
            text.is_closed = True


def _dispensable(request: DraftRequest, text: Text) -> tuple[bool, bool, int]:
    n_held = len(text.held)
    n_missing = len(request.keys) - n_held
    is_behind = n_missing > FEW
    return not text.is_closed, is_behind, n_missing if is_behind else n_held
