"""Calls from an ingress to the replicas of a model: waiting for one, trying another, giving up.

A request that has no answer yet loses nothing when its replica dies: another one gets it. But it
may be what the replica died of, so this happens once. One that no replica has taken may be offered
as often as there is time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

import attrs

from trioserve.errors import ModelFailedError, ModelProcessError
from trioserve.ray.parts import HEAD, UNSENT, Part, Sent
from trioserve.ray.prefixes import RoutingHint

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


class Response(Protocol):
    """The parts of an answer, as Serve's handle gives them."""

    async def __anext__(self) -> Part:
        """Wait for the next part."""

    def cancel(self) -> None:
        """End the call. Does nothing once it has ended."""


@attrs.frozen(kw_only=True)
class Handle:
    """What calls a replica of a model, and the exceptions of Ray that a call may raise.

    Attributes:
        model: the name of the model.
        call: calls the replica that Serve's router chooses.
        lost: the exceptions when the replica is lost.
        absent: those when there will be none.
        replicas: gives the names of the replicas, as far as they are known.
    """

    model: str
    call: Callable[[Sent, RoutingHint], Response]
    lost: tuple[type[Exception], ...]
    absent: tuple[type[Exception], ...]
    replicas: Callable[[], Sequence[str]]


class Answer:
    """The answer to a call. Made by `call`.

    `status`, `headers` and `body`, which is the beginning of the body, are there from the start.
    """

    def __init__(self, handle: Handle, response: Response, head: Sequence[Any]) -> None:
        self.status: int = head[1]
        self.headers: Sequence[tuple[bytes, bytes]] = head[2]
        self.body: bytes = head[3]
        self._lost = handle.lost
        self._response = response

    def header(self, name: bytes) -> bytes:
        """The value of a header; empty when there is none."""
        return next((value for each, value in self.headers if each == name), b"")

    async def rest(self) -> AsyncGenerator[bytes, None]:
        """What follows of the body, as it comes.

        Raises:
            ModelProcessError: the replica, or its child, has ended before.
        """
        while (part := await _next(self._response, self._lost)) is not None:
            if isinstance(part, tuple):
                raise ModelProcessError
            yield part

    async def read(self) -> bytes:
        """Wait for the whole body. Raises ModelProcessError."""
        return b"".join([self.body, *[part async for part in self.rest()]])

    def close(self) -> None:
        """End the call, if it has not ended: the replica cancels the request."""
        self._response.cancel()


async def call(handle: Handle, sent: Sent, hint: RoutingHint, *, patience: float) -> Answer:
    """Have a replica answer a request. Whoever gets the answer has to close it.

    Args:
        handle: what calls the replicas of the model.
        sent: the request.
        hint: what the router of requests knows of it.
        patience: seconds in which a replica has to take it.

    Raises:
        NoReplicaError: none has.
        ModelProcessError: those that had it have died.
    """
    loop = asyncio.get_running_loop()
    give_up = loop.time() + patience
    n_lost = 0
    while True:
        response = handle.call(sent, hint)
        is_taken = False
        head: Any = None
        try:
            async with asyncio.timeout_at(give_up):
                await _next(response, handle.lost)
            is_taken = True
            head = await _next(response, handle.lost)
        except TimeoutError:
            raise _nobody(handle.model) from None
        except ModelProcessError as error:
            if isinstance(error.__cause__, handle.absent):
                raise _nobody(handle.model) from error.__cause__
            _log.warning("a replica of %r is lost: %r", handle.model, error.__cause__)
        finally:
            if not head or head[0] != HEAD:
                response.cancel()
        if head and head[0] == HEAD:
            return Answer(handle, response, head)
        n_lost += is_taken and head != (UNSENT,)
        if n_lost == _MAX_LOST:
            raise ModelProcessError
        await asyncio.sleep(_PAUSE)
        if loop.time() >= give_up:
            raise _nobody(handle.model)


async def _next(response: Response, lost: tuple[type[Exception], ...]) -> Part | None:
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


def _nobody(model: str) -> NoReplicaError:
    """The error when nobody answers for a model."""
    return NoReplicaError(
        f"No replica of the model {model!r} takes requests now.", retry_after=_RETRY_AFTER
    )
