"""Standard input and output as the two ends of a connection: a JSON message on each line."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import trio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage

from trioserve.children.lines import LineReader, LineTooLongError
from trioserve.errors import TrioServeError
from trioserve.log import get_logger
from trioserve.tools.mcp.messages import read_message

_log = get_logger("trioserve.mcp")

#: Bytes of a message from a client.
MAX_MESSAGE = 64 * 2**20

#: Bytes that a pipe takes without blocking if it takes any.
_MAX_WRITE = getattr(select, "PIPE_BUF", 512)

#: Seconds to write the last messages when the client has closed its end. It may not read them.
_GRACE = 2.0

Heard = MemoryObjectReceiveStream[SessionMessage | Exception]
Said = MemoryObjectSendStream[SessionMessage]


@contextmanager
def taken() -> Iterator[tuple[int, int]]:
    """Take standard input and output for the length of a block; gives their descriptors.

    In the block, whatever else reads standard input gets nothing, and what is printed goes to
    standard error: also by libraries in C, and by processes that are started.
    """
    stdin, stdout = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        yield stdin, stdout
    finally:
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        for number in (stdin, stdout, nothing):
            os.close(number)


@asynccontextmanager
async def connected(stdin: int, stdout: int) -> AsyncIterator[tuple[Heard, Said]]:
    """Read and write messages for the length of a block.

    The client's end of input ends what is heard. When the client reads no more, the block is
    cancelled. Descriptors of any kind will do, and none is made non-blocking, because a terminal
    is also that of other programs.

    Raises:
        TrioServeError: in a group, out of the block: the client has sent far too much at once.
    """
    hear, heard = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    say, said = anyio.create_memory_object_stream[SessionMessage](0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_read, _Input(stdin), hear)
        written = trio.Event()

        async def write() -> None:
            if not await _write(stdout, said):
                nursery.cancel_scope.cancel()
            written.set()

        nursery.start_soon(write)
        async with heard, say:
            yield heard, say
        with trio.move_on_after(_GRACE):
            await written.wait()
        nursery.cancel_scope.cancel()


class _Input(trio.abc.ReceiveStream):
    """A receive stream over a file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await _ready(trio.lowlevel.wait_readable, self._descriptor)
        return os.read(self._descriptor, max_bytes or 2**16)

    async def aclose(self) -> None:
        """Do nothing: the descriptor is not ours."""
        await trio.lowlevel.checkpoint()


async def _ready(wait: Callable[[int], Awaitable[None]], descriptor: int) -> None:
    try:
        await wait(descriptor)
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
        await trio.lowlevel.checkpoint()  # a file, which always is


async def _read(source: _Input, hear: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
    """Pass on the client's messages until its input ends."""
    lines = LineReader(source, MAX_MESSAGE)
    async with hear:
        while (line := await _next(lines)) is not None:
            try:
                message = read_message(line)
            except (ValueError, RecursionError):
                shown = line[:200].decode("utf-8", "replace")
                _log.warning("a line is no message", line=shown)
                continue
            await hear.send(SessionMessage(message))


async def _next(lines: LineReader) -> bytes | None:
    try:
        return await lines.next()
    except LineTooLongError:
        raise TrioServeError(
            f"The client has sent a message of more than {MAX_MESSAGE:,} bytes."
        ) from None
    except OSError as error:  # its end of the connection is broken
        _log.info("the client cannot be read any longer", reason=error.strerror)
        return None


async def _write(stdout: int, said: MemoryObjectReceiveStream[SessionMessage]) -> bool:
    """Write messages until there are no more; returns false when the client stops reading."""
    async with said:
        async for item in said:
            text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
            try:
                await _write_all(stdout, f"{text}\n".encode())
            except OSError as error:
                _log.info("the client reads no longer", reason=error.strerror)
                return False
    return True


async def _write_all(stdout: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        await _ready(trio.lowlevel.wait_writable, stdout)
        left = left[os.write(stdout, left[:_MAX_WRITE]) :]
