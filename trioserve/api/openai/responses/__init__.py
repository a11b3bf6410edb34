"""The routes of OpenAI's Responses API: its items, tools and events."""

from __future__ import annotations

from trioserve.api.base.vendors import Vendor
from trioserve.api.openai.responses import events, routes

VENDOR = Vendor(
    name="responses",
    paths=("/v1/responses", "/responses"),
    routes=(routes.routes,),
    errors=events.SHAPE,
)
