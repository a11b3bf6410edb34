"""Calls from an ingress to the replicas of its models: waiting for one, trying another, giving up.

A request that has no answer yet loses nothing when its replica dies: another one gets it. But it
may be what the replica died of, so this happens once. One that no replica has taken may be offered
as often as there is time. What goes between the two are plain values, because Serve pickles them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import Context
from typing import Any, Protocol, TypeAlias
from weakref import WeakValueDictionary

import attrs

from trioserve.api.base.reply import Data
from trioserve.api.router import proxy
from trioserve.config import Config
from trioserve.errors import ModelFailedError, ModelProcessError, TrioServeError, UnknownModelError
from trioserve.models.catalog import ModelEntry, Source
from trioserve.models.catalog.catalog import find_named
from trioserve.ray.incoming import IngressRequest, Sent
from trioserve.ray.prefix_affinity import RoutingHint, hint_of
from trioserve.whole_numbers import whole_number

#: A part of an answer: a piece of the body, or a tuple that begins with one of the words below.
Part: TypeAlias = bytes | tuple[Any, ...]

#: The replica has the request: a delay is not for lack of a replica.
TAKEN = "taken"

#: The status, the headers, and the beginning of the body.
HEAD = "head"

#: The child did not get the request; it has ended, or is about to.
UNSENT = "unsent"

#: The child has ended before the answer did.
LOST = "lost"


#: The routers of requests in this process, by the names of their deployments. Serve pickles their
#: module by value, so it must reach this through `calls`: a global variable there would be a copy.
routers: WeakValueDictionary[str, Any] = WeakValueDictionary()


def replicas_of(deployment: str) -> list[str]:
    """The names of a deployment's replicas that a router in this process has seen.

    A router is made when the deployment is first called.
    """
    router = routers.get(deployment)
    return [] if router is None else sorted(one.unique_id for one in router.curr_replicas)


_log = logging.getLogger("ray.serve")

#: Replicas that may die while they have a request.
_MAX_LOST = 2

#: Seconds until a request is offered again that a replica could not take.
_PAUSE = 0.1

#: Seconds after which a client may try again when no replica is there.
_RETRY_AFTER = 5.0


class NoReplicaError(ModelFailedError):
    """No replica of the model takes requests."""

    code = "no_replica"


class ResponseParts(Protocol):
    """The parts of an answer, as Serve's handle gives them."""

    async def __anext__(self) -> Part:
        """Wait for the next part."""

    def cancel(self) -> None:
        """End the call. Does nothing once it has ended."""


@attrs.frozen(kw_only=True)
class ModelTarget:
    """A model, as an ingress knows it, and the exceptions of Ray that a call of it may raise.

    Attributes:
        name: its name.
        aliases: its other names.
        is_single: whether it never has more than one replica.
        call: calls the replica that Serve's router chooses.
        lost: the exceptions when the replica is lost.
        absent: those when there will be none.
        replicas: gives the names of the replicas, as far as they are known.
    """

    name: str
    aliases: tuple[str, ...] = ()
    is_single: bool
    call: Callable[[Sent, RoutingHint], ResponseParts]
    lost: tuple[type[Exception], ...]
    absent: tuple[type[Exception], ...]
    replicas: Callable[[], Sequence[str]]


@attrs.define(kw_only=True, eq=False)
class ReplicaReply(Data):
    """What a replica answers: `body` is the beginning of the body."""

    parts: ResponseParts
    lost: tuple[type[Exception], ...]

    @property
    def is_whole(self) -> bool:
        """Whether the reply has its whole body."""
        length = whole_number(self.headers.get("content-length", ""), most=len(self.body))
        return length is not None

    async def receive(self) -> bytes:
        """Wait for more of the body. Empty at the end.

        Raises:
            ModelProcessError: the replica, or its child, has ended before.
        """
        part = await _next(self.parts, self.lost)
        if isinstance(part, tuple):
            raise ModelProcessError
        return part or b""

    async def whole(self) -> Data:
        """Wait for the whole body, and end the call. Raises ModelProcessError."""
        whole = [self.body]
        try:
            while part := await self.receive():
                whole.append(part)
        finally:
            self.close()
        return Data(
            body=b"".join(whole),
            status=self.status,
            headers=self.headers,
            content_type=self.content_type,
        )

    def close(self) -> None:
        """End the call, if it has not ended: the replica cancels the request."""
        self.parts.cancel()


