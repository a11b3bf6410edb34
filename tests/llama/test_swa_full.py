"""With `swa_full`, a unified KV cache may still lose what is behind the window of a sequence.

llama.cpp uses such cells again for another sequence, and then a text cannot be continued there.
"""

from __future__ import annotations

from pathlib import Path

from tests.support import tiny_models
from tests.support.llama_bench import Bench


def words(n: int, first: int) -> list[int]:
    return [first + i * i % 97 for i in range(n)]


def test_a_beginning_whose_window_is_gone_is_computed_again(tmp_path: Path) -> None:
    model = tiny_models.write_generating(tmp_path, "gemma3")
    exact = {"cache_type_k": "f32", "cache_type_v": "f32"}
    settings = {"model": str(model), "swa_full": True, "kv_unified": True, "ctx_size": 1024}
    long = words(200, 300)
    other = [*long[:30], *words(20, 280)]
    bench = Bench(**settings, **exact, parallel=2, cache_seqs=0)
    bench.submit(1, words(20, 290), 1)
    bench.submit(2, long, 1)
    bench.run()
    # Takes the cells of the first text, and passes over those of the second one.
    bench.submit(3, words(80, 310), 1)
    bench.run()
    assert bench.backend.memory.first(1) > 0
    bench.submit(4, other, 24)
    bench.run()
    bench.backend.close()
    alone = Bench(**settings, **exact, parallel=1)
    assert alone.alone(other, 24).is_said_by(bench.tokens[4])
    alone.backend.close()
