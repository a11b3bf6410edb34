"""A KV cache with a part for each slot that is as long as the context: its memory, its texts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from tests.support.llama_bench import Bench
from trioserve.config import Config
from trioserve.engine import loop
from trioserve.errors import InvalidRequestError
from trioserve.llama import layout, lazy_pages
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.context import open_context
from trioserve.llama.layout import Layout, choose
from trioserve.llama.lazy_pages import LazyPages, is_supported
from trioserve.llama.machine import without
from trioserve.llama.model import LlamaModel
from trioserve.types import SlotState

pytestmark = pytest.mark.skipif(not is_supported(), reason="memory is lazy on Linux only")

MIB = 2**20
#: Parts that are together larger than `lazy_pages.SMALL`.
LARGE = {"threads": 1, "parallel": 16, "ctx_size": 4096}


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaModel]:
    with LlamaModel.load(Config()) as model:
        yield model


@pytest.fixture(scope="module")
def backend() -> Iterator[LlamaBackend]:
    with LlamaBackend.load(Config(**LARGE)) as backend:
        yield backend


def written(backend: LlamaBackend) -> int:
    """Count the bytes of the cache that have memory."""
    pages = backend.memory._pages
    assert pages is not None
    start = pages._tensors[0].address
    size = sum(16 * tensor.part for tensor in pages._tensors)
    n_bytes, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            first = int(name.split("-")[0], 16)
            here = start <= first < start + size
        elif here and name == "Anonymous:":
            n_bytes += int(rest[0]) * 1024
    return n_bytes


def decode(backend: LlamaBackend, seq: int, n_tokens: int) -> None:
    rng = random.Random(seq)
    for start in range(0, n_tokens, 512):
        n_new = min(512, n_tokens - start)
        backend.batch.clear()
        tokens = [rng.randrange(backend.vocab.n_tokens) for _ in range(n_new)]
        backend.batch.extend(tokens, start, seq)
        backend.decode()


def clear(backend: LlamaBackend) -> None:
    for seq in range(backend.n_seqs):
        backend.memory.remove(seq, 0)
        backend.memory.trim(seq, 0)


def test_each_part_is_as_long_as_the_context(backend: LlamaBackend) -> None:
    assert backend.is_elastic and not backend.unified
    assert (backend.n_ctx, backend.n_ctx_seq, backend.n_seqs) == (4096, 4096, 16)
    assert choose(backend._model, Config(**LARGE)) == Layout(
        unified=False, is_elastic=True, n_seqs=16, n_ctx=4096, n_part=4096, n_copies=4096
    )
    assert backend.n_ctx_copies == 4096


def test_memory_is_there_once_it_was_written_and_until_it_is_given_back(
    backend: LlamaBackend,
) -> None:
    clear(backend)
    before = written(backend)
    assert before < MIB
    cell = layout.cache_size(backend._model.shape, Config(), 256) // 256
    decode(backend, 3, 4000)
    decode(backend, 11, 1000)
    grown = written(backend) - before
    assert 5000 * cell <= grown < 5000 * cell + MIB
    state = backend.memory.save(3)
    backend.memory.remove(3, 2000)
    backend.memory.trim(3, 2000)
    fewer = written(backend) - before
    assert 3000 * cell <= fewer < 3000 * cell + MIB
    assert backend.memory.save(11)  # it is all there
    backend.memory.remove(3, 0)
    backend.memory.restore(3, state)
    assert backend.memory.save(3) == state
    clear(backend)
    assert written(backend) < MIB


def test_nothing_is_lost_that_a_sequence_holds(backend: LlamaBackend) -> None:
    clear(backend)
    lengths = {0: 700, 1: 300, 14: 1000, 15: 900}
    for seq, length in lengths.items():
        decode(backend, seq, length)
    states = {seq: backend.memory.save(seq) for seq in lengths}
    for seq, length in lengths.items():
        backend.memory.trim(seq, length)
    assert {seq: backend.memory.save(seq) for seq in lengths} == states


@pytest.mark.parametrize(
    ("fields", "n_part"),
    [
        ({}, 4096),
        ({"ctx_size": 1000}, 1024),
        ({"ctx_size": 65536}, 4096),  # as in training
        ({"ctx_size": 65536, "kv_unified_per_slot": 5000}, 4096),
        ({"kv_unified_per_slot": 500}, 512),
        ({"parallel": 1}, 0),
        ({"kv_unified": False}, 0),
        ({"kv_unified": True}, 0),
        ({"cache_seqs": 2}, 0),
        ({"flash_attn": "off"}, 0),  # the values of a token are all over the cache
    ],
)
def test_where_it_is_used(model: LlamaModel, fields: dict[str, object], n_part: int) -> None:
    found = choose(model, Config(**{"parallel": 4, **fields}))
    assert found.is_elastic == (n_part > 0)
    assert not n_part or found.n_part == n_part


@pytest.mark.parametrize(
    ("mib", "n_part"), [(80, 4096), (60, 3328), (30, 1536), (18, 1024), (17, 0)]
)
def test_all_parts_together_take_half_of_the_memory_at_most(
    model: LlamaModel, mib: int, n_part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "total_memory", lambda: mib * MIB)
    monkeypatch.setattr(layout, "ENOUGH", 512)
    found = choose(model, Config(parallel=4, ctx_size=4096))
    assert (found.n_part if found.is_elastic else 0) == n_part


@pytest.mark.parametrize(
    ("free", "n_slots", "n_copies"),
    [
        (None, 4, 2048),
        (16384, 4, 2048),
        (2048 + 1000, 4, 500),  # half of what a full context leaves
        (1000, 4, 0),
        (16384, 2, 2048),
    ],
)
def test_copies_take_no_more_than_the_context_and_half_of_the_memory(
    model: LlamaModel,
    free: int | None,
    n_slots: int,
    n_copies: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config(parallel=n_slots, ctx_size=2048)
    size = layout.cache_size(model.shape, config, 256)
    n_bytes = None if free is None else -(-free * size // 256)
    monkeypatch.setattr(layout, "free_memory", lambda: n_bytes)
    assert choose(model, config).n_copies == n_copies
    assert choose(model, attrs.evolve(config, kv_unified=False)).n_copies == 0


def test_where_memory_is_not_lazy_the_cache_has_a_fixed_size(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy_pages, "writable_ranges", list)
    with open_context(model, Config(**LARGE)) as context:
        assert not context.is_elastic
        assert (context.unified, context.n_ctx_seq) == (True, 4096)


def test_memory_that_another_thread_freed_meanwhile_does_not_hide_the_cache(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def new_only_at_the_second_try(
        ranges: list[tuple[int, int]], taken: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        tries.append(taken)
        return [] if len(tries) == 1 else without(ranges, taken)

    monkeypatch.setattr(lazy_pages, "without", new_only_at_the_second_try)
    with open_context(model, Config(**LARGE)) as context:
        assert context.is_elastic
    assert len(tries) == 2


def test_layers_of_different_sizes_are_noticed(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out = LazyPages._lay_out

    def with_smaller_rows(
        self: LazyPages, n_cells: int, n_layers: int, n_parts: int, rows: list[int]
    ) -> None:
        lay_out(self, n_cells, n_layers, n_parts, [row - 2 for row in rows])

    monkeypatch.setattr(LazyPages, "_lay_out", with_smaller_rows)
    with open_context(model, Config(**LARGE)) as context:
        assert not context.is_elastic


def test_the_texts_are_those_of_a_unified_cache() -> None:
    """And those of a split one, where prompts begin in the same way, and copies are made."""
    begin = "Once upon a time there were servers, which had to say all of this again. " * 5
    prompts = {i: f"{begin} There were {i} of them, and each of them " for i in range(6)}
    said = []
    for kv_unified in (True, False, None):
        bench = Bench(parallel=8, ctx_size=4096, kv_unified=kv_unified, cache_ram=1 << 24)
        assert bench.backend.is_elastic == (kv_unified is None)
        alone = {i: bench.alone(prompt) for i, prompt in prompts.items()}
        for i, prompt in prompts.items():
            bench.submit(i + 1, prompt)
        bench.run()
        for i in prompts:
            assert alone[i].is_said_by(bench.tokens[i + 1])
            assert i == 0 or bench.finished[i + 1].timings.cache_n > 100
        said.append(alone)
        bench.engine.stop()
        bench.engine.run()
    unified, split, elastic = said
    for i in prompts:
        assert split[i].tokens == elastic[i].tokens
        # It adds up the attention in another order.
        assert unified[i].is_said_by(elastic[i].tokens)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_short_prompt_that_is_sent_again_is_found(
    monkeypatch: pytest.MonkeyPatch, *, is_ahead: bool
) -> None:
    """Beside seven others that took all sequences, whether it was copied to RAM ahead or not."""
    monkeypatch.setattr(loop, "IDLE_S", 0.0)
    bench = Bench(parallel=8, ctx_size=4096, cache_ram=1 << 24)
    prompt = "The little red fox said to the old brown bear, and to its two "
    alone = bench.alone(prompt)
    bench.submit(1, prompt)
    bench.run()
    if is_ahead:
        bench.engine.step(wait=True)
    for task_id in range(2, 11):
        bench.submit(task_id, f"{task_id} times a day the cat walked over the roof and ")
    bench.run()
    for task_id in range(11, 18):
        bench.submit(task_id, f"{task_id} is a number, and what it is good for is not known: ")
    bench.submit(18, prompt)
    bench.run()
    found = bench.finished[18].timings
    assert found.prompt_n == 1 and found.cache_n >= 8
    assert alone.is_said_by(bench.tokens[1]) and alone.is_said_by(bench.tokens[18])
    bench.engine.stop()
    bench.engine.run()


def saved_with(folder: Path, **fields: object) -> Path:
    """Write a file of the tokens 1 to 5."""
    with LlamaBackend.load(Config(threads=1, ctx_size=4096, **fields)) as backend:
        backend.batch.extend([1, 2, 3, 4, 5], 0, 1)
        backend.decode()
        saved = SlotState(keys=(1, 2, 3, 4, 5), state=backend.memory.save(1))
        backend.write_state(folder / "slot.bin", saved)
    return folder / "slot.bin"


@pytest.mark.parametrize("unified", [None, False])
def test_a_file_from_an_elastic_or_a_split_cache_is_read(
    tmp_path: Path, backend: LlamaBackend, unified: bool | None
) -> None:
    clear(backend)
    saved, _ = backend.read_state(saved_with(tmp_path, parallel=16, kv_unified=unified), ())
    backend.memory.restore(3, saved.state)
    assert saved.keys == (1, 2, 3, 4, 5) and backend.memory.last(3) == 4


@pytest.mark.parametrize("fields", [{"parallel": 16, "kv_unified": True}, {"parallel": 4}])
def test_a_file_from_a_cache_that_is_divided_in_another_way_is_refused(
    tmp_path: Path, backend: LlamaBackend, fields: dict[str, object]
) -> None:
    clear(backend)
    saved, _ = backend.read_state(saved_with(tmp_path, **fields), ())
    with pytest.raises(InvalidRequestError, match=r"divided in another way .* slots of -np"):
        backend.memory.restore(3, saved.state)
    assert backend.memory.last(3) == -1
