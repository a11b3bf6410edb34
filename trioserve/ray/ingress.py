"""The ingress: an app as on one machine, which asyncio serves, and which finds what others have.

What outlives a request, or is about another one, is in the ingress that had that: a stream that can
be resumed, an answer that is being sent. A request for a stream goes to the ingress that its name
stands for, and one about an answer to all, until one knows the answer.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

import attrs

from trioserve.api.base import errors, vendors
from trioserve.api.base.generation import is_unknown
from trioserve.api.edge.connection import ID_HEADER
from trioserve.api.sessions import ASKED_BY, ID
from trioserve.errors import NotSupportedError
from trioserve.ray.guest import Guest
from trioserve.ray.prefix_affinity import PrefixAffinity

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Coroutine[Any, Any, Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

#: Parts of a request's ASGI scope that another ingress gets: plain values.
_PLAIN = (
    "type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string",
    "root_path", "headers", "client", "server",
)  # fmt: skip

_STREAM, _LOOKUP = "/v1/stream", "/v1/streams/lookup"


@attrs.frozen(kw_only=True)
class Peers:
    """The ingresses of an application, this one among them."""

    name: str  # of this one
    names: Callable[[], Awaitable[Sequence[str]]]  # gives those of all, as far as they are known
    #: Has the one of a name answer. None may ask itself: Ray may lose the end of that.
    call: Callable[[Message, bytes, str], AsyncIterator[Message]]
    lost: tuple[type[Exception], ...]  # the exceptions when it is lost
    _homes: PrefixAffinity = attrs.field(factory=PrefixAffinity)

    async def home_of(self, key: str) -> str:
        """Find the ingress that a key stands for, which may be its name."""
        names = await self.names()
        self._homes.update(names)
        return key if key in names else self._homes.of_key(key) or self.name


class Ingress:
    """The ASGI application of an ingress, on the event loop of asyncio."""

    def __init__(
        self,
        make_app: Callable[[Guest], Callable[..., Awaitable[object]]],
        peers: Peers | None,
        max_body: int,
        *,
        is_single: bool = False,
    ) -> None:
        self._make_app, self._peers, self._max_body = make_app, peers, max_body
        self._is_single = is_single
        self._about_answer = [
            re.compile(re.sub("<[^>]*>", "[^/]+", one.path))
            for one in vendors.known_routes()
            if one.about_answer
        ]
        self._guest: Guest
        self._app: Callable[..., Awaitable[object]]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one connection, as ASGI has it. When cancelled, so is what answers."""
        if scope["type"] == "lifespan":
            self._guest = Guest()
            await self._guest.begin()
            self._app = self._make_app(self._guest)
            async for message in self._guest.messages(self._app, scope, receive):
                await send(message)
            await self._guest.end()
        elif scope["type"] == "http":
            async for message in self._answer(scope, receive):
                await send(message)

    def add_exception_handler(self, kind: type[Exception], handler: object) -> None:
        """Do nothing: Serve up to 2.49 says how its errors are to be answered, which we know."""

    async def here(self, scope: Message, body: bytes) -> AsyncIterator[Message]:
        """Answer a request that another ingress has, or this one."""
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return messages.pop() if messages else await _never()

        async for message in self._serve(scope, receive):
            yield message

    async def _serve(self, scope: Message, receive: Receive) -> AsyncIterator[Message]:
        """Have the app answer."""
        scope = {**scope, "root_path": "", "path": _path_of(scope)}
        shown = dict(scope["headers"]).get(ID_HEADER.lower().encode())
        async for message in self._guest.messages(self._app, scope, receive):
            if message["type"] == "http.response.start" and shown is not None:
                # The proxy tells the id that the client has given.
                given = (ID_HEADER.lower().encode(), shown)
                heads = [each for each in message["headers"] if (each[0].lower(), each[1]) != given]
                message = {**message, "headers": heads}
            yield message

    async def _answer(self, scope: Message, receive: Receive) -> AsyncIterator[Message]:
        """Answer, or have another ingress do so."""
        peers, key = self._peers, _key_of(scope)
        plain = {name: scope[name] for name in _PLAIN if name in scope}
        answer = self._serve(scope, receive)
        if peers is None:
            if not self._is_single:
                answer = self._alone(scope, receive)
        elif scope["method"] == "POST" and self._is_about_all(_path_of(scope)):
            answer = self._of_all(peers, plain, await self._whole(receive))
        elif key is not None and (home := await peers.home_of(key)) != peers.name:
            answer = peers.call(plain, await self._whole(receive), home)
        async for message in answer:
            yield message

    def _is_about_all(self, path: str) -> bool:
        return path == _LOOKUP or any(rule.fullmatch(path) for rule in self._about_answer)

    async def _whole(self, receive: Receive) -> bytes:
        """Receive a body; of one that is too long, as much as shows that."""
        body, more = b"", True
        while more and len(body) <= self._max_body:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return body

    async def _alone(self, scope: Message, receive: Receive) -> AsyncIterator[Message]:
        """Answer without the others: a POST as if it did not ask for a stream to be found again."""
        path, headers = _path_of(scope), scope["headers"]
        if path.startswith(_STREAM) or self._is_about_all(path):
            error = NotSupportedError(
                f"{path} needs the router of requests, which finds the ingress that has it. "
                "This application was built with router=False."
            )
            reply = errors.reply(error, path)
            pieces = await reply.write()
            kind = (b"content-type", reply.content_type.encode())
            yield {"type": "http.response.start", "status": reply.status, "headers": [kind]}
            yield {"type": "http.response.body", "body": b"".join(pieces), "more_body": False}
            return
        asked = {name.lower().encode() for name in ASKED_BY}
        scope = {**scope, "headers": [each for each in headers if each[0].lower() not in asked]}
        async for message in self._serve(scope, receive):
            yield message

    async def _of_all(self, peers: Peers, scope: Message, body: bytes) -> AsyncIterator[Message]:
        """Ask all ingresses: until one knows the answer, or for the streams that each has."""
        is_lookup, found = _path_of(scope) == _LOOKUP, []
        start, whole = None, b""
        for name in sorted(await peers.names(), key=peers.name.__ne__):  # this one is the first
            is_own = name == peers.name
            answer = self.here(scope, body) if is_own else peers.call(scope, body, name)
            try:
                messages = [message async for message in answer]
            except peers.lost:
                continue
            start, whole = messages[0], b"".join(m.get("body", b"") for m in messages[1:])
            if is_lookup and start["status"] == 200:
                found += json.loads(whole)
                whole = json.dumps(found).encode()
            elif is_lookup or not is_unknown(start["status"], whole):
                break
        assert start is not None
        headers = [each for each in start["headers"] if each[0].lower() != b"content-length"]
        headers.append((b"content-length", b"%d" % len(whole)))
        yield {**start, "headers": headers}
        yield {"type": "http.response.body", "body": whole, "more_body": False}


def _key_of(scope: Message) -> str | None:
    """The key of the ingress that has a stream; None: the request is not about one."""
    path = _path_of(scope)
    if path == _STREAM:
        query = scope.get("query_string", b"").decode("ascii", "replace")
        return dict(parse_qsl(query)).get("conv_id")
    if path.startswith(f"{_STREAM}/"):
        return path.removeprefix(f"{_STREAM}/").partition(".")[0]
    named = dict(scope["headers"]).get(ID.lower().encode())
    return (
        None
        if named is None or scope["method"] != "POST"
        else bytes(named).decode("utf-8", "replace")
    )


def _path_of(scope: Message) -> str:
    """The path of a request, without the prefix that the application is reached under."""
    path = str(scope["path"]).removeprefix(scope.get("root_path", "").rstrip("/"))
    return path if path.startswith("/") else f"/{path}"


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError
