"""A replica: an actor of Ray with a child that has the model, and requests on their way to it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, Awaitable
from contextlib import ExitStack, suppress
from typing import Any

import attrs

from trioserve.config import Config
from trioserve.config.parse import argv_of
from trioserve.errors import ModelProcessError
from trioserve.models import BUNDLED
from trioserve.models.catalog.options import environment_of_children
from trioserve.ray.child import Child
from trioserve.ray.exchange import Answer, exchange
from trioserve.ray.lifelines import Address, Lifelines
from trioserve.ray.parts import HEAD, LOST, TAKEN, UNSENT, Part, Sent
from trioserve.router.folder import socket_folder
from trioserve.router.wire import NotTakenError, Outgoing

_log = logging.getLogger("ray.serve")

#: Bodies up to this length (bytes) come with the head.
_SHORT = 2**20

#: Seconds between the end of the child and that of the replica: what the child has sent last, and
#: the errors of its requests, leave in between.
_FAREWELL = 0.5

#: Seconds that a look at the child's cache may take.
_LOOK_TIMEOUT = 1.0

#: Times in a row that a child may fail to answer.
_MAX_MISSED = 2


class Replica:
    """The deployment of one model. It ends with its child, and the child ends with it.

    Args:
        config: what its server is to serve.

    Raises:
        ModelLoadError: the model cannot be loaded.
    """

    _is_closed = True  # until there is a child

    async def __init__(self, config: Config) -> None:  # type: ignore[misc]
        self._config = config
        self._closing = ExitStack()
        self._n_running = 0
        self._n_missed = 0
        self._lifelines = Lifelines()
        folder = self._closing.enter_context(socket_folder())
        self._child = Child(
            folder / "model.sock", child_argv(config), environment_of_children(os.environ, config)
        )
        try:
            await self._child.start()
        except BaseException:
            self._closing.close()
            raise
        self._is_closed = False
        self._watching = asyncio.create_task(self._end_with_child())

    async def forward(
        self, sent: Sent, hint: object = None, ingress: Address | None = None
    ) -> AsyncGenerator[Part, None]:
        """Have the child answer a request, and pass that on as it comes.

        At first comes that it was taken; then the head with the body's beginning, and the rest of
        it. When the child ends, the last part says so. Leaving the generator closes the connection
        to the child, which cancels the request.

        Args:
            sent: the request.
            hint: for the router of requests, which chose this replica by it.
            ingress: whose end is the end of the request.
        """
        yield (TAKEN,)
        self._n_running += 1
        try:
            held = self._lifelines.of(ingress)
            async with exchange(self._child.socket_path, Outgoing(*sent), held) as answer:
                body = await answer.receive_all() if _is_short(answer) else answer.take()
                yield (HEAD, answer.status, answer.headers, body)
                while part := await answer.receive():
                    yield part
        except NotTakenError:
            yield (UNSENT,)
        except ModelProcessError:
            yield (LOST,)
        finally:
            self._n_running -= 1

    # -- what Serve asks

    async def check_health(self) -> None:
        """Raise if the child cannot answer. One that does not for too long is killed.

        Raises:
            ModelProcessError: what is wrong with it.
        """
        problem = await self._child.problem()
        self._n_missed = self._n_missed + 1 if problem else 0
        if self._n_missed >= _MAX_MISSED:
            _log.error("the server of the model is killed: %s", problem)
            self._child.kill()
        if problem:
            raise ModelProcessError(problem)

    async def record_routing_stats(self) -> dict[str, float]:
        """Tell the router of requests how full this replica is."""
        slots = self._config.parallel
        running = min(self._n_running, slots)
        stats: dict[str, float] = {
            "slots": slots,
            "running": running,
            "waiting": self._n_running - running,
        }
        with suppress(ModelProcessError, TimeoutError):  # as in a long step
            stats["kv"] = await self._kv_in_use()
        return stats

    async def _kv_in_use(self) -> float:
        """Ask the child for the share of the KV cache that running requests use."""
        request = Outgoing("GET", "/v1/metrics", self._key())
        async with (
            asyncio.timeout(_LOOK_TIMEOUT),
            exchange(self._child.socket_path, request) as answer,
        ):
            cells = json.loads(await answer.receive_all())["kv_cache"]
        return float(cells["running"] / cells["cells"]) if cells["cells"] else 0.0

    def _key(self) -> list[tuple[bytes, bytes]]:
        """What opens the child's routes to us."""
        keys = self._config.api_keys
        return [(b"x-api-key", keys[0].encode())] if keys else []

    def __del__(self) -> Awaitable[None] | None:
        """Have the child finish and end, in what is returned, which Serve awaits.

        Serve calls this once no requests are left, or they have taken too long. When Python itself
        calls it, there is nothing left to do.
        """
        return None if self._is_closed else self.close()

    async def close(self) -> None:
        """Have the child finish and end."""
        self._is_closed = True
        self._watching.cancel()
        self._lifelines.close()
        await self._child.stop(self._config.drain_timeout)
        self._closing.close()

    async def _end_with_child(self) -> None:
        """End this process when the child has, so that Serve starts another replica."""
        await self._child.ended.wait()
        self._is_closed = True
        _log.error("the replica ends: %s", self._child.last_words())
        await asyncio.sleep(_FAREWELL)
        self._closing.close()
        os._exit(1)


def child_argv(config: Config) -> tuple[str, ...]:
    """The flags of a child. What others must not see goes into its environment instead.

    Its replica reads its metrics, whether or not clients may.
    """
    hidden: dict[str, Any] = {"api_keys": (), "api_key_weights": (), "api_key_priority": ()}
    hidden |= {"hf_token": None, "mcp_servers_json": None}
    config = attrs.evolve(config, **hidden, metrics_endpoint=True)
    words = argv_of(config)
    return words if config.model_named is not None else (*words, "--model", str(BUNDLED))


def _is_short(answer: Answer) -> bool:
    """Whether an answer is to be passed on in one piece."""
    return 0 < int(answer.header(b"content-length") or 0) <= _SHORT