async def call(
    target: ModelTarget, sent: Sent, hint: RoutingHint, *, patience: float
) -> ReplicaReply:
    """Have a replica answer a request. The caller closes the reply.

    Args:
        target: the model.
        sent: the request.
        hint: for the router of requests.
        patience: seconds in which a replica has to take it.

    Raises:
        NoReplicaError: none has.
        ModelProcessError: those that had it have died.
    """
    loop = asyncio.get_running_loop()
    give_up = loop.time() + patience
    n_lost = 0
    while True:
        response = target.call(sent, hint)
        is_taken = False
        head: Any = None
        try:
            async with asyncio.timeout_at(give_up):
                await _next(response, target.lost)
            is_taken = True
            head = await _next(response, target.lost)
        except TimeoutError:
            raise _no_replica(target.name) from None
        except ModelProcessError as error:
            if isinstance(error.__cause__, target.absent):
                raise _no_replica(target.name) from error.__cause__
            _log.warning("a replica of %r is lost: %r", target.name, error.__cause__)
        finally:
            if not head or head[0] != HEAD:
                response.cancel()
        if head and head[0] == HEAD:
            _, status, given, body = head
            headers, kind = proxy.head_of(given)
            return ReplicaReply(
                status=status,
                headers=headers,
                content_type=kind,
                body=body,
                parts=response,
                lost=target.lost,
            )
        n_lost += is_taken and head != (UNSENT,)
        if n_lost == _MAX_LOST:
            raise ModelProcessError
        await asyncio.sleep(_PAUSE)
        if loop.time() >= give_up:
            raise _no_replica(target.name)


async def _next(response: ResponseParts, lost: tuple[type[Exception], ...]) -> Part | None:
    """Wait for the next part; None: there is none.

    Raises:
        ModelProcessError: the replica is lost; its cause says how.
    """
    try:
        return await response.__anext__()
    except StopAsyncIteration:
        return None
    except lost as error:
        raise ModelProcessError from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ModelProcessError from error  # the replica was, not we


def _no_replica(model: str) -> NoReplicaError:
    """The error when no replica of a model answers."""
    return NoReplicaError(
        f"No replica of the model {model!r} takes requests now.", retry_after=_RETRY_AFTER
    )


#: Questions that are asked at the same time.
_AT_ONCE = 64

#: The same for all models, so that any of them may answer, unless the query names one.
_OF_ANY = frozenset(
    {"/", "/api/version", "/cors-proxy", "/licenses.txt", "/openapi.json", "/sw.js", "/tools"}
)


class NoSuchModelError(UnknownModelError):
    """There is no model of the name in the request, and none may be loaded."""

    status = 404


class Targets:
    """The models of an application.

    Args:
        config: the settings for clients that do not depend on the model.
        targets: the models.
        patience: seconds that a request waits for a replica to take it.
    """

    def __init__(self, config: Config, targets: Sequence[ModelTarget], *, patience: float) -> None:
        self._config = config
        self._patience = patience
        self._by_name = {one.name: one for one in targets}
        self._entries = {one.name: _entry(one) for one in targets}

    def __iter__(self) -> Iterator[ModelTarget]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def first(self) -> ModelTarget:
        """The one that was named first."""
        return next(iter(self))

    @property
    def by_name(self) -> Mapping[str, ModelTarget]:
        """The models by their names, without the other ones."""
        return self._by_name

    def of(self, request: IngressRequest) -> ModelTarget:
        """Find the model of a request. With one model, its name does not matter.

        Raises:
            NoSuchModelError: there is none of the name.
            AmbiguousModelError: the name may mean several.
        """
        path = request.path
        of_any = path in _OF_ANY and not request.query.get("model")
        if len(self) == 1 or of_any or path.startswith("/assets/"):
            return self.first
        name = request.model
        for prefix in ("/v1/models/", "/models/"):
            if path.startswith(prefix):
                name = path.removeprefix(prefix)
        config = self._config
        try:
            found = find_named(self._entries, name, config.models_match, config.models_default)
        except UnknownModelError as error:
            raise NoSuchModelError(error.message, param="model") from None
        return self._by_name[found.name]

    async def call(
        self,
        target: ModelTarget,
        request: IngressRequest,
        *,
        sent: Sent | None = None,
        key: str | None = None,
        patience: float | None = None,
    ) -> ReplicaReply:
        """Have a replica answer a request. The caller closes the reply.

        Args:
            target: the model.
            request: what is asked.
            sent: what to send in place of the request.
            key: a name that stands for a replica, or the name of one.
            patience: seconds in which a replica has to take it, in place of the common number.

        Raises:
            TrioServeError: no replica can answer it.
        """
        hint = hint_of(request.given, request.route.prompt_fields, key)
        patience = self._patience if patience is None else patience
        return await call(target, sent or request.sent(), hint, patience=patience)

    async def ask(self, target: ModelTarget, request: IngressRequest, **options: Any) -> Data:
        """Like `call`, for an answer that is received as a whole."""
        return await (await self.call(target, request, **options)).whole()


async def at_once(calls: Iterable[Callable[[], Awaitable[Data]]]) -> list[Data | TrioServeError]:
    """Ask at the same time; returns the answers, or errors, in the order of the calls.

    Each call has a separate context. Serve identifies a call by the request in its context, so one
    of two calls to the same deployment would never get a replica.
    """
    limit = asyncio.Semaphore(_AT_ONCE)

    async def ask(call: Callable[[], Awaitable[Data]]) -> Data | TrioServeError:
        try:
            async with limit:
                return await call()
        except TrioServeError as error:
            return error

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(each), context=Context()) for each in calls]
    return [task.result() for task in tasks]


def _entry(target: ModelTarget) -> ModelEntry:
    """What finds a model by a name."""
    return ModelEntry(
        name=target.name, source=Source.PRESET, args=(), path=None, aliases=target.aliases
    )
