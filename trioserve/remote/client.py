"""`ServerClient`: the HTTP client for another server, of trioserve or of another kind.

What a server writes is read here and nowhere else: JSON, streams of events, and errors.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    aclosing,
    asynccontextmanager,
    contextmanager,
)
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import attrs
import httpcore2
import msgspec
import trio

from trioserve.chat.messages import Attachment, Audio, Image, Video
from trioserve.children.lines import Lines, LineTooLongError
from trioserve.errors import (
    AuthenticationError,
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    NotSupportedError,
    PermissionDeniedError,
    TooManyRequestsError,
    TrioServeError,
    UnavailableError,
    UnsupportedFieldError,
)
from trioserve.types import MediaKind, MediaSource

T = TypeVar("T")

#: The classes of errors, by the ``type`` that they have in JSON.
_ERRORS: Mapping[str, type[TrioServeError]] = {
    kind.type: kind for kind in (
        AuthenticationError, DeadlineExceededError, InvalidRequestError, NotFoundError,
        NotSupportedError, PermissionDeniedError, UnavailableError,
    )
}  # fmt: skip

#: Seconds after which a client that was refused may come back.
_RETRY_AFTER = 1.0

#: The name of a server in errors, by default.
_UNNAMED = "The server"

#: The bytes of an answer that an error shows, if the answer cannot be parsed, and the
#: characters of the server's own message.
_MAX_SHOWN, _MAX_MESSAGE = 200, 2000

#: Bytes of an answer, of one with an error, and of an event of a stream.
_MAX_ANSWER, _MAX_ERROR, _MAX_EVENT = 2**30, 2**20, 2**26

#: Seconds to connect, and to send a piece of a request. The time for an answer is not limited.
_TIMEOUTS = {"connect": 10.0, "write": 30.0, "read": None, "pool": None}

_ATTACHMENTS: Mapping[MediaKind, type[Attachment]] = {
    "image": Image, "audio": Audio, "video": Video,
}  # fmt: skip


class LostServerError(UnavailableError):
    """A server cannot be reached, or its connection is lost."""


class SilentServerError(LostServerError):
    """It sends nothing for longer than it may."""


class ServerAnswer(Protocol):
    """An answer whose head is there."""

    status: int

    def header(self, name: bytes) -> bytes:
        """The value of a header; empty without it."""

    async def receive(self) -> bytes:
        """Wait for more of the body. Empty at the end."""


#: Names and values.
Headers: TypeAlias = Sequence[tuple[bytes, bytes]]


@attrs.frozen
class Request:
    """A request to a server."""

    method: str
    target: str
    headers: Headers = ()
    body: bytes = b""


#: Sends a request, and gives its answer for the length of a block. Leaving it cancels the request.
Send: TypeAlias = Callable[[Request], AbstractAsyncContextManager[ServerAnswer]]


class ServerClient:
    """Sends requests to a server, and reads its answers. Cancelling a call cancels its work.

    Attributes:
        name: the same.
    """

    def __init__(self, send: Send, name: str = _UNNAMED) -> None:
        self._send = send
        self.name = name

    @asynccontextmanager
    async def answer(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        write: Callable[[Mapping[str, Any]], tuple[bytes, bytes]] | None = None,
        *,
        any_status: bool = False,
        headers: Headers = (),
    ) -> AsyncIterator[ServerAnswer]:
        """Send a request; gives the answer, whose status is 200.

        Args:
            path: of the route.
            body: what is posted; without, this is a GET.
            write: encodes the body, in a thread; returns its type and bytes. The default is JSON.
            any_status: give an answer with another status, too.
            headers: that are sent, too.

        Raises:
            TrioServeError: the server cannot be reached, or answers with an error.
        """
        request = Request("GET", path, headers)
        if body is not None:
            kind, data = await trio.to_thread.run_sync(write or write_json, body)
            request = Request("POST", path, ((b"content-type", kind), *headers), data)
        async with self._send(request) as answer:
            if answer.status != 200 and not any_status:
                data = await receive_all(answer, _MAX_ERROR, self.name)
                raise error_in(data, answer.status, self.name)
            yield answer

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        write: Callable[[Mapping[str, Any]], tuple[bytes, bytes]] | None = None,
        *,
        form: type[T],
        most: int = _MAX_ANSWER,
    ) -> T:
        """Send a request, and read the JSON of its answer, of some form and at most `most` bytes.

        Raises as `answer`.
        """
        async with self.answer(path, body, write) as answer:
            return read_json(await receive_all(answer, most, self.name), form, self.name)

    @asynccontextmanager
    async def events(
        self, path: str, body: Mapping[str, Any], *, form: type[T]
    ) -> AsyncIterator[ServerEvents[T]]:
        """Send a request for a stream; gives its events. Raises as `answer`."""
        async with self.answer(path, {**body, "stream": True}) as answer:
            yield ServerEvents(answer, form, self.name)


class ServerEvents(Generic[T]):
    """The events of a stream, read as JSON of some form. Comments and ``[DONE]`` are skipped.

    Raises:
        TrioServeError: from the iteration, when an event is an error, or invalid, or none comes.
    """

    def __init__(self, answer: ServerAnswer, form: type[T], name: str = _UNNAMED) -> None:
        self.name = name
        self._answer = answer
        self._form = form
        self._events = RawEvents(_MAX_EVENT)
        self._has_begun = False

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        while (event := self._take()) is None:
            data = await self._answer.receive()
            if not data:
                if not self._has_begun:
                    raise UnavailableError(f"{self.name} sends no events.")
                raise StopAsyncIteration
            self._events.feed(data)
        self._has_begun = True
        if event.startswith(b'{"error"'):
            raise error_in(event, 200, self.name)
        return read_json(event, self._form, self.name)

    def _take(self) -> bytes | None:
        """The next event that has been received whole, or None."""
        try:
            while (lines := self._events.take()) is not None:
                if (event := data_of(lines)).startswith(b"{"):
                    return event
        except LineTooLongError:
            raise UnavailableError(f"{self.name} sends an event that is too long.") from None
        return None


class RawEvents:
    """Finds events in a stream, each as its lines, without comments. It reads nothing itself.

    Args:
        max_bytes: of an event.
    """

    def __init__(self, max_bytes: int) -> None:
        self._lines = Lines(max_bytes)
        self._max_bytes = max_bytes
        self._event: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> Iterator[list[bytes]]:
        """Take more bytes; gives the events that are complete, as `take` does."""
        self._lines.feed(data)
        return iter(self.take, None)

    def take(self) -> list[bytes] | None:
        """The next event; None: no other is complete. Raises LineTooLongError."""
        while (line := self._lines.take()) is not None:
            line = line.rstrip(b"\r")
            self._size += len(line)
            if self._size > self._max_bytes:
                raise LineTooLongError
            if line and not line.startswith(b":"):
                self._event.append(line)
            elif not line:
                event, self._event, self._size = self._event, [], 0
                if event:
                    return event
        return None


def data_of(event: Sequence[bytes]) -> bytes:
    """The data in the lines of an event."""
    return b"\n".join(line[5:].strip() for line in event if line.startswith(b"data:"))


async def receive_all(answer: ServerAnswer, most: int = _MAX_ANSWER, name: str = _UNNAMED) -> bytes:
    """Wait for the rest of a body. Raises UnavailableError: it has more than `most` bytes."""
    whole = bytearray()
    while part := await answer.receive():
        whole += part
        if len(whole) > most:
            raise UnavailableError(f"{name} sends an answer that is too long.")
    return bytes(whole)


def read_json(data: bytes, form: type[T], name: str = _UNNAMED) -> T:
    """Read JSON of a form from a server of that name. Raises UnavailableError: it is invalid."""
    try:
        return msgspec.json.decode(data, type=form)
    except (ValueError, RecursionError) as error:
        raise UnavailableError(
            f"{name} does not answer as expected: {_plain(str(error))}. It sends {_shown(data)}"
        ) from None


def _shown(data: bytes) -> str:
    """The beginning of an answer."""
    return _plain(data[:_MAX_SHOWN].decode("utf-8", "replace")) or "nothing"


class _Error(msgspec.Struct):
    message: str
    type: str = ""
    param: str | None = None


class _Failure(msgspec.Struct):
    """An answer, or an event of a stream, that is an error, in the form of OpenAI."""

    error: _Error


def error_in(data: bytes, status: int, name: str) -> TrioServeError:
    """Turn the answer to a failed request, or an error event, into an exception."""
    try:
        error = msgspec.json.decode(data, type=_Failure).error
    except (ValueError, RecursionError):
        return TrioServeError(f"{name} answers with status {status}: {_shown(data)}")
    message = _plain(error.message[:_MAX_MESSAGE])
    message = message if name == _UNNAMED else f"{name} says: {message}"
    if error.type == TooManyRequestsError.type:
        return TooManyRequestsError(message, retry_after=_RETRY_AFTER)
    usual = TrioServeError if error.param is None else InvalidRequestError
    return _ERRORS.get(error.type, usual)(message, param=error.param)


def _plain(text: str) -> str:
    """A text in one line, in which control characters are spaces."""
    return "".join(each if each.isprintable() else " " for each in text)


def write_json(body: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Write a body as JSON; reads the files of images and sound. It may take long.

    Raises:
        InvalidMediaError: a file cannot be read.
        UnsupportedFieldError: something cannot be sent to another server.
    """
    return b"application/json", json.dumps(body, default=_encode_one).encode()


