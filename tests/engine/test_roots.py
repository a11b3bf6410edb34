"""Runs with different roots: what one has computed is neither there for another nor waited for."""

from __future__ import annotations

import pytest

from tests.support.engine_harness import Harness
from trioserve.testing import ScriptedBackend
from trioserve.types import CacheRoot

MINE, OTHER, SALTED = CacheRoot(owner="a"), CacheRoot(owner="b"), CacheRoot(owner="a", salt="s")
LONG = "a prompt of some length, which takes several steps: " + "x" * 100


@pytest.mark.parametrize("root", [OTHER, SALTED, CacheRoot()])
def test_a_concurrent_prompt_is_neither_followed_nor_copied(root: CacheRoot) -> None:
    harness = Harness(ScriptedBackend(n_batch=16))
    harness.submit(1, LONG + "1", MINE, max_tokens=1)
    harness.step()
    harness.submit(2, LONG + "2", root, max_tokens=1)
    harness.step()
    assert harness.admitted == [1, 2]  # it does not wait for a leader
    harness.run()
    timings = harness.finish(2).timings
    assert (timings.cache_n, timings.prompt_n) == (0, len(LONG) + 1)


@pytest.mark.parametrize("can_cut", [True, False])
@pytest.mark.parametrize("ram", [0, 10_000])
def test_a_sequence_that_is_kept_is_no_use_to_others(can_cut: bool, ram: int) -> None:
    """Neither continued nor copied nor cut, also by a prompt that begins with all of it."""
    backend = ScriptedBackend(n_slots=1, n_ctx=400, can_cut=can_cut)
    harness = Harness(backend, cache_ram=ram)
    prompts = [(1, "", MINE), (2, "AND MORE", OTHER), (3, "AND MORE", MINE)]
    for task_id, more, root in prompts:
        harness.complete(task_id, LONG + more, root, max_tokens=1, id_slot=0)
    found = [harness.finish(task_id).timings.cache_n for task_id, _, _ in prompts]
    # The second request took the only sequence; the first one's was still in RAM.
    assert found == [0, 0, len(LONG) if ram else 0]


def test_sequences_of_other_owners_do_not_count_as_shared_cells() -> None:
    """Or a run would be admitted that does not fit, and wait in its slot."""
    harness = Harness(ScriptedBackend(n_slots=2, n_ctx=260))
    harness.submit(1, LONG, MINE, max_tokens=5)
    harness.step()
    harness.submit(2, LONG, OTHER, max_tokens=5)
    harness.step()
    assert harness.admitted == [1]
    harness.run()
    assert harness.text(2) == LONG.upper()[:5]
