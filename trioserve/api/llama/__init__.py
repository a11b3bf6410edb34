"""llama-server's own routes, and the routes about the server itself: health, slots, metrics."""

from __future__ import annotations

from trioserve.api.base.vendors import Vendor
from trioserve.api.llama import adapters, admin, completion, rerank, slots

VENDOR = Vendor(
    name="llama",
    routes=(
        admin.routes,
        admin.of_model,
        adapters.routes,
        completion.routes,
        rerank.routes,
        slots.routes,
    ),
)
