"""Where a request goes: to a replica of its model, to all models, or to the one that knows a state.

Only what concerns several models or replicas is answered here. All else goes to a child as it came.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from trioserve.api.base import sse
from trioserve.api.base.writers import FINGERPRINT
from trioserve.config import Config
from trioserve.errors import TrioServeError
from trioserve.ray.every import EveryReplica
from trioserve.ray.incoming import Incoming, Reply
from trioserve.ray.streams import Streams
from trioserve.ray.targets import Target, Targets, together

#: Answers a request.
Handler: TypeAlias = Callable[[Incoming], Awaitable[Reply]]

#: Lists that every model's server has one of.
_LISTS = ("/models", "/v1/models", "/api/tags", "/api/ps")

#: Paths about a call of a tool in an answer.
_OF_CALLS = re.compile(r"/v1/(chat/completions|responses)/[^/]+/(approve|stop)")

#: Seconds that a list waits for a replica of a model.
_LIST_PATIENCE = 2.0

_READS = ("GET", "HEAD")


class Routes:
    """Has requests answered.

    Args:
        config: what clients see, whatever the model.
        targets: the models.
        finds_replicas: whether requests with the same key get to the same replica.
    """

    def __init__(self, config: Config, targets: Targets, *, finds_replicas: bool) -> None:
        self._config = config
        self._targets = targets
        self._streams = Streams(targets, finds_replicas=finds_replicas)
        every = EveryReplica(targets, has_metrics=config.metrics_endpoint)
        reads: Mapping[str, Handler] = {
            "/health": self._ready,
            "/v1/health": self._ready,
            "/health/ready": self._ready,
            "/health/live": self._live,
            "/metrics": every.metrics,
            "/props": self._props,
            "/slots": every.slots,
            "/v1/metrics": every.snapshot,
            "/v1/stream": self._streams.by_name,
            **dict.fromkeys(_LISTS, self._list),
        }
        self._own: Mapping[tuple[str, str], Handler] = {
            **{(method, path): handler for path, handler in reads.items() for method in _READS},
            ("DELETE", "/v1/stream"): self._streams.by_name,
            ("POST", "/v1/streams/lookup"): self._streams.lookup,
            ("POST", "/lora-adapters"): every.all,
            ("POST", "/props"): every.all,
            ("POST", "/v1/chat/completions/control"): every.owner,
        }
        self._owner = every.owner
        self._below: Mapping[str, Handler] = {
            "/slots/": every.one,
            "/v1/stream/": self._streams.by_secret,
        }

    async def answer(self, request: Incoming) -> Reply:
        """Answer a request. Whoever gets the reply has to close the call that it is from.

        Raises:
            TrioServeError: the request is wrong, or nobody can answer it.
        """
        handler = self._own.get((request.method, request.path))
        for prefix, below in self._below.items():
            if request.path.startswith(prefix):
                handler = below
        if request.method == "POST" and _OF_CALLS.fullmatch(request.path):
            handler = self._owner
        if handler is not None:
            return await handler(request)
        return await self._streams.begin(self._targets.of(request), request)

    async def _each(self, request: Incoming) -> Mapping[str, Reply | TrioServeError]:
        """Ask a replica of each model; gives the answers, or what went wrong."""

        async def ask(target: Target) -> Reply | TrioServeError:
            try:
                return await self._targets.ask(target, request, patience=_LIST_PATIENCE)
            except TrioServeError as error:
                return error

        found = await together(map(ask, self._targets))
        return dict(zip(self._targets.by_name, found, strict=True))

    async def _list(self, request: Incoming) -> Reply:
        """Merge the lists of all models. One without a replica is there with its name alone."""
        merged: dict[str, Any] = {}
        for name, found in (await self._each(request)).items():
            if isinstance(found, TrioServeError):
                listed: Mapping[str, Any] = _listed(name)
            elif found.status != 200 or request.method == "HEAD":
                return found
            else:
                listed = json.loads(found.body)
            for field, value in listed.items():
                merged[field] = [*merged.get(field, ()), *value] if type(value) is list else value
        if "data" in merged:  # one page, in the words of Anthropic's API
            first, last = merged["data"][0]["id"], merged["data"][-1]["id"]
            merged |= {"has_more": False, "first_id": first, "last_id": last}
        return Reply(body=sse.encode(merged).encode())

    async def _ready(self, request: Incoming) -> Reply:
        """Say whether any model can be used; if none can, why the first one cannot."""
        found = list((await self._each(request)).values())
        replies = [each for each in found if isinstance(each, Reply)]
        if isinstance(found[0], TrioServeError) and not replies:
            raise found[0]
        return next((each for each in replies if each.status == 200), replies[0])

    async def _live(self, request: Incoming) -> Reply:
        """Say that the ingress lives. Serve looks after the replicas."""
        return Reply(body=b'{"status":"ok"}')

    async def _props(self, request: Incoming) -> Reply:
        """Describe the model, or several as a router does."""
        if len(self._targets) == 1 or request.args.get("model"):
            return await self._targets.ask(self._targets.of(request), request)
        described = {
            "role": "router",
            "max_instances": len(self._targets),
            "models_autoload": False,
            "model_alias": "trioserve",
            "model_path": "none",
            "default_generation_settings": {"params": {}, "n_ctx": 0},
            "ui_settings": self._config.ui_settings,
            "build_info": FINGERPRINT,
            "is_sleeping": False,
            "endpoint_tools": self._config.has_tools,
            "cors_proxy_enabled": self._config.has_mcp_proxy,
        }
        return Reply(body=sse.encode(described).encode())


def _listed(name: str) -> Mapping[str, Any]:
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
