"""`stdio_streams`: an MCP server that is a program, with a JSON message on each line."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import structlog
import trio
from anyio.streams.memory import MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import (
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    jsonrpc_message_adapter,
)

from trioserve.concurrency import Feed
from trioserve.errors import ToolServerError
from trioserve.tools.mcp.entries import StdioEntry
from trioserve.tools.process import Process, clean_environment, open_process

if TYPE_CHECKING:
    from mcp.client._transport import ReadStream, WriteStream

    Streams = tuple[ReadStream[SessionMessage | Exception], WriteStream[SessionMessage]]


_CHUNK = 2**16

_log = structlog.stdlib.get_logger("trioserve.tools")

#: Bytes of a message from a server. One that sends a longer one is ended.
MAX_MESSAGE = 8 * 2**20

#: The code of errors that no server has sent: a transport found no answer.
TRANSPORT_FAILED = -32099

#: Bytes that a server leaves unread. Calls wait while there are more.
_MAX_UNREAD = 16 * 2**20

#: Messages and bytes of its log that are taken from a server in a second.
_MESSAGES_PER_SECOND = 2000
_LOG_BYTES_PER_SECOND = 2**22

#: Messages above this many bytes are parsed in a thread.
_LONG_MESSAGE = 2**16

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


class LineTooLongError(Exception):
    """A line is longer than it may be."""


class LineReader:
    """Splits a stream into lines.

    Args:
        stream: where it comes from.
        max_bytes: of a line.
    """

    def __init__(self, stream: trio.abc.ReceiveStream, max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._searched = 0  # bytes of the buffer that are known to have no newline

    async def next(self) -> bytes | None:
        """The next line without its newline; None: there is none. An incomplete line is ignored.

        Raises:
            LineTooLongError: it is longer than `max_bytes`.
        """
        while (end := self._buffer.find(b"\n", self._searched)) < 0:
            self._searched = len(self._buffer)
            if self._searched > self._max_bytes:
                raise LineTooLongError
            chunk = await self._stream.receive_some(_CHUNK)
            if not chunk:
                return None
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return line


class Pace:
    """Limits a rate by waiting. What is enough for a second may be done at once."""

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._due = -math.inf

    async def step(self, amount: float = 1) -> None:
        """Wait until this much more may be done. Always a checkpoint."""
        self._due = max(self._due, trio.current_time() - 1) + amount / self._per_second
        await trio.sleep_until(self._due)


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
    argv = (entry.command, *entry.args)
    async with open_process(argv, env=_environment(entry), cwd=entry.cwd) as process:
        assert process.stdin is not None
        says, heard = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        outbox = _Outbox()
        server = _Server(entry.name, process)
        async with says, heard, trio.open_nursery() as nursery:
            nursery.start_soon(server.read, says)
            nursery.start_soon(server.read_log)
            nursery.start_soon(outbox.write_to, process.stdin)
            yield heard, outbox
            nursery.cancel_scope.cancel()
        await process.stdin.aclose()
        with trio.move_on_after(_GRACE_SECONDS):
            await process.wait()


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

    async def read(self, says: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        """Pass on its messages.

        Raises:
            ToolServerError: it has ended, or wrote too much.
        """
        assert self._process.stdout is not None
        lines = LineReader(self._process.stdout, MAX_MESSAGE)
        pace = Pace(_MESSAGES_PER_SECOND)
        while True:
            await pace.step()
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
            if message is not None:
                await says.send(SessionMessage(message))

    async def read_log(self) -> None:
        """Log its standard error, and keep the end of it."""
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
        """The message of a line; None: it is none, or has no reader."""
        if not line.strip():
            return None
        try:
            if len(line) > _LONG_MESSAGE:
                message = await trio.to_thread.run_sync(read_message, line)
            else:
                message = read_message(line)
        except (ValueError, RecursionError):
            if not self._has_said_nonsense:
                self._has_said_nonsense = True
                text = line[:200].decode("utf-8", "replace")
                _log.warning("MCP server writes what is no message", server=self._name, line=text)
            return None
        return message if _is_awaited(message) else None


def _is_awaited(message: JSONRPCMessage) -> bool:
    """Whether a message has a reader. Most notifications are for the logs of other clients."""
    if not isinstance(message, JSONRPCNotification):
        return True
    if message.method == "notifications/progress":
        return "progressToken" in (message.params or {})
    return message.method == "notifications/tools/list_changed"


def read_message(line: bytes) -> JSONRPCMessage:
    """Read a message. Text that is no Unicode is corrected, and an answer that is none is an error.

    Raises:
        ValueError, RecursionError: it is no message.
    """
    try:
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        value = without_surrogates(json.loads(line.decode("utf-8", "replace")))
    try:
        return jsonrpc_message_adapter.validate_python(value, by_name=False)
    except ValueError:
        if not isinstance(value, dict) or "method" in value or type(value.get("id")) is not int:
            raise
        error = ErrorData(code=TRANSPORT_FAILED, message="its answer makes no sense")
        return JSONRPCError(jsonrpc="2.0", id=value["id"], error=error)


def without_surrogates(value: Any) -> Any:
    """A JSON value with U+FFFD for halves of surrogate pairs, which no Unicode text has."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_surrogates(item) for item in value]
    return value


class _Outbox:
    """Messages to a server. A request waits for room, but not the notice that it was given up."""

    def __init__(self) -> None:
        self._feed = Feed[bytes](_MAX_UNREAD, weigh=len)

    async def send(self, item: SessionMessage) -> None:
        """Have a message written.

        Raises:
            anyio.BrokenResourceError: the server has ended, or no longer reads.
        """
        data = item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
        if isinstance(item.message, JSONRPCRequest):
            await self._feed.room()
        if self._feed.is_over:
            raise anyio.BrokenResourceError
        self._feed.put(data)

    async def write_to(self, stdin: trio.abc.SendStream) -> None:
        """Write the messages."""
        try:
            async for data in self._feed:
                await stdin.send_all(data)
        except trio.BrokenResourceError:
            pass  # `_Server.read` reports the reason
        finally:
            self._feed.end(now=True)

    async def aclose(self) -> None:
        """Nothing more is sent."""
        self._feed.end()

    async def __aenter__(self) -> _Outbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._feed.end()
