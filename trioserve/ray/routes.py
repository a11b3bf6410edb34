"""Where a request goes: to a replica of its model, to all models, or to the one that knows a state.

Only what concerns several models is answered here. All else goes to a child as it came.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import attrs

from trioserve.api.base import sse
from trioserve.api.base.writers import FINGERPRINT
from trioserve.config import Config
from trioserve.errors import (
    NotFoundError,
    NotSupportedError,
    TrioServeError,
    UnknownModelError,
)
from trioserve.models.catalog import ModelEntry, Source
from trioserve.models.catalog.names import find
from trioserve.ray.calls import Answer, Handle, call
from trioserve.ray.incoming import Incoming, Reply
from trioserve.ray.parts import Sent
from trioserve.ray.prefixes import hint_of

#: Lists that every model's server has one of.
_LISTS = ("/models", "/v1/models", "/api/tags", "/api/ps")

#: The same for all models, so that any of them may answer.
_OF_ANY = frozenset({"/", "/openapi.json", "/api/version", "/licenses.txt", "/sw.js"})

#: About the state of one replica.
_OF_ONE_REPLICA = ("/slots", "/lora-adapters", "/v1/chat/completions/control")

#: The header that names a conversation, and the one that asks for a stream to be read later.
_CONVERSATION, _PREFER = "X-Conversation-Id", "Prefer"

#: In the query of a stream's address: who has it.
_AT = "at"

#: Seconds that a list waits for the replicas of a model.
_LIST_PATIENCE = 2.0

#: Requests that are made at the same time for one.
_AT_ONCE = 16


class NoSuchModelError(UnknownModelError):
    """There is no model of the name in the request, and none is to be loaded."""

    status = 404


@attrs.frozen(kw_only=True)
class Target:
    """A model, as an ingress knows it.

    Attributes:
        name: its name.
        aliases: its other names.
        handle: what calls its replicas.
        is_single: whether it never has more than one replica.
    """

    name: str
    aliases: tuple[str, ...]
    handle: Handle
    is_single: bool

    @property
    def entry(self) -> ModelEntry:
        """What finds it by a name."""
        return ModelEntry(
            name=self.name, source=Source.PRESET, args=(), path=None, aliases=self.aliases
        )


class Routes:
    """Has requests answered.

    Args:
        config: what clients see, whatever the model.
        targets: the models.
        patience: seconds that a request waits for a replica to take it.
        finds_replicas: whether requests with the same key get to the same replica.
    """

    def __init__(
        self, config: Config, targets: Sequence[Target], *, patience: float, finds_replicas: bool
    ) -> None:
        self._config = config
        self._targets = {one.name: one for one in targets}
        self._entries = {one.name: one.entry for one in targets}
        self._patience = patience
        self._finds_replicas = finds_replicas or all(one.is_single for one in targets)
        self._own: Mapping[str, Callable[[Incoming], Awaitable[Reply]]] = {
            "/health": self._ready,
            "/v1/health": self._ready,
            "/health/ready": self._ready,
            "/health/live": self._live,
            "/props": self._props,
            "/v1/stream": self._stream,
            "/v1/streams/lookup": self._lookup,
            **dict.fromkeys(_LISTS, self._list),
        }

    async def answer(self, request: Incoming) -> Reply:
        """Answer a request. Whoever gets the reply has to close the call that it is from.

        Raises:
            TrioServeError: the request is wrong, or nobody can answer it.
        """
        path = request.path
        if path in self._own and (request.method in ("GET", "HEAD") or path.startswith("/v1/st")):
            return await self._own[path](request)
        if path.startswith("/v1/stream/"):
            return await self._secret_stream(request)
        target = self._target(request)
        if not target.is_single and (path.startswith(_OF_ONE_REPLICA) or path == "/props"):
            raise NotSupportedError(
                f"{path} is about the state of one server, and the model {target.name!r} is served "
                "by several. It is there for models with one replica."
            )
        return await self._forward(target, request)

    # -- to one model

    def _target(self, request: Incoming) -> Target:
        """Find the model of a request. With one model, its name does not matter."""
        path = request.path
        if len(self._targets) == 1 or path in _OF_ANY or path.startswith("/assets/"):
            return next(iter(self._targets.values()))
        name = request.model
        for prefix in ("/v1/models/", "/models/"):
            if path.startswith(prefix):
                name = path.removeprefix(prefix)
        try:
            found = find(
                self._entries, name, self._config.models_match, self._config.models_default
            )
        except UnknownModelError as error:
            raise NoSuchModelError(error.message, param="model") from None
        return self._targets[found.name]

    async def _forward(self, target: Target, request: Incoming) -> Reply:
        """Have a replica of a model answer a request."""
        conversation, later = request.headers.get(_CONVERSATION), self._is_for_later(request)
        if request.method != "POST" or not (conversation or later):
            return _reply(await self._call(target, request, request.sent()))
        if not self._finds_replicas:
            return _reply(await self._call(target, request, _without_names(request.sent())))
        key = conversation or secrets.token_urlsafe(12)
        answer = await self._call(target, request, request.sent(), key)
        if answer.status == 202:
            return await _at(answer, target.name, key)
        return _reply(answer)

    @staticmethod
    def _is_for_later(request: Incoming) -> bool:
        return "respond-async" in request.headers.get(_PREFER, "").lower()

    async def _call(
        self,
        target: Target,
        request: Incoming,
        sent: Sent,
        key: str | None = None,
        patience: float | None = None,
    ) -> Answer:
        hint = hint_of(request.path, request.fields, key)
        patience = self._patience if patience is None else patience
        return await call(target.handle, sent, hint, patience=patience)

    # -- to all models

    async def _each(self, request: Incoming) -> dict[str, tuple[Answer, bytes] | TrioServeError]:
        """Ask a replica of each model; gives the answers with their bodies, or what went wrong."""

        async def ask(target: Target) -> tuple[Answer, bytes] | TrioServeError:
            try:
                answer = await self._call(target, request, request.sent(), patience=_LIST_PATIENCE)
                try:
                    return answer, await answer.read()
                finally:
                    answer.close()
            except TrioServeError as error:
                return error

        found = await asyncio.gather(*map(ask, self._targets.values()))
        return dict(zip(self._targets, found, strict=True))

    async def _list(self, request: Incoming) -> Reply:
        """Merge the lists of all models. One without a replica is there with its name alone."""
        merged: dict[str, Any] = {}
        for name, found in (await self._each(request)).items():
            if isinstance(found, TrioServeError):
                listed: Mapping[str, Any] = _listed(name)
            elif found[0].status != 200 or request.method == "HEAD":
                return Reply(status=found[0].status, headers=found[0].headers, body=found[1])
            else:
                listed = json.loads(found[1])
            for field, value in listed.items():
                merged[field] = [*merged.get(field, ()), *value] if type(value) is list else value
        if "data" in merged:
            merged |= {"first_id": merged["data"][0]["id"], "last_id": merged["data"][-1]["id"]}
        return Reply(body=sse.encode(merged).encode())

    async def _ready(self, request: Incoming) -> Reply:
        """Say whether any model can be used; if none can, why the first one cannot."""
        found = list((await self._each(request)).values())
        for each in found:
            if not isinstance(each, TrioServeError) and each[0].status == 200:
                return Reply(headers=each[0].headers, body=each[1])
        first = found[0]
        if isinstance(first, TrioServeError):
            raise first
        return Reply(status=first[0].status, headers=first[0].headers, body=first[1])

    async def _live(self, request: Incoming) -> Reply:
        """Say that the ingress lives. Serve looks after the replicas."""
        return Reply(body=b'{"status":"ok"}')

    async def _props(self, request: Incoming) -> Reply:
        """Describe the model, or several as a router does."""
        if len(self._targets) == 1 or request.args.get("model"):
            return await self._forward(self._target(request), request)
        return Reply(
            body=sse.encode(
                {
                    "role": "router",
                    "max_instances": len(self._targets),
                    "models_autoload": False,
                    "model_alias": "trioserve",
                    "model_path": "none",
                    "default_generation_settings": {"params": {}, "n_ctx": 0},
                    "ui_settings": self._config.ui_settings,
                    "build_info": FINGERPRINT,
                    "is_sleeping": False,
                    "cors_proxy_enabled": False,
                }
            ).encode()
        )

    # -- to the replica that has a stream

    async def _stream(self, request: Incoming) -> Reply:
        """Read or stop the stream of a conversation: whichever model has it."""
        self._check_streams(request)
        key = request.args.get("conv_id")
        reply: Reply | None = None
        for target in self._targets.values():
            answer = await self._call(target, request, request.sent(), key)
            reply = _reply(answer)
            if answer.status not in (204, 404):
                return reply
            answer.close()
        assert reply is not None
        return attrs.evolve(reply, rest=None)

    async def _lookup(self, request: Incoming) -> Reply:
        """Ask for each conversation where it would be."""
        self._check_streams(request)
        ids = request.fields.get("conversation_ids")
        if not isinstance(ids, list) or not ids or not all(isinstance(one, str) for one in ids):
            return await self._forward(next(iter(self._targets.values())), request)
        limit = asyncio.Semaphore(_AT_ONCE)

        async def ask(target: Target, id_: str) -> Any:
            body = sse.encode({"conversation_ids": [id_]}).encode()
            async with limit:
                answer = await self._call(target, request, request.sent(body=body), id_)
                try:
                    return answer.status, await answer.read()
                finally:
                    answer.close()

        found = await asyncio.gather(
            *(ask(target, id_) for id_ in ids for target in self._targets.values())
        )
        wrong = [each for each in found if each[0] != 200]
        if wrong:
            return Reply(status=wrong[0][0], body=wrong[0][1])
        merged = [one for _, body in found for one in json.loads(body)]
        return Reply(body=sse.encode(merged).encode())

    async def _secret_stream(self, request: Incoming) -> Reply:
        """Read or stop a stream by the address that its POST was given."""
        self._check_streams(request)
        try:
            name, key = json.loads(base64.urlsafe_b64decode(request.args.get(_AT, "")))
            target = self._targets[name]
        except (ValueError, KeyError, TypeError):
            raise NotFoundError("Stream not found or expired") from None
        sent = request.sent(**{_AT: None})
        return _reply(await self._call(target, request, sent, str(key)))

    def _check_streams(self, request: Incoming) -> None:
        if not self._finds_replicas:
            raise NotSupportedError(
                f"{request.path} needs the router of requests, which finds the replica that has a "
                "stream. This application was built with router=False."
            )


def _reply(answer: Answer) -> Reply:
    """Pass an answer on."""
    length = answer.header(b"content-length")
    is_whole = length.isdigit() and int(length) <= len(answer.body)
    return Reply(
        status=answer.status,
        headers=answer.headers,
        body=answer.body,
        rest=None if is_whole else answer,
    )


async def _at(answer: Answer, model: str, key: str) -> Reply:
    """Say in the address of a stream who has it."""
    try:
        body = json.loads(await answer.read())
    finally:
        answer.close()
    at = base64.urlsafe_b64encode(json.dumps([model, key]).encode()).decode()
    location = f"{body['location']}?{urlencode({_AT: at})}"
    body["location"] = location
    headers = [each for each in answer.headers if each[0] not in (b"location", b"content-length")]
    return Reply(
        status=answer.status,
        headers=[*headers, (b"location", location.encode())],
        body=sse.encode(body).encode(),
    )


def _without_names(sent: Sent) -> Sent:
    """Leave out what would make an answer a stream that can be read again."""
    method, target, headers, body = sent
    names = (_CONVERSATION.lower().encode(), _PREFER.lower().encode())
    return method, target, [each for each in headers if each[0] not in names], body


def _listed(name: str) -> dict[str, Any]:
    """The list of a model of which no more than the name is known."""
    described = {
        "id": name,
        "name": name,
        "model": name,
        "object": "model",
        "owned_by": "trioserve",
        "created": 0,
        "type": "model",
        "display_name": name,
    }
    return {"data": [described], "models": [described]}
