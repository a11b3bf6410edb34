"""Streams of a model in another process: frames, slow readers, full sockets, cancellation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import trio

from tests.support.event_source import gated
from tests.support.http_server import slots_in_use
from tests.support.model_processes import InName, one_model
from tests.support.scripts import ENDLESS, answering
from tests.support.waiting import patiently, until
from trioserve.children.frames import FrameStream
from trioserve.children.parent import ParentSocket
from trioserve.errors import StalledReaderError
from trioserve.testing import ScriptedBackend
from trioserve.types import Chunk


def long_answers(**settings: Any) -> ScriptedBackend:
    return answering("x" * ENDLESS, n_ctx=4 * ENDLESS, n_ctx_seq=ENDLESS, **settings)


async def is_free(process: InName) -> bool:
    return not await slots_in_use(process)


def any_is_paused(process: InName) -> bool:
    """True if the engine has paused a task, because its reader is slow."""
    mailboxes = process.server.lifecycle.services.dispatcher.mailboxes
    return any(each.paused_until < math.inf for each in mailboxes)


async def test_a_step_of_all_streams_is_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[int] = []
    send = ParentSocket.send

    def counted(self: ParentSocket, payload: bytes) -> bool:
        frames.append(len(payload))
        return send(self, payload)

    backend, gate = gated("0123456789" * 20, n_slots=8)
    async with one_model(backend) as one, trio.open_nursery() as nursery:
        texts: list[str] = []

        async def ask() -> None:
            texts.append((await one.server.complete("a", max_tokens=100)).text)

        for _ in range(8):
            nursery.start_soon(ask)
        await until(lambda: gate.n_asked)
        monkeypatch.setattr(ParentSocket, "send", counted)
        gate.open()
        await until(lambda: len(texts) == 8)
        assert {*texts} == {("0123456789" * 20)[:100]}
        assert len(frames) < 8 * 100 / 4, "each frame has several streams"


async def test_a_reader_that_stalls_pauses_its_own_stream_only() -> None:
    async with one_model(long_answers()) as one:
        async with one.server.stream_complete("a", max_tokens=ENDLESS - 10) as slow:
            await anext(slow)
            done = await one.server.complete("b", max_tokens=5000)
            assert done.finished.timings.predicted_n == 5000
            await until(lambda: any_is_paused(one.process))
            n_read = 0
            with patiently():
                while n_read < slow.mailbox.n_unread + 5000:
                    event = await anext(slow)
                    n_read += len(event.tokens) if isinstance(event, Chunk) else 0
        await until(lambda: is_free(one.process))


async def test_a_reader_that_has_stalled_for_long_is_given_up() -> None:
    async with (
        one_model(long_answers(), stall_timeout=0.05) as one,
        one.server.stream_complete("a", max_tokens=ENDLESS - 10) as slow,
    ):
        await anext(slow)
        await until(lambda: is_free(one.process))
        with pytest.raises(StalledReaderError):
            async for _ in slow:
                pass


@pytest.mark.parametrize("begun", [False, True])
async def test_a_block_that_is_left_frees_the_slot(begun: bool) -> None:
    backend, gate = gated("x" * ENDLESS, n_ctx=4 * ENDLESS, n_ctx_seq=ENDLESS)
    async with one_model(backend) as one, trio.open_nursery() as nursery:

        async def ask() -> None:
            async with one.server.stream_complete("a") as stream:
                await stream.read()

        nursery.start_soon(ask)
        await until(lambda: gate.n_asked)
        if begun:
            gate.allow(5)
        nursery.cancel_scope.cancel()
        gate.open()
        with trio.CancelScope(shield=True):
            await until(lambda: is_free(one.process))
            assert not one.child.line._calls and not one.child.line._mailboxes
            assert not one.process._process._calls  # type: ignore[union-attr]


@pytest.mark.system
async def test_2000_streams() -> None:
    async with one_model(answering("0123456789", n_slots=64), max_queue=2000) as one:
        n_done = 0

        async def ask() -> None:
            nonlocal n_done
            assert (await one.server.complete("a")).text == "0123456789"
            n_done += 1

        with patiently():
            async with trio.open_nursery() as nursery:
                for _ in range(2000):
                    nursery.start_soon(ask)
        assert n_done == 2000
        assert not one.child.line._calls and not one.child.line._mailboxes


async def test_a_full_socket_pauses_tasks_which_then_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_held, may_read = False, trio.Event()

    class ReadLater(FrameStream):
        async def receive(self) -> bytes | None:
            if is_held:
                await may_read.wait()
            return await super().receive()

    monkeypatch.setattr("trioserve.model_process.connection.FrameStream", ReadLater)
    async with one_model(long_answers(n_slots=4)) as one, trio.open_nursery() as nursery:
        texts: list[str] = []

        async def ask() -> None:
            done = await one.server.complete("a" * 500, max_tokens=1500, n_probs=10)
            texts.append(done.text)

        is_held = True
        for _ in range(4):
            nursery.start_soon(ask)
        await until(lambda: any_is_paused(one.process))
        may_read.set()
        with patiently():
            await until(lambda: len(texts) == 4)
        assert {len(text) for text in texts} == {1500}
        assert not one.child.line._mailboxes
