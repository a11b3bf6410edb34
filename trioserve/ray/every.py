"""Routes about what every replica has of its own: slots, adapters, metrics, running answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from trioserve.api.base import sse
from trioserve.api.base.registry import is_unknown
from trioserve.api.router.scrape import label, merged
from trioserve.errors import NotFoundError, NotSupportedError, TrioServeError
from trioserve.ray.incoming import Incoming, Reply, reply_of
from trioserve.ray.parts import Sent
from trioserve.ray.targets import Target, Targets, together

#: In a query: the name of the replica that is meant.
_REPLICA = "replica"

#: Seconds in which each has to take a question.
_PATIENCE = 5.0

#: A request that costs nothing.
_ANYTHING: Sent = ("GET", "/health/live", (), b"")

_TEXT = ((b"content-type", b"text/plain; version=0.0.4; charset=utf-8"),)


class EveryReplica:
    """Asks all replicas of a model, or the one that the query names.

    Args:
        targets: the models.
        has_metrics: whether clients may see the metrics.
    """

    def __init__(self, targets: Targets, *, has_metrics: bool) -> None:
        self._targets = targets
        self._has_metrics = has_metrics

    async def one(self, request: Incoming) -> Reply:
        """Have the replica that is named answer, or the only one.

        Raises:
            NotFoundError: there is none of the name.
            NotSupportedError: it is not said which.
        """
        target = self._targets.of(request)
        name = request.args.get(_REPLICA)
        if name is None and not target.is_single:
            raise NotSupportedError(
                f"{request.path} is about the state of one server, and the model {target.name!r} "
                f"is served by several. Name one with ?{_REPLICA}=; GET /slots lists them."
            )
        if name is not None and name not in await self._names(target, request):
            raise NotFoundError(f"There is no replica {name!r}.", param=_REPLICA)
        sent = request.sent(**{_REPLICA: None})
        return reply_of(await self._targets.call(target, request, sent=sent, key=name))

    async def slots(self, request: Incoming) -> Reply:
        """List the slots of all replicas, each with the name of its replica."""
        target = self._targets.of(request)
        if target.is_single or request.args.get(_REPLICA):
            return await self.one(request)
        listed = []
        for name, reply in await self._ask(target, request):
            if reply.status != 200:
                return reply
            listed += [{**slot, _REPLICA: name} for slot in json.loads(reply.body)]
        return Reply(body=sse.encode(listed).encode())

    async def all(self, request: Incoming) -> Reply:
        """Have all replicas do something; gives the first answer that is an error, or any."""
        target = self._targets.of(request)
        if target.is_single or request.args.get(_REPLICA):
            return await self.one(request)
        replies = [reply for _, reply in await self._ask(target, request)]
        return next((reply for reply in replies if reply.status >= 400), replies[0])

    async def owner(self, request: Incoming) -> Reply:
        """Ask all replicas for the one that gives an answer: of one model, or of all."""
        targets = [self._targets.of(request)] if request.model else list(self._targets)
        replies = [reply for one in targets for _, reply in await self._ask(one, request)]
        return next(
            (reply for reply in replies if not is_unknown(reply.status, reply.body)), replies[0]
        )

    async def metrics(self, request: Incoming) -> Reply:
        """Write the metrics of all replicas of one model, or of all, each with its labels."""
        texts = []
        for target in self._measured(request):
            for name, reply in await self._ask(target, request):
                if reply.status != 200:
                    return reply
                labels = ",".join((label("model_name", target.name), label(_REPLICA, name)))
                texts.append((labels, reply.body.decode()))
        return Reply(headers=_TEXT, body=merged(texts).encode())

    async def snapshot(self, request: Incoming) -> Reply:
        """Gather the snapshots of all replicas of one model, or of all."""
        models = {}
        for target in self._measured(request):
            replies = await self._ask(target, request)
            if wrong := [reply for _, reply in replies if reply.status != 200]:
                return wrong[0]
            models[target.name] = {name: json.loads(reply.body) for name, reply in replies}
        return Reply(body=sse.encode({"object": "metrics", "models": models}).encode())

    def _measured(self, request: Incoming) -> Iterable[Target]:
        """The models whose metrics are asked for. Raises NotSupportedError: there are none."""
        if not self._has_metrics:
            raise NotSupportedError(
                "This server does not support metrics endpoint. Start it with `--metrics`"
            )
        return [self._targets.of(request)] if request.args.get("model") else self._targets

    async def _ask(self, target: Target, request: Incoming) -> Sequence[tuple[str, Reply]]:
        """Ask all replicas of a model; gives their names and answers.

        One that is lost meanwhile is left out, unless it is the last.

        Raises:
            TrioServeError: none answers.
        """

        async def ask(name: str) -> Reply | TrioServeError:
            try:
                return await self._targets.ask(
                    target, request, key=name or None, patience=_PATIENCE
                )
            except TrioServeError as error:
                return error

        names = await self._names(target, request)
        found = await together(map(ask, names))
        replies = [
            (name, one)
            for name, one in zip(names, found, strict=True)
            if not isinstance(one, TrioServeError)
        ]
        errors = [one for one in found if isinstance(one, TrioServeError)]
        if not replies and errors:
            raise errors[0]
        return replies

    async def _names(self, target: Target, request: Incoming) -> Sequence[str]:
        """The names of the replicas of a model. The only one may have none.

        Raises:
            NotSupportedError: nobody knows them.
        """
        if not target.handle.replicas():  # nothing was asked of any yet
            await self._targets.ask(target, request, sent=_ANYTHING)
        names = target.handle.replicas()
        if not names and not target.is_single:
            raise NotSupportedError(
                f"{request.path} needs the router of requests, which knows the replicas. This "
                "application was built with router=False."
            )
        return names or ("",)
