"""The routes of a router: those that it answers, and those that it forwards to a model's child.

A router's app has the routes of an app with one model. It answers some of them here, and forwards
requests for the others to a child unchanged. An unknown path is a 404, and loads no model.
"""

from __future__ import annotations

from quart import Quart, request
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api import stored
from trioserve.api.base import vendors
from trioserve.api.router import forwarding

#: Blueprints and endpoints that are answered by the router itself, beside those of vendors.
_OWN = frozenset(
    {
        *("router", "openapi", "pages", "proxy", "streams", "tools", "vertex_health"),
        "vertex_predict",
        *(each.name for each in stored.BLUEPRINTS),
    }
)


def install(app: Quart) -> None:
    """Forward what is not the router's own. To be done after the checks of keys and origins."""
    of_vendors = [one.name for each in vendors.registered for one in each.routes_of_router()]
    own = _OWN.union(of_vendors)

    async def forward() -> Response | None:
        endpoint = request.endpoint
        if endpoint is None or endpoint.partition(".")[0] in own:
            return None
        if request.method == "POST" and vendors.is_about_answer(request.path):
            return await forwarding.forward_to_owner()
        return await forwarding.forward()

    app.before_request(forward)
