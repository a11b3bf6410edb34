"""The two ends of the MCP server: descriptors of any kind, and whatever comes in on them."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import mcp_types
import pytest
import trio
from mcp.shared.message import SessionMessage

from tests.support.waiting import patiently
from trioserve.errors import TrioServeError
from trioserve.mcp_server import stdio
from trioserve.mcp_server.stdio import Heard, Said, connected


@asynccontextmanager
async def on_pipes() -> AsyncIterator[tuple[int, int, Heard, Said]]:
    """A connection; with the descriptors that a client writes to and reads from."""
    stdin, theirs = os.pipe()
    ours, stdout = os.pipe()
    try:
        async with connected(stdin, stdout) as (heard, said):
            yield theirs, ours, heard, said
    finally:
        for one in (stdin, stdout):
            os.close(one)


def line(**fields: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **fields}).encode() + b"\n"


def ping(number: int, **params: Any) -> mcp_types.JSONRPCRequest:
    return mcp_types.JSONRPCRequest(jsonrpc="2.0", id=number, method="ping", params=params)


async def test_messages_come_as_they_are_cut_and_nonsense_is_left_out() -> None:
    async with on_pipes() as (theirs, ours, heard, _):
        os.write(theirs, b"hello\n\n" + line(id=1, method="ping")[:10])
        os.write(theirs, line(id=1, method="ping")[10:] + line(id=2, method="ping"))
        os.close(theirs)
        taken = [one async for one in heard]
        assert [one.message.id for one in taken] == [1, 2]  # type: ignore[union-attr]
        os.close(ours)


async def test_half_of_a_surrogate_pair_is_mended() -> None:
    async with on_pipes() as (theirs, ours, heard, _):
        os.write(theirs, b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"a":"x\\ud800"}}\n')
        os.write(theirs, b"[" * 10_000 + b"\n" + b"\xff\n" + line(id=2, method="ping"))
        os.close(theirs)
        first, second = [one.message async for one in heard]  # type: ignore[union-attr]
        assert isinstance(first, mcp_types.JSONRPCRequest)
        assert isinstance(second, mcp_types.JSONRPCRequest)
        assert (first.params, second.id) == ({"a": "x\ufffd"}, 2)
        os.close(ours)


async def test_what_is_said_is_written_whole_even_if_the_client_reads_slowly() -> None:
    async with on_pipes() as (theirs, ours, _heard, said), trio.open_nursery() as nursery:
        long = "ü" * 2**20  # many times what a pipe holds
        nursery.start_soon(said.send, SessionMessage(ping(1, text=long)))
        data = b""
        while not data.endswith(b"\n"):
            await trio.lowlevel.wait_readable(ours)
            data += os.read(ours, 2**16)
        assert json.loads(data)["params"]["text"] == long
        os.close(theirs)
        os.close(ours)


async def test_a_call_that_is_cancelled_while_it_writes_leaves_no_half_of_a_line() -> None:
    async with on_pipes() as (theirs, ours, _heard, said):
        with trio.CancelScope() as scope:
            await said.send(SessionMessage(ping(1, text="x" * 2**18)))  # more than a pipe holds
            scope.cancel()
            await said.send(SessionMessage(ping(2)))
        assert scope.cancelled_caught
        data = b""
        while not data.endswith(b"\n"):
            await trio.lowlevel.wait_readable(ours)
            data += os.read(ours, 2**16)
        assert json.loads(data)["id"] == 1
        os.close(theirs)
        os.close(ours)


async def test_a_client_that_reads_no_more_ends_the_connection() -> None:
    with patiently():
        async with on_pipes() as (theirs, ours, _, said):
            os.close(ours)
            await said.send(SessionMessage(ping(1)))
            await trio.sleep_forever()
    os.close(theirs)


async def test_a_client_that_never_reads_does_not_keep_it_from_ending(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with on_pipes() as (theirs, ours, _, said):
        await said.send(SessionMessage(ping(1, text="x" * 2**18)))
        os.close(theirs)
    os.close(ours)


async def test_a_line_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdio, "MAX_MESSAGE", 1000)
    with pytest.RaisesGroup(pytest.RaisesExc(TrioServeError, match="more than 1,000 bytes")):
        async with on_pipes() as (theirs, ours, _heard, _):
            os.write(theirs, b"x" * 2000)
            await trio.sleep_forever()
    os.close(theirs)
    os.close(ours)


async def test_files(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(line(id=1, method="ping"))
    with source.open("rb") as reads, target.open("wb") as writes:
        async with connected(reads.fileno(), writes.fileno()) as (heard, said):
            async for one in heard:
                await said.send(one)  # type: ignore[arg-type]
    assert json.loads(target.read_bytes())["id"] == 1
