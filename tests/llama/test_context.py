from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from trioserve.config import Config
from trioserve.errors import DecodeInterruptedError, EngineError, ModelLoadError
from trioserve.llama import context, layout, library
from trioserve.llama.batch import LlamaBatch
from trioserve.llama.context import (
    Context,
    generation_params,
    open_context,
    thread_choices,
    threads,
)
from trioserve.llama.layout import CACHE_TYPES, cache_size, choose, sequences
from trioserve.llama.library import lib
from trioserve.llama.model import LlamaModel


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaModel]:
    with LlamaModel.load(Config()) as model:
        yield model


def make(model: LlamaModel, **fields: object) -> Context:
    config = Config(**{"threads": 1, "cache_seqs": 0, **fields})
    return open_context(model, config)


def test_the_default_is_the_training_context(model: LlamaModel) -> None:
    with make(model) as made:
        assert (made.n_ctx, made.n_ctx_seq, made.n_seqs) == (4096, 4096, 4)
        assert (made.n_batch, made.n_ubatch) == (2048, 512)


def test_a_split_cache_is_divided(model: LlamaModel) -> None:
    with make(model, ctx_size=1024, kv_unified=False) as made:
        assert (made.n_ctx, made.n_ctx_seq) == (1024, 256)


@pytest.mark.parametrize(
    ("fields", "n_ctx", "n_batch"),
    [
        ({"ctx_size": 1}, 256, 256),
        ({"ctx_size": 1, "parallel": 100}, 256, 256),
        ({"ctx_size": 300}, 512, 512),
        ({"ctx_size": 256, "batch_size": 1, "parallel": 8}, 256, 9),
        ({"ctx_size": 256, "batch_size": 2**20, "ubatch_size": 2**20}, 256, 256),
    ],
)
def test_sizes_that_llama_cpp_would_not_survive_are_raised(
    model: LlamaModel, fields: dict[str, int], n_ctx: int, n_batch: int
) -> None:
    with make(model, **fields) as made:
        assert (made.n_ctx, made.n_batch) == (n_ctx, n_batch)
        assert made.n_ubatch <= made.n_batch


@pytest.mark.parametrize("name", CACHE_TYPES)
def test_the_size_of_the_cache_is_known_before(
    model: LlamaModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"cache_type_k": name, "cache_type_v": "q8_0", "ctx_size": 1024, "parallel": 1}
    lines: list[str] = []
    monkeypatch.setattr(library.lines, "write", lambda _level, line: lines.append(line))
    make(model, **fields).close()
    [size] = re.findall(r"KV buffer size = +([\d.]+) MiB", "\n".join(lines))
    expected = cache_size(model.shape, Config(**fields), 1024)
    assert float(size) == pytest.approx(expected / 2**20, abs=0.01)


def test_a_cache_larger_than_the_memory_is_refused(model: LlamaModel) -> None:
    with pytest.raises(ModelLoadError, match=r"needs 4\.5 TiB, .* set a smaller --ctx-size\."):
        make(model, ctx_size=2**31 - 1)
    with pytest.raises(ModelLoadError, match="KV cache for 65536 tokens does not fit"):
        context_with_memory(model, 10 * 2**20, parallel=256, kv_unified=False)
    context_with_memory(model, 64 * 2**20)


def context_with_memory(model: LlamaModel, free: int, **fields: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "free_memory", lambda: free)
        make(model, **fields).close()


def test_what_llama_cpp_refuses_says_why(model: LlamaModel) -> None:
    with pytest.raises(ModelLoadError, match="cannot be made: quantized V cache requires flash"):
        make(model, cache_type_v="q8_0", flash_attn="off")


@pytest.mark.parametrize(
    ("quota", "expected"), [(None, (8, 16)), (0.5, (1, 1)), (2.9, (2, 2)), (9.0, (8, 9))]
)
def test_a_quota_pays_for_so_many_threads(
    quota: float | None, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "physical_cores", lambda: 8)
    monkeypatch.setattr(context, "allowed_cpus", lambda: range(16))
    monkeypatch.setattr(context, "cpu_quota", lambda: quota)
    assert (threads(-1), threads(0)) == expected
    assert threads(32) == 32


def test_only_numbers_that_are_not_configured_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "threads", lambda number: 4 if number < 1 else number)
    free, four = range(1, 5), range(4, 5)
    assert thread_choices(Config()) == (free, free)
    assert thread_choices(Config(threads=3)) == (range(3, 4), range(3, 4))
    assert thread_choices(Config(threads=0)) == (four, four)
    assert thread_choices(Config(threads=3, threads_batch=6)) == (range(3, 4), range(6, 7))
    assert thread_choices(Config(threads_batch=6)) == (free, range(6, 7))


