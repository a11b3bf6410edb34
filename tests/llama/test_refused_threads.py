"""Threads that are started with a model, on a system that refuses some."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.scripted_media import ScriptedProjector
from trioserve.engine import DecodeMaximal, Engine
from trioserve.engine.helpers import start_all
from trioserve.errors import ModelLoadError, UnavailableError
from trioserve.llama.grammar.matcher import MaskPool
from trioserve.llama.grammar.stack import with_stack
from trioserve.server.lifecycle.engine import in_thread
from trioserve.testing import ScriptedBackend


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of threads that can still be started."""
    left = [0]
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    return left


def test_all_threads_of_a_pool_are_started(limit: list[int]) -> None:
    limit[0] = 3
    with ThreadPoolExecutor(3) as pool:
        start_all(pool, 3)
        assert limit == [0]
        assert list(pool.map(str, range(10))) == [str(i) for i in range(10)]


def test_a_pool_that_gets_too_few_threads_has_none(limit: list[int]) -> None:
    before = threading.enumerate()
    limit[0] = 2
    with pytest.raises(ModelLoadError, match="the system refuses"):
        MaskPool(3)
    assert threading.enumerate() == before


async def test_an_engine_that_gets_too_few_threads_has_none(limit: list[int]) -> None:
    before = threading.enumerate()
    for n in range(3):
        limit[0] = n
        backend = ScriptedBackend(projector=ScriptedProjector(), n_slots=4)
        backend.n_spare_cores = 1
        engine = Engine(backend, DecodeMaximal(), lambda: None)
        with pytest.raises(ModelLoadError, match="the system refuses"):
            async with in_thread(engine):
                pytest.fail("it runs")
        assert threading.enumerate() == before


def test_a_grammar_without_a_thread_is_an_error_of_its_request(limit: list[int]) -> None:
    size = threading.stack_size()
    with pytest.raises(UnavailableError, match="needs a thread that the system refuses"):
        with_stack(lambda: 1)
    assert threading.stack_size() == size
    limit[0] = 1
    assert with_stack(lambda: 1) == 1


def test_the_size_of_stacks_is_as_before_grammars_that_are_compiled_at_once() -> None:
    before, together = threading.stack_size(), threading.Barrier(8)

    def compile() -> None:
        for _ in range(50):
            together.wait()
            with_stack(lambda: None)

    threads = [threading.Thread(target=compile) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert threading.stack_size() == before
