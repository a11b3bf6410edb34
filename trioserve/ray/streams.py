"""Streams that can be resumed: each is in the replica that its name stands for."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from typing import Any
from urllib.parse import urlencode

from trioserve.api.base import sse
from trioserve.api.streams.names import ID
from trioserve.errors import NotFoundError, NotSupportedError
from trioserve.ray.calls import Answer
from trioserve.ray.incoming import Incoming, Reply, reply_of
from trioserve.ray.parts import Sent
from trioserve.ray.targets import Target, Targets, together

_PREFER = "Prefer"

#: In the query of a stream's address: the model, and the name that stands for the replica.
_AT = "at"

#: Questions that are asked at the same time.
_AT_ONCE = 16


class Streams:
    """Finds the replicas that have streams.

    Args:
        targets: the models.
        finds_replicas: whether requests with the same key get to the same replica.
    """

    def __init__(self, targets: Targets, *, finds_replicas: bool) -> None:
        self._targets = targets
        self._finds_replicas = finds_replicas or all(one.is_single for one in targets)

    async def begin(self, target: Target, request: Incoming) -> Reply:
        """Have a replica answer a request, which may make a stream to be read again."""
        name = request.headers.get(ID)
        is_for_later = "respond-async" in request.headers.get(_PREFER, "").lower()
        if request.method != "POST" or not (name or is_for_later):
            return reply_of(await self._targets.call(target, request))
        if not self._finds_replicas:
            sent = _without_names(request.sent())
            return reply_of(await self._targets.call(target, request, sent=sent))
        key = name or secrets.token_urlsafe(12)
        answer = await self._targets.call(target, request, key=key)
        return (
            await _addressed(answer, target.name, key)
            if answer.status == 202
            else (reply_of(answer))
        )

    async def by_name(self, request: Incoming) -> Reply:
        """Read or stop the stream of a conversation: whichever model has it."""
        self._check(request)
        key = request.args.get("conv_id")
        missing: Reply | None = None
        for target in self._targets:
            answer = await self._targets.call(target, request, key=key)
            if answer.status not in (204, 404):
                return reply_of(answer)
            try:
                missing = Reply(
                    status=answer.status, headers=answer.headers, body=await answer.read()
                )
            finally:
                answer.close()
        assert missing is not None
        return missing

    async def by_secret(self, request: Incoming) -> Reply:
        """Read or stop a stream by the address that its POST was given."""
        self._check(request)
        try:
            name, key = json.loads(base64.urlsafe_b64decode(request.args.get(_AT, "")))
            target = self._targets.by_name[name]
        except (ValueError, KeyError, TypeError):
            raise NotFoundError("Stream not found or expired") from None
        sent = request.sent(**{_AT: None})
        return reply_of(await self._targets.call(target, request, sent=sent, key=str(key)))

    async def lookup(self, request: Incoming) -> Reply:
        """Ask for each conversation where it would be."""
        self._check(request)
        ids = request.fields.get("conversation_ids")
        if not isinstance(ids, list) or not ids or not all(isinstance(one, str) for one in ids):
            return await self._targets.ask(self._targets.first, request)
        limit = asyncio.Semaphore(_AT_ONCE)

        async def ask(target: Target, id_: str) -> Reply:
            sent = request.sent(body=sse.encode({"conversation_ids": [id_]}).encode())
            async with limit:
                return await self._targets.ask(target, request, sent=sent, key=id_)

        found = await together(ask(target, id_) for id_ in ids for target in self._targets)
        if wrong := [reply for reply in found if reply.status != 200]:
            return wrong[0]
        merged: list[Any] = [one for reply in found for one in json.loads(reply.body)]
        return Reply(body=sse.encode(merged).encode())

    def _check(self, request: Incoming) -> None:
        if not self._finds_replicas:
            raise NotSupportedError(
                f"{request.path} needs the router of requests, which finds the replica that has a "
                "stream. This application was built with router=False."
            )


async def _addressed(answer: Answer, model: str, key: str) -> Reply:
    """Say in the address of a stream who has it."""
    try:
        body = json.loads(await answer.read())
    finally:
        answer.close()
    at = base64.urlsafe_b64encode(json.dumps([model, key]).encode()).decode()
    location = f"{body['location']}?{urlencode({_AT: at})}"
    headers = [each for each in answer.headers if each[0] not in (b"location", b"content-length")]
    return Reply(
        status=answer.status,
        headers=[*headers, (b"location", location.encode())],
        body=sse.encode({**body, "location": location}).encode(),
    )


def _without_names(sent: Sent) -> Sent:
    """Leave out what would make an answer a stream that can be read again."""
    method, target, headers, body = sent
    names = (ID.lower().encode(), _PREFER.lower().encode())
    return method, target, [each for each in headers if each[0] not in names], body
