from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from trioserve.ray.guest import Guest


def with_guest(use: Callable[[Guest], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        guest = Guest()
        await guest.begin()
        try:
            return await use(guest)
        finally:
            await guest.end()

    return asyncio.run(main())


def test_trio_runs_within_asyncio_and_asks_it_back() -> None:
    async def of_asyncio() -> int:
        await asyncio.sleep(0)
        return 1

    async def use(guest: Guest) -> int:
        async def work() -> int:
            await trio.lowlevel.checkpoint()
            return await guest.ask_host(of_asyncio) + 1

        return await guest.run(work)

    assert with_guest(use) == 2


def test_what_is_raised_comes_back() -> None:
    async def fail() -> None:
        raise KeyError("x")

    async def use(guest: Guest) -> None:
        with pytest.raises(KeyError):
            await guest.run(fail)

        async def ask() -> None:
            with pytest.raises(KeyError):
                await guest.ask_host(fail)

        await guest.run(ask)

    with_guest(use)


def test_a_cancelled_run_has_ended_when_its_caller_goes_on() -> None:
    ended = []

    async def use(guest: Guest) -> None:
        began = asyncio.Event()

        async def wait() -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("asyncio")

        async def work() -> None:
            try:
                await guest.ask_host(wait)
            finally:
                ended.append("trio")

        task = asyncio.create_task(guest.run(work))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with_guest(use)
    assert ended == ["asyncio", "trio"]


def test_the_end_cancels_what_runs() -> None:
    async def use(guest: Guest) -> None:
        task = asyncio.create_task(guest.run(trio.sleep_forever))
        await asyncio.sleep(0)
        await guest.end()
        with pytest.raises(asyncio.CancelledError):
            await task
        guest.end = asyncio.sleep.__get__(0)  # type: ignore[method-assign]

    with_guest(use)
