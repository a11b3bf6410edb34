"""The routes of Ollama's API."""

from __future__ import annotations

from trioserve.api.base.routes import Routes
from trioserve.api.base.vendors import Vendor
from trioserve.api.ollama import events, models, routes


def _routes_of_router() -> tuple[Routes, ...]:
    from trioserve.api.ollama import router

    return (router.routes,)


VENDOR = Vendor(
    name="ollama",
    paths=("/api",),
    routes=(routes.routes,),
    routes_of_server=(models.routes,),
    routes_of_router=_routes_of_router,
    errors=events.SHAPE,
)