def _encode_one(value: object) -> Any:
    if isinstance(value, MediaSource) and value.kind is not None:
        file = value.data if value.data is not None else value.path
        value = value if file is None else _ATTACHMENTS[value.kind](file)
    if isinstance(value, Attachment):
        return value.as_part()
    raise UnsupportedFieldError(f"A {type(value).__name__} cannot be sent to another server.")


@contextmanager
def _translated(url: str, place: str, hint: str) -> Iterator[None]:
    """Raise an UnavailableError for one of the connection."""
    try:
        yield
    except (
        httpcore2.ConnectError, httpcore2.ConnectTimeout, httpcore2.UnsupportedProtocol,
    ) as error:  # fmt: skip
        reason = str(error).rstrip(".") or "the time is over"
        raise LostServerError(f"No server answers at {place}: {reason}.{hint}") from error
    except httpcore2.ReadTimeout as error:
        raise SilentServerError(f"The server at {place} is silent for too long.") from error
    except (
        httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException,
    ) as error:  # fmt: skip
        raise LostServerError(f"The connection to {url} is lost.") from error


@asynccontextmanager
async def connected_to(
    url: str,
    *,
    socket_path: str | None = None,
    api_key: str | None = None,
    headers: Headers = (),
    timeouts: Mapping[str, float | None] = _TIMEOUTS,
    hint: str = " Start one with `trioserve serve`, or name another address.",
    n_kept: int = 4,
) -> AsyncIterator[ServerClient]:
    """Give a client of a server that runs. Leaving the block closes the connections to it.

    TLS is verified, and no redirect is followed.

    Args:
        socket_path: the Unix socket that it listens on, if it does.
        api_key: of it, if it has any.
        timeouts: in seconds, by what they are for, in place of the usual ones.
        hint: what to do if it cannot be reached.
        n_kept: connections that stay open for the next requests.
    """
    certificates, base, place = None, url.rstrip("/"), socket_path or url
    if url.startswith("https:"):  # reading them takes a while
        certificates = await trio.to_thread.run_sync(httpcore2.default_ssl_context)
    own = list(headers)
    if api_key is not None:
        own.append((b"authorization", f"Bearer {api_key}".encode()))
    translated = partial(_translated, url, place, hint)
    async with httpcore2.AsyncConnectionPool(
        ssl_context=certificates,
        uds=socket_path,
        max_connections=None,
        max_keepalive_connections=n_kept,
        keepalive_expiry=2.0,  # before the server closes them
    ) as pool:

        @asynccontextmanager
        async def send(request: Request) -> AsyncIterator[ServerAnswer]:
            with translated():
                async with (
                    pool.stream(
                        request.method,
                        base + request.target,
                        headers=[*request.headers, *own],
                        content=request.body or None,
                        extensions={"timeout": {**_TIMEOUTS, **timeouts}},
                    ) as response,
                    aclosing(response.aiter_stream()) as body,
                ):
                    yield _Received(response.status, response.headers, body, translated)

        yield ServerClient(send, f"The server at {place}")


@attrs.define
class _Received:
    """See `ServerAnswer`."""

    status: int
    _headers: Headers
    _body: AsyncIterator[bytes]
    _translated: Callable[[], AbstractContextManager[None]]

    def header(self, name: bytes) -> bytes:
        return next((value for each, value in self._headers if each.lower() == name), b"")

    async def receive(self) -> bytes:
        with self._translated():
            return await anext(self._body, b"")
