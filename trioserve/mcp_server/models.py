"""Models that answer over HTTP: those of a server that runs, or of processes of our own."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeAlias, TypeVar

import attrs
import httpcore
import msgspec
import trio

from trioserve.errors import TrioServeError, UnavailableError
from trioserve.models.catalog import Catalog
from trioserve.router.fleet import Fleet, send_to_model
from trioserve.router.forward import Outgoing
from trioserve.router.states import QueueStatus

T = TypeVar("T")

#: Takes a sentence on what a call is waiting for.
Tell: TypeAlias = Callable[[str], None]

#: Seconds to connect, and to hand over a piece of a request. An answer may take as long as it does.
_TIMEOUTS = {"connect": 10.0, "write": 30.0, "read": None, "pool": None}

#: Bytes of an answer of which a part is shown if it says nothing that we understand.
_MAX_SHOWN = 200


class Reply(Protocol):
    """An answer whose head is there."""

    status: int

    async def receive(self) -> bytes:
        """Wait for more of the body. Empty at the end."""


class Reason(msgspec.Struct):
    """What is wrong, in the form of OpenAI."""

    message: str


class Failure(msgspec.Struct):
    """An answer, or an event of a stream, that is an error."""

    error: Reason


class _Status(msgspec.Struct):
    value: str = "loaded"


class _Model(msgspec.Struct):
    id: str
    status: _Status = msgspec.field(default_factory=_Status)


class _Models(msgspec.Struct):
    """What ``/v1/models`` answers. A server of one model gives it no status."""

    data: list[_Model]


@attrs.frozen
class Listed:
    """A model that may be named in a request."""

    name: str
    state: str


class Models(ABC):
    """Takes requests to models. Leaving the block of an answer cancels the request."""

    @abstractmethod
    def send(
        self, path: str, body: Mapping[str, Any], tell: Tell
    ) -> AbstractAsyncContextManager[Reply]:
        """Send a request to the model that the body names; gives the answer, whatever its status.

        Raises:
            TrioServeError: there is no such model, or nobody answers.
        """

    @abstractmethod
    async def listed(self) -> list[Listed]:
        """List the models. Raises TrioServeError."""

    @asynccontextmanager
    async def answer(self, path: str, body: Mapping[str, Any], tell: Tell) -> AsyncIterator[Reply]:
        """Send a request; gives an answer that is good. Raises TrioServeError."""
        async with self.send(path, body, tell) as reply:
            if reply.status != 200:
                raise error_in(await receive_all(reply), reply.status)
            yield reply

    async def ask(self, path: str, body: Mapping[str, Any], form: type[T], tell: Tell) -> T:
        """Send a request, and read the JSON of its answer. Raises TrioServeError."""
        async with self.answer(path, body, tell) as reply:
            return read(await receive_all(reply), form)


class OwnModels(Models):
    """Models in processes that are started when they are first needed."""

    def __init__(self, fleet: Fleet, catalog: Catalog) -> None:
        self._fleet = fleet
        self._catalog = catalog

    @asynccontextmanager
    async def send(self, path: str, body: Mapping[str, Any], tell: Tell) -> AsyncIterator[Reply]:
        """See `Models.send`."""
        entry = self._catalog.find(body.get("model"))

        def waits(waiting: QueueStatus) -> None:
            share = "" if waiting.progress is None else f": {waiting.progress:.0%}"
            tell(f"Loading {entry.name}{share}")

        async def write() -> Outgoing:
            headers = ((b"content-type", b"application/json"),)
            return Outgoing("POST", path, headers, json.dumps(body).encode())

        async with send_to_model(self._fleet, entry, write, on_wait=waits) as answer:
            tell("")
            yield answer

    async def listed(self) -> list[Listed]:
        """See `Models.listed`."""
        names = [one.name for one in self._catalog.entries.values() if not one.hidden]
        return [Listed(name, self._fleet.state(name).value.value) for name in names]


class ServerModels(Models):
    """The models of a server that runs.

    Args:
        pool: connections to it.
        url: its address, without a path's last slash.
        api_key: of it, if it has any.
    """

    def __init__(self, pool: httpcore.AsyncConnectionPool, url: str, api_key: str | None) -> None:
        self._pool = pool
        self._url = url
        self._headers = [("Content-Type", "application/json")]
        if api_key is not None:
            self._headers.append(("Authorization", f"Bearer {api_key}"))

    @asynccontextmanager
    async def send(self, path: str, body: Mapping[str, Any], tell: Tell) -> AsyncIterator[Reply]:
        """See `Models.send`."""
        async with self._send("POST", path, json.dumps(body).encode()) as reply:
            yield reply

    async def listed(self) -> list[Listed]:
        """See `Models.listed`."""
        async with self._send("GET", "/v1/models") as reply:
            data = await receive_all(reply)
        if reply.status != 200:
            raise error_in(data, reply.status)
        return [Listed(one.id, one.status.value) for one in read(data, _Models).data]

    @asynccontextmanager
    async def _send(
        self, method: str, path: str, content: bytes | None = None
    ) -> AsyncIterator[Reply]:
        try:
            async with self._pool.stream(
                method,
                self._url + path,
                headers=self._headers,
                content=content,
                extensions={"timeout": _TIMEOUTS},
            ) as response:
                received = _Received(response)
                try:
                    yield received
                finally:
                    await received.abandon()
        except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
            raise UnavailableError(f"No server answers at {self._url}: {error}.") from error
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            raise UnavailableError(f"The connection to {self._url} is lost.") from error


class _Received:
    """See `Reply`."""

    def __init__(self, response: httpcore.Response) -> None:
        self.status = response.status
        self._body = response.aiter_stream()
        self._begun = False

    async def receive(self) -> bytes:
        self._begun = True
        return await anext(self._body, b"")

    async def abandon(self) -> None:
        """Read no further. Being cancelled ends all of the generators that the body is made of."""
        if self._begun:
            with trio.CancelScope() as scope:
                scope.cancel()
                await anext(self._body, b"")


@asynccontextmanager
async def models_of_server(
    url: str, *, socket_path: str | None = None, api_key: str | None = None
) -> AsyncIterator[Models]:
    """The models of a server that runs. Leaving the block closes the connections to it.

    Args:
        url: its address.
        socket_path: the Unix socket that it listens on, if it does.
        api_key: of it.
    """
    certificates = None
    if url.startswith("https:"):  # reading them takes a while
        certificates = await trio.to_thread.run_sync(httpcore.default_ssl_context)
    async with httpcore.AsyncConnectionPool(
        ssl_context=certificates,
        uds=socket_path,
        max_connections=None,
        max_keepalive_connections=4,
        keepalive_expiry=2.0,  # before the server closes them
    ) as pool:
        yield ServerModels(pool, url, api_key)


@asynccontextmanager
async def models_of_catalog(
    catalog: Catalog, *, max_models: int, max_memory: int
) -> AsyncIterator[Models]:
    """The models of a catalog, as `Fleet` runs them. Leaving the block ends their processes."""
    async with Fleet(catalog, max_models=max_models, max_memory=max_memory) as fleet:
        yield OwnModels(fleet, catalog)


async def receive_all(reply: Reply) -> bytes:
    """Wait for the rest of a body."""
    parts = []
    while part := await reply.receive():
        parts.append(part)
    return b"".join(parts)


def read(data: bytes, form: type[T]) -> T:
    """Read JSON of a form. Raises UnavailableError: it is none."""
    try:
        return msgspec.json.decode(data, type=form)
    except msgspec.DecodeError as error:
        raise UnavailableError(f"The server does not answer as expected: {error}.") from None


def error_in(data: bytes, status: int) -> TrioServeError:
    """Make an error of the answer to a request that has failed."""
    try:
        return TrioServeError(msgspec.json.decode(data, type=Failure).error.message)
    except msgspec.DecodeError:
        shown = data[:_MAX_SHOWN].decode("utf-8", "replace")
        return TrioServeError(f"The server answers with status {status}: {shown}")


class Chatted(msgspec.Struct, kw_only=True):
    """An answer."""

    text: str
    model: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    reasoning: str = ""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    """A chunk of an answer, or an error."""

    model: str = ""
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Reason | None = None


async def chat(
    models: Models, request: Mapping[str, Any], tell: Tell, comes: Callable[[str], None]
) -> Chatted:
    """Have a model answer a chat. When cancelled, it stops.

    Args:
        models: those that there are.
        request: as for ``/v1/chat/completions``.
        tell: takes what the call is waiting for.
        comes: takes the text as it comes, that of reasoning, too.

    Raises:
        TrioServeError: it does not answer.
    """
    body = {**request, "stream": True, "stream_options": {"include_usage": True}}
    reader = _Reader(comes)
    async with models.answer("/v1/chat/completions", body, tell) as reply:
        while data := await reply.receive():
            reader.feed(data)
    return reader.answer()


class _Reader:
    """Puts an answer together from the events of its stream."""

    def __init__(self, comes: Callable[[str], None]) -> None:
        self._comes = comes
        self._buffer = b""
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._model = ""
        self._finish_reason: str | None = None
        self._usage = _Usage()

    def feed(self, data: bytes) -> None:
        """Take what came. Raises TrioServeError: it is an error, or no event of a chat."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            content = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and content != b"[DONE]":  # others are comments
                self._take(read(content, _Event))

    def _take(self, event: _Event) -> None:
        if event.error is not None:
            raise TrioServeError(event.error.message)
        self._model = event.model or self._model
        self._usage = event.usage or self._usage
        for choice in event.choices:
            self._finish_reason = choice.finish_reason or self._finish_reason
            for piece, parts in (
                (choice.delta.reasoning_content, self._reasoning),
                (choice.delta.content, self._text),
            ):
                if piece:
                    parts.append(piece)
                    self._comes(piece)

    def answer(self) -> Chatted:
        """The whole answer. Raises UnavailableError: it has no end."""
        if self._finish_reason is None:
            raise UnavailableError("The answer of the server has no end.")
        return Chatted(
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            model=self._model,
            finish_reason=self._finish_reason,
            prompt_tokens=self._usage.prompt_tokens,
            completion_tokens=self._usage.completion_tokens,
        )
