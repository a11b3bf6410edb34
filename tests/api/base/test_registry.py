"""Responses by id: pending, running and ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from trioserve.api.base import registry
from trioserve.api.base.registry import ConflictError, Responses
from trioserve.api.base.sse import EventStream
from trioserve.errors import NotFoundError, QueueFullError


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
    id_ = responses.add(start)
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
    waiting, running = responses.add(start), responses.add(start)
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
    early = responses.add(start)
    now = registry.PENDING_SECONDS / 2
    late = responses.add(start)
    now = registry.PENDING_SECONDS
    with pytest.raises(NotFoundError):
        responses.take(early)
    assert responses.take(late) is not None


def test_there_is_room_for_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_PENDING", 2)
    monkeypatch.setattr(registry, "MAX_ENDED", 1)
    responses = Responses(lambda: 0.0)
    first, second = responses.add(start), responses.add(start)
    with pytest.raises(QueueFullError):
        responses.add(start)
    for id_ in (first, second):
        responses.take(id_)
        responses.end(id_)
    with pytest.raises(NotFoundError):
        responses.take(first)
    assert responses.take(second) is None
