"""Messages to and from an MCP server: their limits, and how they are read."""

from __future__ import annotations

import json
import math
from typing import Any

import anyio
import msgspec
import trio
from mcp.shared.message import SessionMessage
from mcp_types import (
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    jsonrpc_message_adapter,
)

from trioserve.concurrency import Feed

#: Bytes of a message. A server that sends a longer one is ended.
MAX_MESSAGE = 8 * 2**20

#: JSON values in a message: a parser keeps the event loop waiting for a microsecond for each.
MAX_VALUES = 100_000

#: Characters of an id and of the name of a method. Answers repeat both.
MAX_ID = 256

#: Messages in a second. `_cost_of` says what one that is long, or has many values, counts.
_MESSAGES_PER_SECOND = 2000
_BYTES_AS_A_MESSAGE = 2**13
_VALUES_AS_A_MESSAGE = 200

#: Messages above this many bytes are parsed in a thread.
_LONG_MESSAGE = 2**16

#: Bytes that a server leaves unread. Calls wait while there are more, and answers are dropped.
MAX_UNREAD = 16 * 2**20

#: Bytes that are counted for an unread message in addition to its text.
_OVERHEAD = 500

#: The code of errors that no server has sent: a transport found no answer.
TRANSPORT_FAILED = -32099


class Pace:
    """Limits a rate by waiting. What is enough for a second may be done at once."""

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._due = -math.inf

    async def step(self, amount: float = 1) -> None:
        """Wait until this much more may be done. Always a checkpoint."""
        self._due = max(self._due, trio.current_time() - 1) + amount / self._per_second
        await trio.sleep_until(self._due)


def count_values(data: bytes) -> int:
    """Count the values in JSON, or a few more. Takes milliseconds for any JSON of some megabytes.

    A count above `MAX_VALUES` may be too low.
    """
    if (count := _count_signs(data)) <= MAX_VALUES:
        return count
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    n_texts = plain.count(b'"') // 2
    if n_texts > 2 * MAX_VALUES:  # each is a value, or the name of one
        return n_texts
    return _count_signs(b"".join(plain.split(b'"')[::2]))


def _count_signs(data: bytes) -> int:
    return sum(map(data.count, (b",", b"[", b"{")))


class Intake:
    """Limits what a server sends over one connection."""

    def __init__(self) -> None:
        self._pace = Pace(_MESSAGES_PER_SECOND)

    async def admit(self, data: bytes) -> str | None:
        """Wait until a message may be parsed; returns why it must not be, or None."""
        n_values = count_values(data)
        is_allowed = n_values <= MAX_VALUES
        counted = n_values / _VALUES_AS_A_MESSAGE if is_allowed else 0
        await self._pace.step(1 + counted + len(data) / _BYTES_AS_A_MESSAGE)
        return None if is_allowed else f"its answer has more than {MAX_VALUES:,} values"

    async def read(self, data: bytes) -> JSONRPCMessage:
        """Read a message. An answer with too many values becomes an error.

        Raises:
            ValueError, RecursionError: it is invalid.
        """
        problem = await self.admit(data)
        if problem is not None:
            head = msgspec.json.decode(data, type=_Head)  # makes no objects of the values
            return _error(head.id, problem)
        if len(data) > _LONG_MESSAGE:
            return await trio.to_thread.run_sync(read_message, data)
        return read_message(data)


class _Head(msgspec.Struct):
    """The id of an answer."""

    id: int


class Outbox(Feed[tuple[SessionMessage, bytes]]):
    """A queue of messages, each with its JSON and a newline.

    It has a limit, and never waits to say that a call was given up.
    """

    def __init__(self) -> None:
        super().__init__(MAX_UNREAD, weigh=lambda item: len(item[1]) + _OVERHEAD)

    async def send(self, item: SessionMessage) -> None:
        """Have a message sent. The answer to a request of a server that does not read is dropped.

        Raises:
            anyio.BrokenResourceError: the server has ended, or no longer reads.
        """
        data = item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
        if isinstance(item.message, JSONRPCRequest):
            await self.room()
        is_answer = isinstance(item.message, JSONRPCResponse | JSONRPCError)
        if self.is_over or (is_answer and self.is_full):
            raise anyio.BrokenResourceError
        self.put((item, data))

    async def aclose(self) -> None:
        self.end()

    async def __aenter__(self) -> Outbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()


def _error(id: int, problem: str) -> JSONRPCError:
    return JSONRPCError(
        jsonrpc="2.0", id=id, error=ErrorData(code=TRANSPORT_FAILED, message=problem)
    )


def is_awaited(message: JSONRPCMessage) -> bool:
    """Test for a message with a reader: most notifications are for the logs of other clients."""
    if not isinstance(message, JSONRPCNotification):
        return True
    if message.method == "notifications/progress":
        return "progressToken" in (message.params or {})
    return message.method == "notifications/tools/list_changed"


def fault_of(message: JSONRPCMessage) -> str | None:
    """Why a message is not processed; None: it is."""
    params = getattr(message, "params", None) or {}
    names = [getattr(message, "id", ""), getattr(message, "method", "")]
    if isinstance(message, JSONRPCNotification):
        names += [params.get("progressToken"), params.get("requestId")]
    if any(isinstance(name, str) and len(name) > MAX_ID for name in names):
        return f"its id or its method has more than {MAX_ID} characters"
    numbers = [*names, params.get("progress"), params.get("total")]
    if any(isinstance(number, int) and abs(number) >= 2**63 for number in numbers):
        return "a number in it is too large"
    return None


def read_message(line: bytes) -> JSONRPCMessage:
    """Read a message. Halves of surrogate pairs are replaced; an invalid answer is an error.

    Raises:
        ValueError, RecursionError: it is invalid.
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
        return _error(value["id"], "its answer makes no sense")


def without_surrogates(value: Any) -> Any:
    """A JSON value with U+FFFD for halves of surrogate pairs, which no Unicode text has."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_surrogates(item) for item in value]
    return value
