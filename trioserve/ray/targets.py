"""The models that an ingress knows, and calls to their replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextvars import Context
from typing import Any, TypedDict, TypeVar, Unpack

import attrs

from trioserve.config import Config
from trioserve.errors import TrioServeError, UnknownModelError
from trioserve.models.catalog import ModelEntry, Source
from trioserve.models.catalog.names import find
from trioserve.ray.calls import Answer, Handle, call
from trioserve.ray.incoming import Incoming, Reply
from trioserve.ray.parts import Sent
from trioserve.ray.prefixes import hint_of

_T = TypeVar("_T")

#: The same for all models, so that any of them may answer, unless the query names one.
_OF_ANY = frozenset(
    {"/", "/openapi.json", "/api/version", "/licenses.txt", "/sw.js", "/tools", "/cors-proxy"}
)


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


class Options(TypedDict, total=False):
    """How a replica is to be called.

    Attributes:
        sent: what to send in place of the request.
        key: a name that stands for a replica, or the name of one.
        patience: seconds in which a replica has to take it, in place of the common number.
    """

    sent: Sent | None
    key: str | None
    patience: float


class Targets:
    """The models of an application.

    Args:
        config: what clients see, whatever the model.
        targets: the models.
        patience: seconds that a request waits for a replica to take it.
    """

    def __init__(self, config: Config, targets: Sequence[Target], *, patience: float) -> None:
        self._config = config
        self._patience = patience
        self._by_name = {one.name: one for one in targets}
        self._entries = {one.name: _entry(one) for one in targets}

    def __iter__(self) -> Iterator[Target]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def first(self) -> Target:
        """The one that was named first."""
        return next(iter(self))

    @property
    def by_name(self) -> Mapping[str, Target]:
        """The models by their names, without the other ones."""
        return self._by_name

    def of(self, request: Incoming) -> Target:
        """Find the model of a request. With one model, its name does not matter.

        Raises:
            NoSuchModelError: there is none of the name.
            AmbiguousModelError: the name may mean several.
        """
        path = request.path
        of_any = path in _OF_ANY and not request.args.get("model")
        if len(self) == 1 or of_any or path.startswith("/assets/"):
            return self.first
        name = request.model
        for prefix in ("/v1/models/", "/models/"):
            if path.startswith(prefix):
                name = path.removeprefix(prefix)
        config = self._config
        try:
            found = find(self._entries, name, config.models_match, config.models_default)
        except UnknownModelError as error:
            raise NoSuchModelError(error.message, param="model") from None
        return self._by_name[found.name]

    async def call(self, target: Target, request: Incoming, **options: Unpack[Options]) -> Answer:
        """Have a replica answer a request. Whoever gets the answer has to close it.

        Raises:
            TrioServeError: nobody can answer it.
        """
        hint = hint_of(request.path, request.fields, options.get("key"))
        sent = options.get("sent") or request.sent()
        patience = options.get("patience", self._patience)
        return await call(target.handle, sent, hint, patience=patience)

    async def ask(self, target: Target, request: Incoming, **options: Unpack[Options]) -> Reply:
        """Like `call`, for an answer that is received as a whole."""
        answer = await self.call(target, request, **options)
        try:
            return Reply(status=answer.status, headers=answer.headers, body=await answer.read())
        finally:
            answer.close()


async def together(calls: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Wait for several calls at the same time, and return what they return.

    Each has a context of its own: what Serve keeps there tells calls apart by the request that they
    are made for, so that of two to the same deployment one would never get a replica.

    Raises:
        TrioServeError: one has failed, and the others were cancelled.
    """
    failures: list[TrioServeError] = []
    tasks: list[asyncio.Task[_T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each, context=Context()) for each in calls]
    except* TrioServeError as errors:
        failures += [each for each in errors.exceptions if isinstance(each, TrioServeError)]
    if failures:
        raise failures[0]
    return [task.result() for task in tasks]


def _entry(target: Target) -> ModelEntry:
    """What finds a model by a name."""
    return ModelEntry(
        name=target.name, source=Source.PRESET, args=(), path=None, aliases=target.aliases
    )
