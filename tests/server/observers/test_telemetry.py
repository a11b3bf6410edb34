"""`Server.telemetry`: its reports, and that no subscriber can harm others."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.scripts import answering
from tests.support.taken_threads import all_taken
from trioserve.config import Config
from trioserve.errors import InvalidRequestError
from trioserve.server import Server
from trioserve.server.observers import telemetry
from trioserve.server.observers.telemetry import TelemetryBatch
from trioserve.testing import ScriptedBackend, scripted, stepping
from trioserve.types import FinishReason, StepRecord


class Listener:
    """Records the events."""

    def __init__(self) -> None:
        self.batches: list[TelemetryBatch] = []

    async def __call__(self, batch: TelemetryBatch) -> None:
        self.batches.append(batch)

    @property
    def steps(self) -> list[StepRecord]:
        return [step for batch in self.batches for step in batch.steps]

    @property
    def finishes(self) -> list[FinishReason | None]:
        return [one.end.finish for batch in self.batches for one in batch.requests]


@asynccontextmanager
async def serve(backend: ScriptedBackend | None = None, **config: Any) -> AsyncIterator[Server]:
    """A server whose engine is driven by the event loop."""
    backend = backend or answering("abcdef")
    config.setdefault("stream_interval_ms", 0)
    async with Server(Config(**config), load=scripted(backend), drive=stepping) as server:
        yield server


async def test_steps_and_requests_are_told_in_batches(autojump_clock: MockClock) -> None:
    listener = Listener()
    async with serve() as server, server.telemetry.subscribe(listener, interval=1.0):
        await server.complete("p" * 40)
        assert not listener.batches
        await trio.sleep(1.1)
        (batch,) = listener.batches
        first, *others = batch.steps
        assert (first.n_prefill, first.n_decode, first.n_tokens) == (40, 0, 40)
        assert [step.n_decode for step in others if step.n_tokens] == [1] * 6
        assert {step.n_slots for step in others if step.n_tokens} == {1}
        assert first.n_running == 1 and batch.steps[-1].n_running == 0
        assert [step.index for step in batch.steps] == list(range(1, len(batch.steps) + 1))
        assert all(step.ms > 0 for step in batch.steps) and batch.n_lost == 0
        (record,) = batch.requests
        assert (record.request.n_prompt, record.end.n_output) == (40, 7)
        assert record.request.task is None  # prompts are not kept
        await trio.sleep(5)
        assert len(listener.batches) == 1  # there was nothing to tell


async def test_the_last_batch_comes_at_the_end(autojump_clock: MockClock) -> None:
    listener = Listener()
    async with serve() as server:
        async with server.telemetry.subscribe(listener, interval=1000):
            await server.complete("p")
        assert listener.finishes == [FinishReason.EOS]


async def test_who_waits_is_counted(autojump_clock: MockClock) -> None:
    listener = Listener()
    backend = ScriptedBackend(lambda prompt: "x" * 20, n_slots=1)
    async with (
        serve(backend) as server,
        server.telemetry.subscribe(listener),
        trio.open_nursery() as nursery,
    ):
        for _ in range(3):
            nursery.start_soon(server.complete, "p")
    assert max(step.n_waiting for step in listener.steps) == 2
    assert max(step.n_running for step in listener.steps) == 1


async def test_nothing_is_spent_when_nobody_listens(autojump_clock: MockClock) -> None:
    async with serve() as server:
        loop = server.lifecycle.services.loop
        assert loop.watchers == () and server.telemetry not in server.observers
        async with server.telemetry.subscribe(Listener()):
            assert len(loop.watchers) == 1 and server.telemetry in server.observers
        await server.complete("p")
        assert loop.watchers == () and server.telemetry not in server.observers


async def test_a_function_that_raises_hurts_nobody(autojump_clock: MockClock) -> None:
    listener = Listener()

    async def broken(_batch: TelemetryBatch) -> None:
        raise ZeroDivisionError

    async with serve() as server:
        with structlog.testing.capture_logs() as logs:
            async with (
                server.telemetry.subscribe(broken),
                server.telemetry.subscribe(listener),
            ):
                for _ in range(2):
                    assert (await server.complete("p")).text == "abcdef"
                    await trio.sleep(1)
    assert listener.finishes == [FinishReason.EOS] * 2
    failures = [line for line in logs if line["event"] == "a telemetry callback has failed"]
    assert len(failures) == 2


async def test_a_slow_function_loses_what_is_oldest(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "MAX_KEPT", 8)
    batches: list[TelemetryBatch] = []

    async def slow(batch: TelemetryBatch) -> None:
        batches.append(batch)
        await trio.sleep(100)

    async with serve() as server, server.telemetry.subscribe(slow, interval=1.0):
        await server.complete("p")
        await trio.sleep(2)
        for _ in range(10):
            with trio.fail_after(1):  # it holds up no request
                await server.complete("p")
    first, last = batches
    assert first.n_lost == 0 and len(last.steps) == len(last.requests) == 8
    n_steps = last.steps[-1].index - first.steps[-1].index
    assert last.n_lost == (n_steps - 8) + (10 - 8)


async def test_what_is_lost_before_the_first_batch_is_counted(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "MAX_KEPT", 8)
    first, second = Listener(), Listener()
    async with serve() as server, server.telemetry.subscribe(first, interval=100):
        for _ in range(3):
            await server.complete("p")
        async with server.telemetry.subscribe(second, interval=100):
            await server.complete("p")
    (whole,), (late,) = first.batches, second.batches
    assert whole.n_lost == whole.steps[-1].index - 8
    assert late.n_lost == 0 and late.steps[-1] == whole.steps[-1]


async def test_a_plain_function_is_called_in_a_thread() -> None:
    threads: list[threading.Thread] = []

    def plain(_batch: TelemetryBatch) -> None:
        threads.append(threading.current_thread())

    async with (
        Server(Config(), load=scripted(answering("abc"))) as server,
        server.telemetry.subscribe(plain),
    ):
        await server.complete("p")
    assert threads and threading.main_thread() not in threads


async def test_a_plain_function_takes_no_thread_of_the_servers() -> None:
    def plain(_batch: TelemetryBatch) -> None:
        pass

    async with serve() as server:
        with all_taken() as limiter:
            async with server.telemetry.subscribe(plain, interval=100), trio.open_nursery() as n:
                await server.complete("p")
                n.start_soon(server.telemetry._subscriptions[0].deliver)
                await wait_all_tasks_blocked()
                assert limiter.statistics().tasks_waiting == 0


async def test_a_server_that_sleeps_goes_on_telling(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trioserve.server.lifecycle.sleep.release_memory", lambda: None)
    listener = Listener()

    def load(config: Config, **_progress: object) -> ScriptedBackend:
        return answering("abcdef")

    async with (
        Server(Config(), load=load, drive=stepping) as server,
        server.telemetry.subscribe(listener),
    ):
        await server.complete("p")
        await server.sleep()
        await server.complete("p")
    assert len(listener.finishes) == 2
    indices = [step.index for step in listener.steps]
    assert indices == list(range(1, len(indices) + 1))  # of two engines
    assert sum(batch.n_lost for batch in listener.batches) == 0


async def test_leaving_by_an_error_calls_nothing_more(autojump_clock: MockClock) -> None:
    listener = Listener()
    async with serve() as server:
        with pytest.raises(ZeroDivisionError):
            async with server.telemetry.subscribe(listener, interval=1000):
                await server.complete("p")
                raise ZeroDivisionError
        assert not listener.batches and server.lifecycle.services.loop.watchers == ()


@pytest.mark.parametrize("interval", [0, -1, float("nan")])
async def test_an_interval_that_is_none(interval: float) -> None:
    async with serve() as server:
        with pytest.raises(InvalidRequestError, match="interval"):
            async with server.telemetry.subscribe(Listener(), interval=interval):
                pass
