"""The routes of Ollama's API."""

from __future__ import annotations

from trioserve.api.base.vendors import Vendor
from trioserve.api.ollama import events, models, routes, web

VENDOR = Vendor(
    name="ollama",
    paths=("/api",),
    routes=(routes.routes, models.routes, web.routes),
    errors=events.SHAPE,
)
