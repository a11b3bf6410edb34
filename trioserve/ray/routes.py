"""Where a request goes: to a replica of its model, to all models, or to the one that knows a state.

Only what concerns several models or replicas is answered here. All else goes to a child as it came.
Some questions are broadcast to all replicas; a stream is read from the replica that has it.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import urlencode

from trioserve.api import metrics
from trioserve.api.base import sse, vendors
from trioserve.api.base.described import page, properties_of_many
from trioserve.api.base.generation import is_unknown
from trioserve.api.base.reply import Data, Reply, json as json_reply
from trioserve.api.router.metrics import label, merged
from trioserve.api.sessions import ID
from trioserve.config import Config
from trioserve.errors import NotFoundError, NotSupportedError, TrioServeError
from trioserve.ray.calls import ModelTarget, ReplicaReply, Targets, at_once
from trioserve.ray.incoming import IngressRequest, Sent

#: Answers a request.
Handler: TypeAlias = Callable[[IngressRequest], Awaitable[Reply]]

#: In a query: the name of the replica that is meant.
_REPLICA = "replica"

#: Seconds in which each replica has to take a broadcast question; for a list, one of each model.
_PATIENCE = 5.0
_LIST_PATIENCE = 2.0

#: A request that costs nothing.
_ANYTHING: Sent = ("GET", "/health/live", (), b"")

_READS = ("GET", "HEAD")

_PREFER = "Prefer"

#: In the query of a stream's address: the model, and the name that stands for the replica.
_AT = "at"


class Routes:
    """Routes requests to replicas.

    Args:
        config: the settings for clients that do not depend on the model.
        targets: the models.
        finds_replicas: whether requests with the same key get to the same replica.
    """

    def __init__(self, config: Config, targets: Targets, *, finds_replicas: bool) -> None:
        self._config = config
        self._targets = targets
        self._lists = {
            each.path: each.lists for each in vendors.known_routes() if each.lists is not None
        }
        self._finds_replicas = finds_replicas or all(one.is_single for one in targets)
        reads: Mapping[str, Handler] = {
            "/health": self._ready,
            "/v1/health": self._ready,
            "/health/ready": self._ready,
            "/health/live": self._live,
            "/metrics": self._metrics,
            "/props": self._props,
            "/slots": self._slots,
            "/v1/metrics": self._snapshot,
            "/v1/stream": self._stream_by_name,
            **dict.fromkeys(self._lists, self._list),
        }
        self._own: Mapping[tuple[str, str], Handler] = {
            **{(method, path): handler for path, handler in reads.items() for method in _READS},
            ("DELETE", "/v1/stream"): self._stream_by_name,
            ("POST", "/v1/streams/lookup"): self._lookup,
            ("POST", "/lora-adapters"): self._all,
            ("POST", "/v1/load_lora_adapter"): self._all,
            ("POST", "/v1/unload_lora_adapter"): self._all,
            ("POST", "/props"): self._all,
        }
        self._below: Mapping[str, Handler] = {
            "/slots/": self._one,
            "/v1/stream/": self._stream_by_secret,
        }

    async def answer(self, request: IngressRequest) -> Reply:
        """Answer a request. The caller closes the reply.

        Raises:
            TrioServeError: the request is wrong, or cannot be answered.
        """
        handler = self._own.get((request.method, request.path))
        for prefix, below in self._below.items():
            if request.path.startswith(prefix):
                handler = below
        if request.method == "POST" and request.route.about_answer:
            handler = self._owner
        return await (handler or self._pass_on)(request)

    # -- states that each replica has alone

    async def _one(self, request: IngressRequest) -> Reply:
        """Have the replica that is named answer, or the only one.

        Raises:
            NotFoundError: there is none of the name.
            NotSupportedError: it is not said which.
        """
        target = self._targets.of(request)
        name = request.query.get(_REPLICA)
        if name is None and not target.is_single:
            raise NotSupportedError(
                f"{request.path} is about the state of one server, and the model {target.name!r} "
                f"is served by several. Name one with ?{_REPLICA}=; GET /slots lists them."
            )
        if name is not None and name not in await self._names(target, request):
            raise NotFoundError(f"There is no replica {name!r}.", param=_REPLICA)
        sent = request.sent(**{_REPLICA: None})
        return await self._targets.call(target, request, sent=sent, key=name)

    async def _slots(self, request: IngressRequest) -> Reply:
        """List the slots of all replicas, each with the name of its replica."""
        target = self._targets.of(request)
        if target.is_single or request.query.get(_REPLICA):
            return await self._one(request)
        listed = []
        for name, reply in await self._broadcast(target, request):
            if reply.status != 200:
                return reply
            listed += [{**slot, _REPLICA: name} for slot in json.loads(reply.body)]
        return json_reply(listed)

    async def _all(self, request: IngressRequest) -> Reply:
        """Have all replicas do something; gives the first answer that is an error, or any."""
        target = self._targets.of(request)
        if target.is_single or request.query.get(_REPLICA):
            return await self._one(request)
        replies = [reply for _, reply in await self._broadcast(target, request)]
        return next((reply for reply in replies if reply.status >= 400), replies[0])

    async def _owner(self, request: IngressRequest) -> Reply:
        """Ask all replicas for the one that gives an answer: of one model, or of all."""
        targets = [self._targets.of(request)] if request.model else list(self._targets)
        replies = [reply for one in targets for _, reply in await self._broadcast(one, request)]
        return next(
            (reply for reply in replies if not is_unknown(reply.status, reply.body)), replies[0]
        )

    async def _metrics(self, request: IngressRequest) -> Reply:
        """Write the metrics of all replicas of one model, or of all, each with its labels."""
        texts = []
        for target in self._measured(request):
            for name, reply in await self._broadcast(target, request):
                if reply.status != 200:
                    return reply
                labels = ",".join((label("model_name", target.name), label(_REPLICA, name)))
                texts.append((labels, reply.body.decode()))
        return Data(body=merged(texts).encode(), content_type=metrics.CONTENT_TYPE)

    async def _snapshot(self, request: IngressRequest) -> Reply:
        """Gather the snapshots of all replicas of one model, or of all."""
        models = {}
        for target in self._measured(request):
            replies = await self._broadcast(target, request)
            if wrong := [reply for _, reply in replies if reply.status != 200]:
                return wrong[0]
            models[target.name] = {name: json.loads(reply.body) for name, reply in replies}
        return json_reply({"object": "metrics", "models": models})

    def _measured(self, request: IngressRequest) -> Iterable[ModelTarget]:
        """The models whose metrics are asked for. Raises NotSupportedError: there are none."""
        metrics.check(self._config)
        return [self._targets.of(request)] if request.query.get("model") else self._targets

    async def _broadcast(
        self, target: ModelTarget, request: IngressRequest
    ) -> Sequence[tuple[str, Data]]:
        """Ask all replicas of a model; gives their names and answers.

        One that is lost meanwhile is left out, unless it is the last.

        Raises:
            TrioServeError: none answers.
        """
        names = await self._names(target, request)
        ask = partial(self._targets.ask, target, request, patience=_PATIENCE)
        found = await at_once(partial(ask, key=name or None) for name in names)
        replies = [
            (name, one) for name, one in zip(names, found, strict=True) if isinstance(one, Data)
        ]
        if not replies and isinstance(found[0], TrioServeError):
            raise found[0]
        return replies

    async def _names(self, target: ModelTarget, request: IngressRequest) -> Sequence[str]:
        """The names of the replicas of a model. The only one may have none.

        Raises:
            NotSupportedError: they are not known.
        """
        if not target.replicas():  # nothing was asked of any yet
            await self._targets.ask(target, request, sent=_ANYTHING)
        names = target.replicas()
        if not names and not target.is_single:
            raise NotSupportedError(
                f"{request.path} needs the router of requests, which knows the replicas. This "
                "application was built with router=False."
            )
        return names or ("",)

    # -- streams that can be resumed

    async def _pass_on(self, request: IngressRequest) -> Reply:
        """Have a replica answer a request, which may make a stream to be read again."""
        target, name = self._targets.of(request), request.headers.get(ID)
        is_for_later = "respond-async" in request.headers.get(_PREFER, "").lower()
        if request.method != "POST" or not (name or is_for_later):
            return await self._targets.call(target, request)
        if not self._finds_replicas:
            sent = _without_names(request.sent())
            return await self._targets.call(target, request, sent=sent)
        key = name or secrets.token_urlsafe(12)
        answer = await self._targets.call(target, request, key=key)
        return await _addressed(answer, target.name, key) if answer.status == 202 else answer

    async def _stream_by_name(self, request: IngressRequest) -> Reply:
        """Read or stop the stream of a conversation: whichever model has it."""
        self._check_finds(request)
        key = request.query.get("conv_id")
        missing: Reply | None = None
        for target in self._targets:
            answer = await self._targets.call(target, request, key=key)
            if answer.status not in (204, 404):
                return answer
            missing = await answer.whole()
        assert missing is not None
        return missing

    async def _stream_by_secret(self, request: IngressRequest) -> Reply:
        """Read or stop a stream by the address that its POST was given."""
        self._check_finds(request)
        try:
            name, key = json.loads(base64.urlsafe_b64decode(request.query.get(_AT, "")))
            target = self._targets.by_name[name]
        except (ValueError, KeyError, TypeError):
            raise NotFoundError("Stream not found or expired") from None
        sent = request.sent(**{_AT: None})
        return await self._targets.call(target, request, sent=sent, key=str(key))

    async def _lookup(self, request: IngressRequest) -> Reply:
        """Ask for each conversation where it would be."""
        self._check_finds(request)
        ids = request.given.get("conversation_ids")
        if not isinstance(ids, list) or not ids or not all(isinstance(one, str) for one in ids):
            return await self._targets.ask(self._targets.first, request)
        calls = []
        for id_ in ids:
            sent = request.sent(body=sse.encode({"conversation_ids": [id_]}).encode())
            ask = partial(self._targets.ask, request=request, sent=sent, key=id_)
            calls += [partial(ask, target) for target in self._targets]
        merged: list[Any] = []
        for found in await at_once(calls):
            if isinstance(found, TrioServeError):
                raise found
            if found.status != 200:
                return found
            merged += json.loads(found.body)
        return json_reply(merged)

    def _check_finds(self, request: IngressRequest) -> None:
        if not self._finds_replicas:
            raise NotSupportedError(
                f"{request.path} needs the router of requests, which finds the replica that has a "
                "stream. This application was built with router=False."
            )

    # -- all models

    async def _each(self, request: IngressRequest) -> Mapping[str, Data | TrioServeError]:
        """Ask a replica of each model; gives the answers, or what went wrong."""
        ask = partial(self._targets.ask, request=request, patience=_LIST_PATIENCE)
        found = await at_once(partial(ask, target) for target in self._targets)
        return dict(zip(self._targets.by_name, found, strict=True))

    async def _list(self, request: IngressRequest) -> Reply:
        """Merge the lists of all models. One without a replica is there with its name alone."""
        merged: dict[str, Any] = {}
        for name, found in (await self._each(request)).items():
            if isinstance(found, TrioServeError):
                listed = self._lists[request.path](name)
            elif found.status != 200 or request.method == "HEAD":
                return found
            else:
                listed = json.loads(found.body)
            for field, value in listed.items():
                merged[field] = [*merged.get(field, ()), *value] if type(value) is list else value
        if "data" in merged:
            merged |= page(merged["data"])
        return json_reply(merged)

    async def _ready(self, request: IngressRequest) -> Reply:
        """Say whether any model can be used; if none can, why the first one cannot."""
        found = list((await self._each(request)).values())
        replies = [each for each in found if isinstance(each, Data)]
        if isinstance(found[0], TrioServeError) and not replies:
            raise found[0]
        return next((each for each in replies if each.status == 200), replies[0])

    async def _live(self, request: IngressRequest) -> Reply:
        """Say that the ingress lives. Serve checks the replicas."""
        return json_reply({"status": "ok"})

    async def _props(self, request: IngressRequest) -> Reply:
        """Describe the model, or several as a router does."""
        if len(self._targets) == 1 or request.query.get("model"):
            return await self._targets.ask(self._targets.of(request), request)
        described = properties_of_many(self._config, max_models=len(self._targets), autoload=False)
        return json_reply(described)


async def _addressed(answer: ReplicaReply, model: str, key: str) -> Reply:
    """Say in the address of a stream who has it."""
    whole = await answer.whole()
    body = json.loads(whole.body)
    at = base64.urlsafe_b64encode(json.dumps([model, key]).encode()).decode()
    location = f"{body['location']}?{urlencode({_AT: at})}"
    whole.headers.pop("content-length", None)
    headers = {**whole.headers, "location": location}
    return json_reply({**body, "location": location}, whole.status, **headers)


def _without_names(sent: Sent) -> Sent:
    """Leave out what would make an answer a stream that can be read again."""
    method, target, headers, body = sent
    names = (ID.lower().encode(), _PREFER.lower().encode())
    return method, target, [each for each in headers if each[0] not in names], body
