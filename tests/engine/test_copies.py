"""An elastic KV cache: prompts that share a beginning, and room for copies of it."""

from __future__ import annotations

import pytest

from tests.support.engine_harness import Harness
from trioserve.engine.cache.prefix_cache import PrefixCache
from trioserve.testing import ScriptedBackend
from trioserve.types import EngineCounters

SHARED = "s" * 1000


def harness_of(n_ctx: int, n_ctx_copies: int, cache_ram: int = 0) -> Harness:
    backend = ScriptedBackend(
        lambda prompt: "yes" * 20,
        n_slots=8,
        n_ctx=n_ctx,
        n_batch=512,
        is_elastic=True,
        n_ctx_copies=n_ctx_copies,
    )
    return Harness(backend, cache_ram=cache_ram)


def cache_of(harness: Harness) -> PrefixCache:
    return harness.engine._scheduler.cache


def counters(harness: Harness) -> EngineCounters:
    return harness.engine.status().counters


def crowd(harness: Harness) -> int:
    """Let eight share a prompt; returns how many of them ran at the same time."""
    for task_id in range(1, 9):
        harness.submit(task_id, SHARED + f"{task_id:<30}", max_tokens=16)
    most = 0
    while harness.step():
        running = [seq for seq in cache_of(harness).held.all if seq.running]
        now = counters(harness)
        written = sum(map(len, harness.backend.sequences))
        assert now.n_cells_used + now.n_cells_copied == written
        assert now.n_cells_copied <= harness.backend.n_ctx_copies
        assert now.n_cells_running <= now.n_cells_used <= now.n_cells
        most = max(most, len(running))
    assert all(harness.text(task_id) == ("yes" * 20)[:16] for task_id in range(1, 9))
    return most


@pytest.mark.parametrize(
    ("n_ctx", "n_ctx_copies", "most"),
    [
        (8192, 8192, 8),
        (8192, 0, 7),  # each copy counts, and the eighth does not fit
        (8192, 40, 7),
        (8192, 60, 8),
        (1300, 7000, 8),
        (1300, 1300, 2),
    ],
)
def test_eight_that_share_a_prompt_run_together(n_ctx: int, n_ctx_copies: int, most: int) -> None:
    harness = harness_of(n_ctx, n_ctx_copies)
    assert crowd(harness) == most
    assert harness.backend.n_decoded < 8 * len(SHARED)
