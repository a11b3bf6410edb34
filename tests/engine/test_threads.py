"""The threads that an engine decodes with. Time is scripted: it passes in decodes alone."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from tests.support.engine_harness import Harness
from trioserve.engine import decoder as threads_module
from trioserve.engine.encoder import MediaEncoder
from trioserve.engine.thread_governor import LASTING_S
from trioserve.testing import ScriptedBackend, ScriptedProjector

N_CTX = 2**17
FEWER = "fewer threads, because other processes use the cores"
MORE = "more threads again"


class Clock:
    """The clocks of an engine whose decodes cost what their threads and the machine say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, choices: tuple[range, range]) -> None:
        self.now = 100.0
        self.cpu = 0.0
        self.others = 0
        self.backend = ScriptedBackend(lambda prompt: "x" * N_CTX, n_ctx=N_CTX, n_batch=256)
        self.backend.thread_choices = choices
        self.backend.on_decode = self._on_decode
        self.used: list[tuple[int, int]] = []  # tokens and threads of each decode
        monkeypatch.setattr(threads_module, "monotonic", lambda: self.now)
        monkeypatch.setattr(threads_module, "process_time", lambda: self.cpu)
        self.harness = Harness(self.backend)

    def _on_decode(self, backend: ScriptedBackend) -> None:
        threads = backend.threads[-1] if backend.threads else 2
        n_tokens = len(backend.batch.rows)
        self.used.append((n_tokens, threads))
        seconds = 0.05 * n_tokens / threads
        if threads + self.others > 2:
            seconds += 0.4
        self.now += seconds
        self.cpu += seconds * min(threads, 2 * threads / (threads + self.others))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            assert self.harness.step()


def test_an_engine_finds_the_best_number(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, (range(1, 3), range(1, 3)))
    clock.harness.submit(1, "one")
    clock.run(5)
    counters = clock.harness.engine.status().counters
    assert (counters.threads, counters.threads_batch, counters.thread_changes) == (2, 2, 0)
    assert clock.backend.threads == [2]
    clock.others = 1
    with capture_logs() as logs:
        clock.run(2 * LASTING_S)
    counters = clock.harness.engine.status().counters
    assert (counters.threads, counters.threads_batch, counters.thread_changes) == (1, 1, 1)
    assert [(line["event"], line["threads"]) for line in logs] == [(FEWER, 1)]
    clock.others = 0
    with capture_logs() as logs:
        clock.run(4 * LASTING_S)
    counters = clock.harness.engine.status().counters
    assert (counters.threads, counters.thread_changes) == (2, 2)
    assert [(line["event"], line["threads"]) for line in logs] == [(MORE, 2)]


def test_a_change_that_does_not_last_is_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, (range(1, 3), range(1, 3)))
    clock.harness.submit(1, "one")
    clock.run(5)
    with capture_logs() as logs:
        clock.others = 1
        clock.run(3)
        clock.others = 0
        clock.run(20)
    counters = clock.harness.engine.status().counters
    assert (counters.threads, counters.thread_changes, logs) == (2, 2, [])


def test_a_number_that_is_fixed_is_never_set(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, (range(2, 3), range(5, 6)))
    clock.harness.submit(1, "y" * 100)
    clock.others = 1
    clock.run(5)
    assert clock.backend.threads == []
    counters = clock.harness.engine.status().counters
    assert (counters.threads, counters.threads_batch, counters.thread_changes) == (2, 5, 0)


def test_an_encoder_and_a_step_beside_it_share_the_threads() -> None:
    backend = ScriptedBackend()
    backend.thread_choices = (range(1, 5), range(1, 7))
    projector = ScriptedProjector()
    encoder = MediaEncoder(projector, lambda _one: None)
    encoder.has_thread = False
    threads = threads_module.Threads(backend, encoder=encoder)
    assert projector.threads == [6]
    threads.run(1, lambda: None)
    threads.run(100, lambda: None)
    assert backend.threads == [4, 6]
    encoder.want({1: [projector.chunk("image", "x")]})
    threads.run(1, lambda: None)
    assert (backend.threads[-1], projector.threads[-1]) == (2, 2)
    threads.run(100, lambda: None)
    assert (backend.threads[-1], projector.threads[-1]) == (4, 2)
    threads.run(1, lambda: None)
    assert projector.threads == [6, 2]
    assert threads.counters()["threads"] == 4, "nothing is learned of it"
    threads.rest()
    assert projector.threads[-1] == 6
    encoder.encode_next()
    threads.run(1, lambda: None)
    assert backend.threads[-1] == 4
    threads.close()
