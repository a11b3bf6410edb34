"""Memory that cannot be cut goes back to a state that was kept, or is empty."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from tests.support import tiny_models
from trioserve import llama
from trioserve.config import Config
from trioserve.llama.backend import LlamaBackend

TOKENS = list(range(100, 160))
PLACE = 40


@pytest.fixture(params=["gemma3", "mamba2", "granitehybrid"])
def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaBackend]:
    path = tiny_models.write_generating(tmp_path_factory.mktemp("models"), request.param)
    loaded = llama.load(Config(model=str(path), threads=1, ctx_size=512, kv_unified=True))
    assert isinstance(loaded, LlamaBackend)
    with loaded:
        yield loaded


def fill(backend: LlamaBackend, seq: int, start: int, stop: int) -> None:
    backend.batch.clear()
    backend.batch.extend(TOKENS[start:stop], start, seq)
    backend.decode()


def filled(backend: LlamaBackend) -> bytes:
    """Fill a sequence; returns its state after the first tokens."""
    fill(backend, 0, 0, PLACE)
    state = backend.memory.save(0, partial=True)
    assert len(state) == backend.memory.size(0, partial=True)
    fill(backend, 0, PLACE, len(TOKENS))
    return state


def test_it_goes_back(backend: LlamaBackend) -> None:
    state = filled(backend)
    assert backend.memory.rewind(0, PLACE, state)
    assert backend.memory.last(0) == PLACE - 1
    assert (
        backend.memory.save(0, partial=True)[8:] == state[8:]
    )  # the first bytes name the sequence
    fill(backend, 0, PLACE, len(TOKENS))
    assert backend.memory.last(0) == len(TOKENS) - 1


def test_a_copy_goes_back_and_its_source_does_not(backend: LlamaBackend) -> None:
    state = filled(backend)
    at_the_end = backend.memory.save(0)
    backend.memory.copy(0, 3)
    assert backend.memory.rewind(3, PLACE, state)
    assert backend.memory.last(3) == PLACE - 1
    assert backend.memory.save(0) == at_the_end
    fill(backend, 3, PLACE, len(TOKENS))
    assert backend.memory.save(0) == at_the_end


def test_what_does_not_fit_leaves_nothing(backend: LlamaBackend) -> None:
    state = filled(backend)
    for length, other in (
        (PLACE, state[:-9]),
        (PLACE, state + bytes(9)),
        (PLACE, bytes(len(state))),
        (PLACE - 3, state),
    ):
        with capture_logs() as logs:
            assert not backend.memory.rewind(0, length, other)
        assert logs[-1]["event"] == "a checkpoint cannot be used"
        assert backend.memory.last(0) == -1
        fill(backend, 0, 0, len(TOKENS))
        assert backend.memory.last(0) == len(TOKENS) - 1
