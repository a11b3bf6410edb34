"""The routes of a router: its own, and all others on their way to the model that a request names.

A router's app has the routes of an app with one model. A request for one of its own is answered
here; whatever else has a route goes to a child as it came, so that an unknown path is a 404 without
any model being loaded for it.
"""

from __future__ import annotations

from quart import Quart, request
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.router import forwarding

#: Blueprints and endpoints that are answered by the router itself.
_OWN = frozenset(
    {
        "router", "router_ollama", "openapi", "pages", "proxy", "streams", "tools",
        "vertex_health", "vertex_predict",
    }
)  # fmt: skip

#: Endpoints about an answer: only the child that gives it knows its id.
_OF_OWNERS = frozenset({"control.control", "runs.approve", "runs.stop"})


def install(app: Quart) -> None:
    """Forward what is not the router's own. To be done after the checks of keys and origins."""

    async def forward() -> Response | None:
        endpoint = request.endpoint
        if endpoint is None or endpoint.partition(".")[0] in _OWN:
            return None
        if endpoint in _OF_OWNERS:
            return await forwarding.forward_to_owner()
        return await forwarding.forward()

    app.before_request(forward)
