"""`Common`: what the engines of a server have in common."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import attrs

from trioserve.config import Config
from trioserve.server.cache_sharing import CacheSharing
from trioserve.server.memory import MemoryBudget
from trioserve.server.observers.observer import Observer
from trioserve.server.rate_limits import RateLimits


@attrs.frozen(kw_only=True)
class Common:
    """What belongs to a server and not to one of its engines: it is there while it sleeps, too.

    Args:
        config: of the server.
        memory: bounds what requests hold.
        observers: who is told when a request starts and ends.
        in_use: keeps the engine from being ended for as long as a block lasts.
    """

    config: Config
    memory: MemoryBudget
    observers: Sequence[Observer]
    in_use: Callable[[], AbstractContextManager[None]]
    rate_limits: RateLimits = attrs.field(init=False)
    cache_sharing: CacheSharing = attrs.field(init=False)
    task_ids: Iterator[int] = attrs.field(init=False, factory=lambda: itertools.count(1))

    @rate_limits.default
    def _make_rate_limits(self) -> RateLimits:
        return RateLimits(self.config.rate_limit_requests, self.config.rate_limit_tokens)

    @cache_sharing.default
    def _make_cache_sharing(self) -> CacheSharing:
        return CacheSharing(self.config)
