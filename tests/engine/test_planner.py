"""What is in a step, and in which order."""

from __future__ import annotations

import pytest

from tests.engine.test_media import MediaHarness
from tests.support.engine_harness import Harness
from trioserve.testing import ScriptedBackend, ScriptedProjector


@pytest.mark.parametrize(("n_ctx_seq", "seqs"), [(300, [1, 0]), (100, [0, 1])])
def test_in_a_split_cache_rows_are_in_the_order_of_their_sequences(
    n_ctx_seq: int, seqs: list[int]
) -> None:
    harness = Harness(ScriptedBackend(n_slots=3, n_ctx=300, n_ctx_seq=n_ctx_seq))
    for task_id, prompt in enumerate(("ones", "twos"), 1):
        harness.submit(task_id, prompt * 7, max_tokens=1)
        harness.step()
    for task_id, prompt in enumerate(("twos", "ones"), 3):  # in the other one's slot each
        harness.submit(task_id, prompt * 7, id_slot=task_id - 3)
        harness.step()
    harness.step()
    assert [seq for _, _, seq, _ in harness.backend.batch.rows] == seqs


def test_media_go_first_before_the_first_turn() -> None:
    one = MediaHarness(ScriptedProjector(n_cells=60))
    one.ask(1, "[image:x]")
    one.step()
    one.encoder.encode_next()
    one.ask(2, "t" * 60)
    held = []
    for _ in range(2):
        one.step()
        held.append([slot.n_past for slot in one.engine.status().slots])
    assert held == [[60, 0], [61, 60]]
