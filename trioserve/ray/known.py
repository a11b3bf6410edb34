"""The routers of requests in this process, for the ingress that is in it.

A module of its own, because Serve pickles that of the router by value: each process would have
another copy of what is kept there.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

#: The routers, by the names of their deployments.
routers: WeakValueDictionary[str, Any] = WeakValueDictionary()


def replicas_of(deployment: str) -> list[str]:
    """The names of the replicas of a deployment, as far as a router in this process knows them.

    A router is made when the deployment is first called.
    """
    router = routers.get(deployment)
    return [] if router is None else sorted(one.unique_id for one in router.curr_replicas)
