"""`Caller`: who asks, and what belongs to the request for as long as it lasts."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from typing import Any, TypeVar

import attrs
import structlog
import trio
from werkzeug.datastructures import Headers

from trioserve.api.base.fields import MismatchError
from trioserve.api.base.readers import seconds
from trioserve.config.keys import Key, check_model
from trioserve.errors import InvalidRequestError, PermissionDeniedError
from trioserve.server.context import ANYONE, RequestContext, Tally
from trioserve.server.limits.memory import MemoryReservation
from trioserve.server.limits.rates import Remaining
from trioserve.server.model_server import ModelServer
from trioserve.types import CancelReason

_T = TypeVar("_T")

#: The header with the timeout of a request, in seconds. The field `timeout` takes precedence.
TIMEOUT_HEADER = "X-Request-Timeout"

_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", re.ASCII)


@attrs.define(kw_only=True, eq=False)
class Caller:
    """The client of one request, and what the request holds.

    Attributes:
        request_id: the id of the request, which its answer and its log lines carry.
        method: of the request.
        path: of the request, without a prefix; errors have the form of its vendor.
        address: where the client is.
        arrived: when the head of the request was read (`trio.current_time`), here or at a proxy.
        held: what the request takes of the memory that requests may have.
        api_key: the valid key that the client showed, which says who it is; empty: none was needed.
        key: what that key may do; None: none was needed.
        headers: of the request.
        limits_left: gives the remainder of the client's rate limits, once the request was counted.
        model: the name in the request's body or query, where many models are served.
        may_load: whether a model may be loaded for the request.
        wait_until: when it waits no longer for its model.
        on_wait: called with where it stands, while it waits for its model.
        servers: that it uses, by name.
        tally: what its tasks came to.
        is_told: whether what works for it in its place logs it.
        resources: what is open until the answer has been sent. The maker of a caller unwinds
            these, in the request's own task.
    """

    request_id: str
    path: str
    arrived: float
    held: MemoryReservation
    method: str = "POST"
    address: str = "-"
    api_key: str = ""
    key: Key | None = None
    headers: Headers = attrs.field(factory=Headers)
    limits_left: Callable[[], Mapping[str, Remaining]] = dict
    model: str | None = None
    may_load: bool = True
    wait_until: float = math.inf
    on_wait: Callable[[Any], None] | None = None
    servers: dict[str, ModelServer] = attrs.field(factory=dict)
    tally: Tally = attrs.field(factory=Tally)
    is_told: bool = False
    resources: AsyncExitStack = attrs.field(factory=AsyncExitStack)

    @classmethod
    def of_own(cls, held: MemoryReservation, path: str, api_key: str = "", **more: Any) -> Caller:
        """Make the caller of a request that the app asks itself, for the client with a key."""
        id_ = secrets.token_hex(12)
        structlog.contextvars.bind_contextvars(request_id=id_)
        shown = {"Authorization": f"Bearer {api_key}".encode().decode("latin-1")} if api_key else {}
        return cls(
            request_id=id_,
            path=path,
            arrived=trio.current_time(),
            held=held,
            api_key=api_key,
            headers=Headers(shown),
            **more,
        )

    # -- what belongs to the request

    async def open(self, manager: AbstractAsyncContextManager[_T]) -> _T:
        """Enter a block that ends when the answer has been sent, or cannot be."""
        return await self.resources.enter_async_context(manager)

    def enter(self, manager: AbstractContextManager[_T]) -> _T:
        """Enter such a block that needs no event loop."""
        return self.resources.enter_context(manager)

    async def keep_awake(self, server: ModelServer, context: RequestContext = ANYONE) -> None:
        """Keep the model of a server loaded until the answer is sent; see `Server.loaded`."""
        await self.open(server.loaded(context))

    # -- as the server sees it

    def context(self, timeout: float | None = None, **more: Any) -> RequestContext:
        """Make the context of the request. Its time began before its body was read.

        Args:
            timeout: in how many seconds the body says that it has to be done.
            more: other fields.

        Raises:
            InvalidRequestError: the header is not a number of seconds.
        """
        headers = self.headers
        if timeout is None and (value := headers.get(TIMEOUT_HEADER)) is not None:
            timeout = _read_timeout(value.strip())
        return RequestContext(
            self.api_key,
            deadline=math.inf if timeout is None else self.arrived + timeout,
            arrived=self.arrived,
            request_id=self.request_id,
            traceparent=headers.get("traceparent", ""),
            tracestate=headers.get("tracestate", ""),
            on_cancel=CancelReason.DISCONNECT,
            tally=self.tally,
            **more,
        )

    async def counted(
        self, server: ModelServer, timeout: float | None = None, keep_alive: float | None = None
    ) -> RequestContext:
        """Count the request for the rate limits, and make its context.

        Args:
            server: which has the limits.
            timeout: as in `context`.
            keep_alive: for how many seconds the body says that the model stays in memory.

        Raises:
            InvalidRequestError: as `context`.
            RateLimitError: the client has used up its requests for this minute.
        """
        client = self.api_key or self.address
        counted = await server.count_request(client)
        self.limits_left = counted.left
        if counted.error is not None:
            raise counted.error
        return self.context(timeout, limited_as=client, keep_alive=keep_alive)

    # -- what its key may do. Without keys, every client may do everything

    @property
    def own_name(self) -> str | None:
        """The name of the key, if it may see no other's usage; None: it may see that of all."""
        return None if self.key is None or self.key.may_manage else self.key.name

    def check_manages(self, what: str) -> None:
        """Check that the key may manage the server, which `what` does.

        Raises:
            PermissionDeniedError: it may not.
        """
        if self.key is not None and not self.key.may_manage:
            raise PermissionDeniedError(
                f"The API key {self.key.name!r} may not manage the server, as {what} does. The "
                "file of API keys gives this permission with manage = true."
            )

    def may_use(self, *names: str) -> bool:
        return self.key is None or self.key.may_use(*names)

    def check_model(self, *names: str) -> None:
        """Check that the key may use a model, which has these names.

        Raises:
            PermissionDeniedError: it may not.
        """
        check_model(self.key, *names)

    # -- its request in other hands

    def another(self, *, without: Container[str] = ()) -> Caller:
        """Make a caller for the same client, whose request lasts on its own, and lacks headers.

        It takes over the memory that this request holds.
        """
        headers = Headers([each for each in self.headers if each[0].lower() not in without])
        held, resources = self.held.detach(), AsyncExitStack()
        return attrs.evolve(self, held=held, resources=resources, headers=headers, tally=Tally())


def waited(caller: Caller) -> float:
    """Seconds since a request arrived."""
    return max(0.0, trio.current_time() - caller.arrived)


def _read_timeout(value: str) -> float:
    try:
        return seconds(float(value) if _NUMBER.fullmatch(value) else None)
    except MismatchError as error:
        raise InvalidRequestError.at(TIMEOUT_HEADER, f"must be {error.expected}.") from None
