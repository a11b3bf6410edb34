"""The radix tree against the simplest thing that is right: a dict of lists."""

from __future__ import annotations

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from trioserve.engine.cache.prefix_tree import PrefixTree
from trioserve.engine.cache.sequences import CellLedger
from trioserve.types.task import shared_length

keys = st.lists(st.integers(0, 2), max_size=8)
holders = st.integers(0, 4)
roots = st.sampled_from(["", "other"])


class TreeMachine(RuleBasedStateMachine):
    """Extends, cuts and looks up; the model is a dict of lists of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.model: dict[int, list[int]] = {}
        self.roots: dict[int, str] = {}

    @rule(holder=holders, more=keys, root=roots)
    def extend(self, holder: int, more: list[int], root: str) -> None:
        if more:
            if holder not in self.model:
                self.roots[holder] = root
            self.tree.extend(holder, more, root)
            self.model[holder] = self.model.get(holder, []) + more

    @rule(holder=holders, length=st.integers(0, 10))
    def cut(self, holder: int, length: int) -> None:
        length = min(length, len(self.model.get(holder, [])))
        self.tree.cut(holder, length)
        self.model[holder] = self.model.get(holder, [])[:length]
        if not length:
            del self.model[holder]

    def under(self, root: str) -> dict[int, list[int]]:
        return {holder: held for holder, held in self.model.items() if self.roots[holder] == root}

    @rule(prompt=keys, root=roots)
    def match(self, prompt: list[int], root: str) -> None:
        lengths = {holder: shared_length(held, prompt) for holder, held in self.under(root).items()}
        best = max(lengths.values(), default=0)
        found, holders = self.tree.match(prompt, root)
        assert found == best
        if best:
            assert holders == {holder for holder, length in lengths.items() if length == best}

    @rule(prompt=keys, root=roots)
    def match_whole(self, prompt: list[int], root: str) -> None:
        held_by = self.under(root).items()
        whole = {holder for holder, held in held_by if held == prompt[: len(held)]}
        best = max((len(self.model[holder]) for holder in whole), default=0)
        found, holders = self.tree.match_whole(prompt, root)
        assert found == best
        assert holders == {holder for holder in whole if len(self.model[holder]) == best}

    @invariant()
    def agrees(self) -> None:
        self.tree.check_integrity()
        for holder in range(5):
            assert self.tree.keys(holder) == self.model.get(holder, [])
            assert (holder in self.tree) == (holder in self.model)


class LedgerMachine(RuleBasedStateMachine):
    """Cells as sets of numbers: a copy has the same ones, what is appended has new ones."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = CellLedger(4)
        self.model: list[list[int]] = [[] for _ in range(4)]
        self.next_cell = 0

    @rule(seq=st.integers(0, 3), n=st.integers(1, 5))
    def append(self, seq: int, n: int) -> None:
        self.ledger.append(seq, n)
        self.model[seq] += range(self.next_cell, self.next_cell + n)
        self.next_cell += n

    @rule(source=st.integers(0, 3), copy=st.integers(0, 3), n=st.integers(0, 20))
    def copy(self, source: int, copy: int, n: int) -> None:
        if source != copy and not self.model[copy]:
            n = min(n, len(self.model[source]))
            self.ledger.copy(source, copy, n)
            self.model[copy] = self.model[source][:n]

    @rule(seq=st.integers(0, 3), n=st.integers(0, 20))
    def cut(self, seq: int, n: int) -> None:
        n = min(n, len(self.model[seq]))
        self.ledger.cut(seq, n)
        del self.model[seq][n:]

    @invariant()
    def agrees(self) -> None:
        self.ledger.check_integrity([len(cells) for cells in self.model])
        assert self.ledger.taken == len(set().union(*self.model))
        for seq in range(4):
            others = set().union(*(self.model[i] for i in range(4) if i != seq))
            assert self.ledger.own(seq) == len(set(self.model[seq]) - others)
            pair = {seq, (seq + 1) % 4}
            assert self.ledger.taken_by(pair) == len(set().union(*(self.model[i] for i in pair)))


def test_a_copy_of_nothing_leaves_a_sequence_empty() -> None:
    ledger = CellLedger(2)
    ledger.append(0, 5)
    ledger.copy(0, 1, 0)
    ledger.copy(0, 1, 1)
    assert (ledger.lengths, ledger.taken, ledger.own(0)) == ([5, 1], 5, 4)


@pytest.mark.parametrize("machine", [TreeMachine, LedgerMachine])
def test_the_structures_agree_with_simple_models(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=40, deadline=None))
