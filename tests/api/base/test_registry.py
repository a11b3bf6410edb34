"""Responses by id: pending, running and ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from trioserve.api.base import registry
from trioserve.api.base.registry import ConflictError, Responses
from trioserve.api.base.sse import EventStream
from trioserve.errors import NotFoundError, QueueFullError
from trioserve.server.concurrency import alongside
from trioserve.server.memory import MemoryBudget

#: A request that holds nothing.
HELD = MemoryBudget(2**20).hold()


async def start() -> EventStream:
    raise AssertionError("nobody starts it here")


class FakeStream:
    def __init__(self, *, ended: bool = False) -> None:
        self.mailbox = SimpleNamespace(ended=ended)
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


def test_the_life_of_an_id() -> None:
    responses = Responses(lambda: 0.0)
    id_ = responses.add(start, HELD)
    assert len(id_) >= 32
    assert responses.take(id_) is start
    with pytest.raises(ConflictError):
        responses.take(id_)
    responses.end(id_)
    assert responses.take(id_) is None
    responses.cancel(id_)  # too late is fine
    with pytest.raises(NotFoundError):
        responses.take("unknown")
    with pytest.raises(NotFoundError):
        responses.cancel("unknown")


def test_cancel_where_it_stands() -> None:
    responses = Responses(lambda: 0.0)
    waiting, running = responses.add(start, HELD), responses.add(start, HELD)
    responses.cancel(waiting)
    assert responses.take(waiting) is None
    responses.take(running)
    stream, ended = FakeStream(), FakeStream(ended=True)
    responses.started(running, cast(Any, [stream, ended]))
    responses.cancel(running)
    assert stream.cancelled
    assert not ended.cancelled


def test_a_response_that_was_never_pending_is_not_reached_by_its_id_alone() -> None:
    responses, stream = Responses(lambda: 0.0), cast(Any, FakeStream())
    with responses.running("chatcmpl-1", [stream], "key", reasoning_control=True):
        assert responses.find("chatcmpl-1", "other") is None
        found = responses.find("chatcmpl-1", "key")
        assert found is not None
        assert found.live == [stream]
        for reach in (responses.take, responses.cancel):
            with pytest.raises(NotFoundError):
                reach("chatcmpl-1")
        assert not stream.cancelled
    assert responses.find("chatcmpl-1", "key") is None


def test_nobody_waits_for_ever() -> None:
    now = 0.0
    responses = Responses(lambda: now)
    early = responses.add(start, HELD)
    now = registry.PENDING_SECONDS / 2
    late = responses.add(start, HELD)
    now = registry.PENDING_SECONDS
    with pytest.raises(NotFoundError):
        responses.take(early)
    assert responses.take(late) is not None


def test_one_key_leaves_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_PENDING", 4)
    responses, budget = Responses(lambda: 0.0), MemoryBudget(2**20)
    for key in ("one", "two"):
        for _ in range(2):
            responses.add(start, budget.hold(key))
        with pytest.raises(QueueFullError):
            responses.add(start, budget.hold(key))


def test_what_is_pending_is_held() -> None:
    """Until it was sent, was cancelled, or nobody came for it in time."""
    now = 0.0
    responses, budget = Responses(lambda: now), MemoryBudget(1000)

    def add() -> str:
        with budget.hold() as held:
            held.grow(10)
            return responses.add(start, held)

    sent, cancelled, _late = add(), add(), add()
    assert budget.n_held == 30
    responses.cancel(cancelled)
    assert budget.n_held == 20
    responses.take(sent)
    responses.put_back(sent)
    responses.take(sent)
    responses.end(sent)
    assert budget.n_held == 10
    now = registry.PENDING_SECONDS
    responses.take(add())
    assert budget.n_held == 10


async def test_nobody_has_to_ask_for_what_is_late_to_go(autojump_clock: MockClock) -> None:
    budget = MemoryBudget(1000)
    responses = Responses()
    async with alongside(responses.keep_expiring):
        for _ in range(2):
            await trio.sleep(1)
            with budget.hold() as held:
                held.grow(10)
                responses.add(start, held)
        await trio.sleep(registry.PENDING_SECONDS - 0.5)
        assert budget.n_held == 10
        await trio.sleep(1)
        assert budget.n_held == 0


def test_there_is_room_for_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_PENDING", 2)
    monkeypatch.setattr(registry, "MAX_ENDED", 1)
    responses = Responses(lambda: 0.0)
    first, second = responses.add(start, HELD), responses.add(start, HELD)
    with pytest.raises(QueueFullError):
        responses.add(start, HELD)
    for id_ in (first, second):
        responses.take(id_)
        responses.end(id_)
    with pytest.raises(NotFoundError):
        responses.take(first)
    assert responses.take(second) is None
