"""Whatever becomes of the texts of slots, the draft model has read them, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from trioserve import llama
from trioserve.config import Config
from trioserve.engine import DraftRequest
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.drafter import LlamaDrafter
from trioserve.models import BUNDLED
from trioserve.types import CacheRoot

COUNT = "<|im_start|>user\nCount from 1 to 20<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18"
N_SLOTS, N_MAX = 3, 4

slots = st.integers(0, N_SLOTS - 1)
owners = st.sampled_from(["", "x"])


class RollbackMachine(RuleBasedStateMachine):
    """Slots count, alone and together; some go astray, end, or begin again.

    The model is sure of how to count, so it is known what it guesses if it has read the text.
    """

    unified = True

    @initialize()
    def load(self) -> None:
        backend = llama.load(
            Config(
                threads=1,
                parallel=N_SLOTS,
                ctx_size=512 * N_SLOTS,
                kv_unified=self.unified,
                spec_draft_model=str(BUNDLED),
            )
        )
        assert isinstance(backend, LlamaBackend)
        self.backend = backend
        (drafter,) = backend.drafters
        assert isinstance(drafter, LlamaDrafter)
        self.drafter = drafter
        self.counting = list(backend.vocab.tokenize(COUNT + ANSWER))
        self.n_prompt = len(backend.vocab.tokenize(COUNT))
        self.texts = [self.counting[: self.n_prompt] for _ in range(N_SLOTS)]
        self.roots = [CacheRoot()] * N_SLOTS

    def teardown(self) -> None:
        self.backend.close()

    @rule(slot=slots, n=st.integers(0, 30), owner=owners)
    def begin(self, slot: int, n: int, owner: str) -> None:
        """Another run: with the same text, or a part of it, or more."""
        self.drafter.forget(slot)
        self.texts[slot] = self.counting[: self.n_prompt + n]
        self.roots[slot] = CacheRoot(owner=owner)

    @rule(slot=slots, tokens=st.lists(st.integers(300, 320), min_size=1, max_size=40))
    def go_astray(self, slot: int, tokens: list[int]) -> None:
        self.texts[slot] = self.texts[slot] + tokens

    @rule(slot=slots, cut=st.integers(1, 20))
    def shift(self, slot: int, cut: int) -> None:
        self.drafter.forget(slot)
        self.texts[slot] = self.texts[slot][cut:] or self.counting[:1]

    @rule(asked=st.sets(slots, min_size=1), n=st.integers(1, N_MAX), n_right=st.integers(0, N_MAX))
    def draft(self, asked: set[int], n: int, n_right: int) -> None:
        """Ask for drafts; some of their tokens are accepted, and one comes after them."""
        requests = [DraftRequest(i, self.texts[i], self.roots[i], n) for i in asked]
        for request, draft in zip(requests, self.drafter.propose(requests), strict=True):
            keys = list(request.keys)
            length = len(keys)
            if draft and keys == self.counting[:length] and length >= self.n_prompt:
                expected = self.counting[length : length + n]
                assert draft[: len(expected)] == expected[: len(draft)]
            self.texts[request.slot_id] = [*keys, *draft[:n_right], 310]
            if keys == self.counting[:length]:
                self.texts[request.slot_id] = self.counting[: length + min(n_right, len(draft)) + 1]

    @invariant()
    def llama_cpp_holds_what_is_believed(self) -> None:
        self.drafter.check_integrity()


class SplitRollbackMachine(RollbackMachine):
    """The same with a KV cache that is divided between the slots."""

    unified = False


@pytest.mark.parametrize("machine", [RollbackMachine, SplitRollbackMachine])
def test_the_invariant_holds(machine: type[RollbackMachine]) -> None:
    quick = settings(max_examples=8, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(machine, settings=quick)
