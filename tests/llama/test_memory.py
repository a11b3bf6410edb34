from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings, strategies as st

from trioserve import llama
from trioserve.config import Config
from trioserve.errors import (
    DecodeError,
    EngineError,
    InvalidRequestError,
    KVCacheFullError,
)
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.library import lib
from trioserve.types import SamplingParams

TOKENS = tuple(range(300, 340))


@pytest.fixture(scope="module", params=[True, False], ids=["unified", "split"])
def loaded(request: pytest.FixtureRequest) -> Iterator[LlamaBackend]:
    config = Config(threads=1, ctx_size=1024, parallel=4, cache_seqs=0, kv_unified=request.param)
    with llama.load(config) as backend:
        yield backend


@pytest.fixture
def backend(loaded: LlamaBackend) -> LlamaBackend:
    for seq in range(loaded.n_seqs):
        loaded.memory.remove(seq, 0)
    loaded.batch.clear()
    return loaded


def fill(backend: LlamaBackend, seq: int, tokens: tuple[int, ...] = TOKENS, pos: int = 0) -> int:
    """Decode tokens into a sequence; returns the most probable token that follows."""
    backend.batch.clear()
    row = backend.batch.extend(tokens, pos, seq)
    backend.batch.want_logits(row)
    backend.decode()
    with backend.sampler(SamplingParams(temperature=0), ()) as sampler:
        return sampler.sample(row)


def bounds(backend: LlamaBackend, seq: int) -> tuple[int, int]:
    first = lib.llama_memory_seq_pos_min(backend.memory._handle, seq)
    return first, backend.memory.last(seq)


def test_an_empty_sequence_has_no_positions(backend: LlamaBackend) -> None:
    assert bounds(backend, 3) == (-1, -1)
    assert backend.memory.remove(3, 0)


def test_a_cut_sequence_goes_on_as_if_it_had_been_short(backend: LlamaBackend) -> None:
    expected = fill(backend, 0)
    assert backend.memory.remove(0, 10)
    assert bounds(backend, 0) == (0, 9)
    assert fill(backend, 0, TOKENS[10:], 10) == expected


def test_a_copy_goes_on_as_the_original(backend: LlamaBackend) -> None:
    fill(backend, 0)
    backend.memory.copy(0, 2)
    assert bounds(backend, 2) == (0, 39)
    assert fill(backend, 2, (350, 351), 40) == fill(backend, 0, (350, 351), 40)


def test_a_copy_can_be_cut_at_once_and_lives_on_its_own(backend: LlamaBackend) -> None:
    fill(backend, 0)
    backend.memory.copy(0, 3)
    backend.memory.remove(3, 20)
    backend.memory.remove(0, 0)
    assert bounds(backend, 3) == (0, 19)
    copied = fill(backend, 3, TOKENS[20:], 20)
    assert copied == fill(backend, 0)


def test_a_copy_over_a_sequence_that_is_not_empty_is_refused(backend: LlamaBackend) -> None:
    fill(backend, 0)
    fill(backend, 1)
    with pytest.raises(EngineError, match="Sequence 1 is not empty"):
        backend.memory.copy(0, 1)
    with pytest.raises(EngineError, match="Sequence 0 is not empty"):
        backend.memory.copy(0, 0)
    assert bounds(backend, 1) == (0, 39)


def test_a_saved_sequence_can_be_restored_in_another(backend: LlamaBackend) -> None:
    fill(backend, 1)
    data = backend.memory.save(1)
    assert isinstance(data, bytes)
    assert len(data) == backend.memory.size(1)
    fill(backend, 3, (5, 6, 7))
    backend.memory.restore(3, data)
    assert bounds(backend, 3) == (0, 39)
    assert fill(backend, 3, (350,), 40) == fill(backend, 1, (350,), 40)


def test_an_empty_sequence_can_be_saved(backend: LlamaBackend) -> None:
    backend.memory.restore(1, backend.memory.save(0))
    assert bounds(backend, 1) == (-1, -1)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(keep=st.floats(0, 0.999), junk=st.binary(max_size=40))
def test_a_state_that_does_not_fit_leaves_an_empty_sequence(
    loaded: LlamaBackend, keep: float, junk: bytes
) -> None:
    loaded.memory.remove(0, 0)
    fill(loaded, 0)
    data = loaded.memory.save(0)
    for bad in (data[: int(len(data) * keep)], junk, b"\xff" * 4 + data[4:]):
        with pytest.raises(InvalidRequestError, match="does not fit"):
            loaded.memory.restore(0, bad)
        assert bounds(loaded, 0) == (-1, -1)


def test_a_copy_that_waits_for_the_next_decode_is_not_saved(backend: LlamaBackend) -> None:
    fill(backend, 0)
    fill(backend, 2, (350, 351), 0)
    before, other = backend.memory.save(0), backend.memory.save(2)
    backend.memory.copy(0, 1)
    if backend.n_ctx == backend.n_ctx_seq:  # unified: it is complete at once
        assert backend.memory.save(1)
        return
    with pytest.raises(EngineError, match="after the next decode"):
        backend.memory.save(1)
    for seq in (0, 1):
        with pytest.raises(EngineError, match="being copied"):
            backend.memory.restore(seq, b"")
    # Other sequences can be read and written meanwhile.
    assert backend.memory.save(0) == before
    backend.memory.restore(3, other)
    fill(backend, 1, (350,), 40)
    assert (backend.memory.save(0), backend.memory.save(2)) == (before, other)
    assert fill(backend, 3, (352,), 2) == fill(backend, 2, (352,), 2)
    assert backend.memory.save(1)


@pytest.mark.parametrize("seq", [-1, 4])
@pytest.mark.parametrize(
    "use",
    [
        lambda backend, seq: backend.memory.remove(seq, 0),
        lambda backend, seq: backend.memory.copy(seq, 0),
        lambda backend, seq: backend.memory.copy(0, seq),
        lambda backend, seq: backend.memory.last(seq),
        lambda backend, seq: backend.memory.save(seq),
        lambda backend, seq: backend.memory.restore(seq, b""),
    ],
)
def test_a_sequence_that_does_not_exist_is_refused(
    backend: LlamaBackend, use: Callable[[LlamaBackend, int], object], seq: int
) -> None:
    with pytest.raises(EngineError, match=f"There is no sequence {seq}; there are 4"):
        use(backend, seq)


def test_a_full_cache_is_told_and_left_as_it_was(backend: LlamaBackend) -> None:
    room = backend.n_ctx_seq
    fill(backend, 0, (5,) * (room - 2))
    with pytest.raises(KVCacheFullError, match="no room for a batch of 3 tokens"):
        fill(backend, 0, (5, 6, 7), room - 2)
    assert bounds(backend, 0) == (0, room - 3)
    fill(backend, 0, (5, 6), room - 2)


def test_a_gap_in_the_positions_is_an_error_that_says_so(backend: LlamaBackend) -> None:
    fill(backend, 0)
    with pytest.raises(DecodeError, match=r"code -1: .*position"):
        fill(backend, 0, (5,), 50)
    with (
        backend.sampler(SamplingParams(), ()) as sampler,
        pytest.raises(EngineError, match="no logits"),
    ):
        sampler.sample(0)
    assert bounds(backend, 0) == (0, 39)


def test_an_empty_batch_does_nothing(backend: LlamaBackend) -> None:
    fill(backend, 0)
    backend.batch.clear()
    backend.decode()
    assert bounds(backend, 0) == (0, 39)
