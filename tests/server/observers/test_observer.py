"""Observers: told once when a request starts, and once of how it ended."""

from __future__ import annotations

import pytest
import trio

from tests.support.waiting import until
from trioserve.config import Config
from trioserve.server import RequestContext, Server
from trioserve.server.observers.metrics import Metrics
from trioserve.server.observers.observer import (
    Event,
    Observer,
    RequestEnd,
    RequestInfo,
    RequestLog,
    RequestRecord,
    RequestStarted,
)
from trioserve.server.usage import Usage
from trioserve.testing import ScriptedBackend, scripted
from trioserve.types import CancelReason, FinishReason


class Recorder:
    """Records the events."""

    def __init__(self) -> None:
        self.running: list[RequestInfo] = []
        self.ends: list[RequestEnd] = []

    def on_event(self, event: Event) -> None:
        if isinstance(event, RequestStarted):
            self.running.append(event.request)
        elif isinstance(event, RequestRecord):
            self.running.remove(event.request)
            self.ends.append(event.end)


async def test_the_reason_of_a_cancellation_comes_with_it() -> None:
    recorder = Recorder()
    backend = ScriptedBackend(lambda prompt: "x" * 10**5, n_ctx=2**17)
    async with Server(Config(), load=scripted(backend)) as server:
        server.observers.append(recorder)
        for reason in ("stalled_reader", "a reason of the program", None):
            with trio.CancelScope() as scope:
                async with server.stream_complete("a"), trio.open_nursery() as nursery:
                    nursery.start_soon(trio.sleep_forever)
                    scope.cancel(reason=reason)
                    await trio.sleep_forever()
    assert [end.cancelled for end in recorder.ends] == [
        CancelReason.STALLED,
        CancelReason.CALLER,
        CancelReason.CALLER,
    ]


async def test_each_way_to_end_is_told_once() -> None:
    recorder = Recorder()
    backend = ScriptedBackend(lambda prompt: "x" * 10**5, n_ctx=2**17)
    async with Server(Config(), load=scripted(backend)) as server:
        server.observers.append(recorder)
        async with server.stream_complete("abc", max_tokens=3) as stream:
            assert recorder.running == [RequestInfo(stream.task_id, server.model.info.name, 3)]
            async for _ in stream:
                pass
        async with server.stream_complete("a"):
            pass  # left before its end
        with trio.CancelScope() as scope:
            context = RequestContext(on_cancel=CancelReason.DISCONNECT)
            async with server.stream_all(["a"], await server.params({}), context=context):
                scope.cancel()
                await trio.sleep_forever()
        with pytest.raises(ZeroDivisionError):
            async with server.stream_complete("a"):
                raise ZeroDivisionError
    assert not recorder.running
    finished, left, cancelled, failed = recorder.ends
    assert (finished.finish, finished.cancelled, finished.error) == (FinishReason.LIMIT, None, None)
    assert finished.timings is not None
    assert finished.n_output == finished.timings.predicted_n == 3
    assert (left.finish, left.cancelled, left.error) == (None, CancelReason.CALLER, None)
    assert cancelled.cancelled is CancelReason.DISCONNECT
    assert isinstance(failed.error, ZeroDivisionError)
    assert failed.error_type == "server_error"


async def test_what_is_generated_counts_whether_it_is_read_or_not() -> None:
    recorder = Recorder()
    async with Server(Config(), load=scripted(ScriptedBackend(lambda prompt: "x" * 9))) as server:
        server.observers.append(recorder)
        async with server.stream_complete("a", max_tokens=5) as stream:
            await until(lambda: stream.mailbox.n_output == 5)
    assert [end.n_output for end in recorder.ends] == [5]


async def test_a_server_logs_and_counts_if_told_to() -> None:
    kinds: list[list[type[Observer]]] = []
    for config in (Config(), Config(metrics_endpoint=True), Config(api_keys=("a",))):
        async with Server(config, load=scripted(ScriptedBackend())) as server:
            kinds.append([type(one) for one in server.observers])
    assert kinds == [[RequestLog], [RequestLog, Metrics], [RequestLog, Usage]]
