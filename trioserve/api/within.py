"""Requests that an app sends to itself: the instances of ``/predict``, and the lines of batches."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import attrs
import trio

#: An ASGI app.
App = Callable[[Any, Any, Any], Awaitable[None]]


@attrs.frozen
class Answer:
    """An answer that is complete."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes


def receive_of(
    body: bytes, on_sent: Callable[[], object] = lambda: None
) -> Callable[[], Awaitable[Any]]:
    """Make the ASGI ``receive`` of a client that sends a body and stays connected.

    `on_sent` is called when the body is received.
    """
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if not messages:
            await trio.sleep_forever()
        on_sent()
        return messages.pop()

    return receive


async def ask(
    app: App,
    scope: Mapping[str, Any],
    path: str,
    body: bytes,
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> Answer:
    """POST JSON to a path of the app, and wait for the whole answer.

    Args:
        app: the app.
        scope: what the request has in common with another one.
        path: of the route, without a prefix.
        body: the JSON.
        headers: further ones than those of the body.
    """
    whole = scope.get("root_path", "") + path
    inner = {
        **scope,
        "path": whole,
        "raw_path": whole.encode(),
        "query_string": b"",
        "headers": [
            *headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ],
    }
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)
        await trio.lowlevel.checkpoint()

    await app(inner, receive_of(body), send)
    head = messages[0]
    return Answer(
        head["status"],
        {name.lower(): value for name, value in head["headers"]},
        b"".join(message.get("body", b"") for message in messages),
    )
