"""Replicas as an ingress sees them, played by hand, and a client of the ingress, without Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import attrs

from trioserve.config import Config
from trioserve.ray import prefix_affinity
from trioserve.ray.calls import HEAD, TAKEN, ModelTarget, Part, Targets
from trioserve.ray.incoming import RouteTable, Sent
from trioserve.ray.ingress import Ingress
from trioserve.ray.lifelines import Anchor
from trioserve.ray.prefix_affinity import RoutingHint
from trioserve.ray.routes import Routes


class LostError(Exception):
    """What Ray raises when a replica has died."""


class AbsentError(LostError):
    """What Ray raises when there will be none."""


#: Answers one call.
Play = Callable[[Sent, RoutingHint], AsyncGenerator[Part, None]]


class Response:
    """A call's answer. `cancelled` is whether it was ended."""

    def __init__(self, parts: AsyncGenerator[Part, None]) -> None:
        self.cancelled = False
        self._parts = parts

    async def __anext__(self) -> Part:
        return await self._parts.__anext__()

    def cancel(self) -> None:
        self.cancelled = True


class Replicas:
    """The replicas of a model: each call is played by the next of `plays`, and then by the last."""

    def __init__(self, *plays: Play, model: str = "m") -> None:
        self.calls: list[tuple[Sent, RoutingHint]] = []
        self.responses: list[Response] = []
        self._plays = list(plays)
        self.names: list[str] = []
        self.target = ModelTarget(
            name=model,
            is_single=True,
            call=self._call,
            lost=(LostError,),
            absent=(AbsentError,),
            replicas=lambda: self.names,
        )

    def _call(self, sent: Sent, hint: RoutingHint) -> Response:
        play = self._plays.pop(0) if len(self._plays) > 1 else self._plays[0]
        self.calls.append((sent, hint))
        self.responses.append(Response(play(sent, hint)))
        return self.responses[-1]


def json_answer(value: Any, status: int = 200, **headers: str) -> Play:
    """Answer with JSON, in one piece."""
    return text_answer(json.dumps(value), status, content_type="application/json", **headers)


def text_answer(text: str, status: int = 200, **headers: str) -> Play:
    """Answer with a text, in one piece."""
    body = text.encode()
    given = [
        (b"content-length", b"%d" % len(body)),
        *((name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()),
    ]

    async def play(sent: Sent, hint: RoutingHint) -> AsyncGenerator[Part, None]:
        yield (TAKEN,)
        yield (HEAD, status, given, body)

    return play


def events(*parts: Part | Exception, content_type: str = "text/event-stream") -> Play:
    """Answer with a stream of parts. The first part comes with the head."""
    first, *others = parts

    async def play(sent: Sent, hint: RoutingHint) -> AsyncGenerator[Part, None]:
        yield (TAKEN,)
        yield (HEAD, 200, [(b"content-type", content_type.encode())], first)
        for part in others:
            if isinstance(part, Exception):
                raise part
            yield part

    return play


def fails(error: BaseException | None, *before: Part) -> Play:
    """Raise after these parts, or just end."""

    async def play(sent: Sent, hint: RoutingHint) -> AsyncGenerator[Part, None]:
        for part in before:
            yield part
        if error is not None:
            raise error

    return play


async def never(sent: Sent, hint: RoutingHint) -> AsyncGenerator[Part, None]:
    """Take no request."""
    await asyncio.Event().wait()
    yield (TAKEN,)


@attrs.frozen
class Received:
    """What a client has received."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ingress_of(
    models: Mapping[str, Replicas],
    config: Config | None = None,
    *,
    several: Sequence[str] = (),
    patience: float = 5.0,
    finds_replicas: bool = True,
) -> Ingress:
    """An ingress of these models. Those in `several` have more than one replica."""
    config = config or Config()
    targets = [
        attrs.evolve(
            replicas.target,
            name=name,
            aliases=(f"{name}-alias",),
            is_single=name not in several,
        )
        for name, replicas in models.items()
    ]
    known = Targets(config, targets, patience=patience)
    return Ingress(
        config, Routes(config, known, finds_replicas=finds_replicas), Anchor("127.0.0.1")
    )


async def ask(
    app: Ingress,
    method: str,
    target: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    *,
    root_path: str = "",
    comes: bool = True,
) -> Received:
    """Send a request, and receive the whole answer. The body may stay away."""
    path, _, query = target.partition("?")
    given = [(name.lower().encode(), text.encode()) for name, text in (headers or {}).items()]
    sent = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    scope = {
        "type": "http",
        "method": method,
        "path": root_path + path,
        "root_path": root_path,
        "query_string": query.encode(),
        "headers": [(b"host", b"localhost"), *given],
        "client": ("192.0.2.1", 1234),
        "server": ("127.0.0.1", 8000),
    }
    messages = [{"type": "http.request", "body": sent, "more_body": False}] if comes else []
    received: list[Any] = []

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    async def send(message: Any) -> None:
        received.append(message)

    await app(scope, receive, send)
    start, *pieces = received
    assert [piece["more_body"] for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    names = [(name.decode(), text.decode()) for name, text in start["headers"]]
    return Received(start["status"], dict(names), b"".join(piece["body"] for piece in pieces))


def hint_of(route: str, body: object, key: str | None = None) -> RoutingHint:
    """The hint for a request to this route."""
    known = RouteTable().at("POST", route.partition("?")[0])
    return prefix_affinity.hint_of(body, known.prompt_fields, key)
