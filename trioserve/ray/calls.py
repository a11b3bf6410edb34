"""Calls from an ingress to the replicas of a model: waiting for one, trying another, giving up.

A request that has no answer yet loses nothing when its replica dies: another one gets it. But it
may be what the replica died of, so this happens once. One that no replica has taken may be offered
as often as there is time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

from trioserve.errors import ModelFailedError, ModelProcessError
from trioserve.ray.prefixes import RoutingHint
from trioserve.ray.replica import HEAD, LOST, UNSENT, Sent

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


class Answer:
    """The answer to a call. Made by `call`.

    `status`, `headers` and `body`, which is the beginning of the body, are there from the start,
    and `replica` is who gives it.
    """

    def __init__(self, response: Any, replica: str, head: Sequence[Any]) -> None:
        self.replica = replica
        self.status: int = head[1]
        self.headers: Sequence[tuple[bytes, bytes]] = head[2]
        self.body: bytes = head[3]
        self._response = response

    def header(self, name: bytes) -> bytes:
        """The value of a header; empty when there is none."""
        return next((value for each, value in self.headers if each == name), b"")

    async def rest(self) -> AsyncGenerator[bytes, None]:
        """What follows of the body, as it comes.

        Raises:
            ModelProcessError: the replica, or its child, has ended before.
        """
        try:
            async for part in self._response:
                if isinstance(part, tuple):
                    raise ModelProcessError
                yield part
        except (RayError, RayServeException) as error:
            raise ModelProcessError from error

    async def read(self) -> bytes:
        """Wait for the whole body. Raises ModelProcessError."""
        return b"".join([self.body, *[part async for part in self.rest()]])

    def close(self) -> None:
        """End the call, if it has not ended: the replica cancels the request."""
        self._response.cancel()


async def call(
    handle: Any, model: str, sent: Sent, hint: RoutingHint, *, patience: float
) -> Answer:
    """Have a replica answer a request. Whoever gets the answer has to close it.

    Args:
        handle: Serve's handle of the model's deployment.
        model: its name, for errors.
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
        response = handle.options(stream=True).forward.remote(sent, hint)
        replica, head = "", (UNSENT,)
        try:
            async with asyncio.timeout_at(give_up):
                _, replica = await anext(response)
            head = await anext(response)
        except TimeoutError:
            raise nobody(model) from None
        except DeploymentUnavailableError as error:
            raise nobody(model) from error
        except (RayServeException, RayError, StopAsyncIteration) as error:
            _log.warning("a replica of %r is lost: %r", model, error)
            head = (LOST,) if replica else head
        finally:
            if head[0] != HEAD:
                response.cancel()
        if head[0] == HEAD:
            return Answer(response, replica, head)
        n_lost += head[0] == LOST
        if n_lost == _MAX_LOST:
            raise ModelProcessError
        await asyncio.sleep(_PAUSE)
        if loop.time() >= give_up:
            raise nobody(model)


def nobody(model: str) -> NoReplicaError:
    """The error when nobody answers for a model."""
    return NoReplicaError(
        f"No replica of the model {model!r} takes requests now.", retry_after=_RETRY_AFTER
    )
