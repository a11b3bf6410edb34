"""Waiting for a program, with a supervisor that is played by hand."""

from __future__ import annotations

import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import cast

import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.children.frames import framed
from trioserve.tools.process import Process


@asynccontextmanager
async def supervised() -> AsyncIterator[tuple[Process, socket.socket]]:
    """A program, and the end of its supervisor."""
    ours, theirs = socket.socketpair()
    pipes = SimpleNamespace(stdin=None, stdout=SimpleNamespace(), stderr=None)
    with ours, theirs:
        yield Process(cast(trio.Process, pipes), ours), theirs


async def test_a_wait_that_was_cancelled_has_not_ended_the_program() -> None:
    async with supervised() as (process, supervisor):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.wait)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        supervisor.sendall(framed(b"ended 3 memory"))
        assert await process.wait() == 3
        assert process.limit_reached == "memory"


async def test_a_program_without_its_supervisor_was_killed() -> None:
    async with supervised() as (process, supervisor):
        supervisor.close()
        assert await process.wait() == -signal.SIGKILL
