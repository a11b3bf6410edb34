"""The router of requests that Serve has in each ingress: to where a prompt's beginning is cached.

What it decides is in `trioserve.ray.prefix_affinity`; here is what it takes from Serve.
`RequestRouter` is an alpha interface, so little of it is used.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import RequestRouter

from trioserve.ray import replicas as known
from trioserve.ray.prefix_affinity import PrefixAffinity

_log = logging.getLogger("ray.serve")


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray is not there when types are checked
    """Sends a request to where its beginning is cached, unless that replica is clearly fuller.

    A request has an argument with the attributes of a `RoutingHint`; without one it goes to the
    less full of two replicas. Replicas may say how full they are, in ``record_routing_stats``:
    ``slots``, ``running`` and ``waiting`` requests, and ``kv``, the share of the KV cache in use.
    """

    #: A home that is slow to tell how full it is may be worth waiting for: 0.1 s is Serve's own.
    queue_len_response_deadline_s = 0.5

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._homes = PrefixAffinity()
        self._seen: list[Any] = []
        self._by_name: dict[str, Any] = {}
        self._failed = False
        known.routers[self._deployment_id.name] = self

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Return replicas for a request, the best one first. This never raises."""
        context = getattr(pending_request, "routing_context", None)
        if context is not None:
            context.should_backoff = True  # when all that are returned are full
        try:
            ranks = self._ranks(candidate_replicas, _hint_in(pending_request))
        except Exception:  # it would leave the request waiting for ever
            if not self._failed:
                self._failed = True
                _log.exception("Requests are not sent to where they are cached.")
            ranks = []
        return ranks or [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]

    def _ranks(self, replicas: Sequence[Any], hint: Any) -> list[list[Any]]:
        if replicas != self._seen:
            self._seen = list(replicas)
            self._by_name = {one.replica_id.unique_id: one for one in replicas}
            self._homes.update(self._by_name)
        key = getattr(hint, "key", None)
        if key is not None:  # which may be the name of a replica
            home = key if key in self._by_name else self._homes.of_key(key)
            names = [] if home is None else [home]
        else:
            names = self._homes.rank(getattr(hint, "blocks", ()), self._load)
        first, others = names[:1], names[1:]
        # When the first one is full, Serve takes the least full of the others.
        return [[self._by_name[name] for name in rank] for rank in (first, others) if rank]

    def _load(self, name: str) -> float:
        """Return how full a replica would be with one more request: 1.0 when each slot is taken."""
        replica = self._by_name[name]
        stats = replica.routing_stats or {}
        n_requests = self.replica_queue_len_cache.get(replica.replica_id)
        if n_requests is None:
            n_requests = stats.get("running", 0) + stats.get("waiting", 0)
        slots = stats.get("slots") or replica.max_ongoing_requests
        return float(max((n_requests + 1) / slots, stats.get("kv", 0.0)))

    def _get_pending_request_matching_internal_request_id(
        self, request_metadata: Any = None
    ) -> Any:
        # Calls that are made while one request is answered have the same id. Newer versions of
        # Serve find only one of them by it, and the others would wait for ever.
        found = super()._get_pending_request_matching_internal_request_id(request_metadata)
        if found is not None and found.metadata is request_metadata:
            return found
        waiting = (one for one in self._pending_requests_to_fulfill if not one.future.done())
        return next((one for one in waiting if one.metadata is request_metadata), found)

    # In earlier versions of Serve, such as 2.49, a task may put down the request that it was about
    # to route, and no other takes it up; Serve's ConsistentHashRouter tells of it. Where this is
    # repaired, Serve notes which task has which request.

    def _get_next_pending_request_to_route(self) -> Any:
        found = super()._get_next_pending_request_to_route()
        if found is None and self._loses_requests():
            waiting = (one for one in self._pending_requests_to_fulfill if not one.future.done())
            found = next(waiting, None)
        return found

    async def _fulfill_pending_requests(self) -> None:
        await super()._fulfill_pending_requests()
        if self._loses_requests():
            self._maybe_start_routing_tasks()

    def _loses_requests(self) -> bool:
        return not hasattr(self, "_routing_task_by_pending_request_future")


def _hint_in(request: Any) -> Any:
    """Find the hint among a call's arguments, by the names of its attributes."""
    given = (*getattr(request, "args", ()), *getattr(request, "kwargs", {}).values())
    return next((one for one in given if hasattr(one, "blocks") and hasattr(one, "key")), None)
