"""`stdio_streams`: an MCP server that is a program, with a JSON message on each line."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import msgspec
import trio
from anyio.streams.memory import MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCMessage

from trioserve.children.lines import LineReader, LineTooLongError
from trioserve.errors import ToolServerError
from trioserve.log import get_logger
from trioserve.tools.mcp.entries import StdioEntry
from trioserve.tools.mcp.messages import MAX_MESSAGE, Intake, Outbox, Pace
from trioserve.tools.process import Process, clean_environment, open_process

if TYPE_CHECKING:
    from mcp.client._transport import ReadStream, WriteStream

    Streams = tuple[ReadStream[SessionMessage | Exception], WriteStream[SessionMessage]]


_log = get_logger("trioserve.tools")

#: Bytes of its log that are taken from a server in a second.
_LOG_BYTES_PER_SECOND = 2**22

#: The last bytes of a server's log, for the error when it has ended.
_MAX_LAST_WORDS = 1000

#: Seconds for a server to exit, after its input has ended.
_GRACE_SECONDS = 0.5

#: Seconds for the end of a program whose output has ended.
_END_SECONDS = 0.5

#: Variables that programs get besides the usual ones: how to reach the network.
_NETWORK_VARIABLES = (
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS",
)  # fmt: skip

#: Variables that say which Python is meant.
_OF_PYTHON = frozenset({"PATH", "VIRTUAL_ENV", "CONDA_PREFIX"})


@asynccontextmanager
async def stdio_streams(entry: StdioEntry) -> AsyncIterator[Streams]:
    """Start a server; gives the streams from it and to it.

    When the block is left, its input ends; soon after, it is ended with all that it has started. At
    once, if the block is cancelled.

    Raises:
        ToolRuntimeError, ToolServerError: it cannot be started.
        ToolServerError: out of the block, in a group: it has ended.
    """
    if entry.cwd is not None and not await trio.Path(entry.cwd).is_dir():
        raise ToolServerError(f"there is no directory {entry.cwd!r} to start it in")
    argv = (program_of(entry), *entry.args)
    async with open_process(argv, env=_environment(entry), cwd=entry.cwd) as process:
        assert process.stdin is not None
        says, heard = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        outbox = Outbox()
        server = _Server(entry.name, process)
        async with says, heard, trio.open_nursery() as nursery:
            nursery.start_soon(server.read, says)
            nursery.start_soon(server.read_log)
            nursery.start_soon(_write, outbox, process.stdin)
            yield heard, outbox
            nursery.cancel_scope.cancel()
        await process.stdin.aclose()
        with trio.move_on_after(_GRACE_SECONDS):
            await process.wait()


def program_of(entry: StdioEntry) -> str:
    """The program of an entry. ``python`` is this one, whose packages have the SDK of MCP.

    An entry that sets ``PATH`` or names a virtual environment gets the Python of that place.
    """
    is_python = entry.command in ("python", "python3") and sys.executable
    return entry.command if not is_python or _OF_PYTHON & entry.env.keys() else sys.executable


def _environment(entry: StdioEntry) -> dict[str, str]:
    network = {name: os.environ[name] for name in _NETWORK_VARIABLES if name in os.environ}
    return {**clean_environment(), **network, **entry.env}


class _Server:
    """Listens to a program, until it ends."""

    def __init__(self, name: str, process: Process) -> None:
        self._name = name
        self._process = process
        self._last_words: deque[int] = deque(maxlen=_MAX_LAST_WORDS)
        self._has_said_nonsense = False
        self._intake = Intake()

    async def read(self, says: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        """Pass on the messages. Raises ToolServerError: the server has ended, or wrote too much."""
        assert self._process.stdout is not None
        lines = LineReader(self._process.stdout, MAX_MESSAGE)
        while True:
            try:
                line = await lines.next()
            except LineTooLongError:
                raise ToolServerError(
                    f"it has sent a message of more than {MAX_MESSAGE:,} bytes"
                ) from None
            except trio.BrokenResourceError:
                line = None
            if line is None:
                raise ToolServerError(await self._how_it_ended())
            message = await self._message(line)
            if message is None:
                continue
            try:
                await says.send(SessionMessage(message))
            except anyio.BrokenResourceError:
                return  # the session ends, while the server still speaks

    async def read_log(self) -> None:
        assert self._process.stderr is not None
        pace = Pace(_LOG_BYTES_PER_SECOND)
        try:
            while chunk := await self._process.stderr.receive_some(2**14):
                self._last_words.extend(chunk)
                _log.debug("MCP server", server=self._name, log=chunk.decode("utf-8", "replace"))
                await pace.step(len(chunk))
        except trio.BrokenResourceError:
            pass

    async def _how_it_ended(self) -> str:
        how = "it has closed its output"
        with trio.move_on_after(_END_SECONDS):
            how = f"it has ended with status {await self._process.wait()}"
        words = bytes(self._last_words).decode("utf-8", "replace").strip()
        return f"{how}; it wrote last: {words}" if words else how

    async def _message(self, line: bytes) -> JSONRPCMessage | None:
        """The message of a line; None: another text."""
        try:
            return await self._intake.read(line)
        except (ValueError, RecursionError, msgspec.MsgspecError):
            if line.strip() and not self._has_said_nonsense:
                self._has_said_nonsense = True
                text = line[:200].decode("utf-8", "replace")
                _log.warning("MCP server writes what is no message", server=self._name, line=text)
            return None


async def _write(outbox: Outbox, stdin: trio.abc.SendStream) -> None:
    try:
        async for _, data in outbox:
            await stdin.send_all(data)
    except trio.BrokenResourceError:
        pass  # `_Server.read` reports the reason
    finally:
        outbox.end(now=True)