def test_the_number_of_threads_can_be_changed(model: LlamaModel) -> None:
    with make(model, threads=3) as made:
        made.set_threads(2)
        assert lib.llama_n_threads(made.handle) == lib.llama_n_threads_batch(made.handle) == 2


def test_prefill_has_the_threads_of_decode_unless_told(model: LlamaModel) -> None:
    params = generation_params(model, Config(threads=3))
    assert (params.n_threads, params.n_threads_batch) == (3, 3)
    params = generation_params(model, Config(threads=3, threads_batch=5))
    assert (params.n_threads, params.n_threads_batch) == (3, 5)


def test_more_logits_than_there_is_room_for_are_refused(model: LlamaModel) -> None:
    config = Config(threads=1, ctx_size=256, parallel=1, cache_seqs=1)
    with open_context(model, config, n_scores=0) as context:
        batch = LlamaBatch(4, n_vocab=10, n_seqs=1)
        for pos in range(3):
            batch.add(1, pos, 0, logits=True)
        with pytest.raises(EngineError, match="at most 2 rows"):
            context.decode(batch)


def test_sequences_to_keep_come_on_top_of_those_of_the_slots() -> None:
    assert sequences(Config(parallel=3)) == 35
    assert sequences(Config(parallel=3), unified=False) == 3
    assert sequences(Config(parallel=3, cache_seqs=2), unified=False) == 5
    assert sequences(Config(parallel=200, cache_seqs=255)) == 256


@pytest.mark.parametrize(
    ("fields", "unified"),
    [
        ({}, True),
        ({"parallel": 4, "ctx_size": 4 * 4096}, False),
        ({"parallel": 4, "ctx_size": 4 * 4096 - 256}, True),
        ({"parallel": 8, "ctx_size": 8 * 4096}, False),
        ({"parallel": 8}, True),  # parts of what the model was trained for would be too small
        ({"parallel": 8, "ctx_size": 65536, "kv_unified": True}, True),
        ({"parallel": 8, "ctx_size": 65536, "cache_seqs": 4}, True),
        ({"parallel": 8, "ctx_size": 65536, "kv_unified_per_slot": 5000}, True),
        ({"parallel": 1, "kv_unified": False}, False),
        ({"parallel": 1, "ctx_size": 65536}, True),
    ],
)
def test_slots_with_enough_cells_get_parts_of_their_own(
    fields: dict[str, Any], unified: bool, model: LlamaModel
) -> None:
    assert choose(model, Config(**fields), may_be_elastic=False).unified is unified


def test_a_model_that_cannot_be_cut_has_one_cache(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaModel, "can_cut", False)
    assert choose(model, Config(parallel=8, ctx_size=65536), may_be_elastic=False).unified
    monkeypatch.setattr(LlamaModel, "has_state", True)
    assert choose(model, Config(parallel=8, ctx_size=65536)).unified


def test_an_interrupted_decode_changes_nothing(model: LlamaModel) -> None:
    def logits(made: Context, batch: LlamaBatch) -> list[float]:
        made.decode(batch)
        pointer = library.lib.llama_get_logits_ith(made.handle, len(batch) - 1)
        return list(pointer[: model.vocab.n_tokens])

    def batch_of(prompts: dict[int, Sequence[int]], pos: int = 0) -> LlamaBatch:
        batch = LlamaBatch(512, n_vocab=model.vocab.n_tokens, n_seqs=4)
        for seq, tokens in prompts.items():
            row = batch.extend(tokens, pos, seq)
        batch.want_logits(row)
        return batch

    tokens = model.vocab.tokenize("Once upon a time there was a server. " * 20)[:128]
    first, second = batch_of({2: tokens[:60], 0: tokens[:3]}), batch_of({0: tokens[60:]}, 3)
    with make(model, ctx_size=512, ubatch_size=32) as made:
        expected = [logits(made, batch) for batch in (first, second)]
    with make(model, ctx_size=512, ubatch_size=32) as made:
        for batch, its_logits in zip((first, second), expected, strict=True):
            before = [made.memory.last(seq) for seq in range(4)]
            made.interrupt()
            with pytest.raises(DecodeInterruptedError), capture_logs() as lines:
                made.decode(batch)
            assert {line["log_level"] for line in lines} == {"debug"}
            assert [made.memory.last(seq) for seq in range(4)] == before
            assert logits(made, batch) == its_logits
