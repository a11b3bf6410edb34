"""Interrupts and threads of an encoding, for which libmtmd has no functions."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from tests.support.media_models import random_image, write_pair
from trioserve import llama
from trioserve.config import Config
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.media import library
from trioserve.llama.media.library import EncodingInterrupt, EncodingThreads


class Clock:
    """Seconds that a test counts."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(library, "perf_counter", clock)
    return clock


def n_computed(
    interrupt: EncodingInterrupt, clock: Clock, n_nodes: int, seconds: float
) -> list[int]:
    """Count the nodes that are computed at once, of a graph whose nodes take so long each."""
    found, n = [], 0
    for _ in range(n_nodes):
        n += 1
        if interrupt._on_node(None, True, None):
            clock.now += n * seconds
            found.append(n)
            n = 0
            if not interrupt._on_node(None, False, None):
                break
    return found


def test_an_encoding_is_asked_about_every_few_milliseconds(clock: Clock) -> None:
    interrupt = EncodingInterrupt()
    interrupt.start()
    assert n_computed(interrupt, clock, 100, 0.0005)[-1] == 4
    assert n_computed(interrupt, clock, 100, 0.1)[-1] == 1
    assert n_computed(interrupt, clock, 5000, 1e-9)[-1] == 256
    assert not interrupt.end()


def test_after_an_interrupt_one_more_node_is_computed_at_most(clock: Clock) -> None:
    interrupt = EncodingInterrupt()
    interrupt.start()
    n_computed(interrupt, clock, 5000, 1e-9)
    interrupt.set()
    assert n_computed(interrupt, clock, 100, 1.0) == [1]
    assert interrupt.end()
    assert n_computed(interrupt, clock, 100, 1.0) == []  # of a frame of speech, say, all
    interrupt.set()  # nothing runs
    interrupt.start()
    assert not interrupt.end()


def test_the_place_of_the_number_of_threads_is_looked_for() -> None:
    numbers = (ctypes.c_int32 * 128)()
    address = ctypes.addressof(numbers)
    assert not EncodingThreads(address).is_found
    numbers[43] = EncodingThreads.MARK
    threads = EncodingThreads(address)
    assert threads.is_found
    threads.set(3)
    assert list(numbers) == [0] * 43 + [3] + [0] * 84
    numbers[1] = numbers[2] = EncodingThreads.MARK
    unsure = EncodingThreads(address)
    assert not unsure.is_found
    unsure.set(5)
    assert numbers[1] == EncodingThreads.MARK


@pytest.mark.parametrize("is_found", [True, False])
def test_encoding_works_where_the_place_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_found: bool
) -> None:
    if not is_found:
        monkeypatch.setattr(library, "_REACH", 4)
    config = Config(**write_pair(tmp_path, "mlp").settings, ctx_size=256, threads=1)
    with llama.load(config) as backend:
        assert isinstance(backend, LlamaBackend)
        projector = backend.projector
        assert projector is not None
        assert projector._threads.is_found == is_found
        ((_, chunk),) = projector.prepare([random_image()], add_special=False).media
        assert np.isfinite(projector.encode(chunk)).all()
