"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from trioserve.api.anthropic import routes
from trioserve.api.base.vendors import RateLimitHeaders, Vendor


def _moment(seconds: float) -> str:
    """Write the moment that is this number of seconds away."""
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat(timespec="seconds")


VENDOR = Vendor(
    name="anthropic",
    paths=("/v1/messages",),
    routes=(routes.routes, routes.of_models),
    errors=routes.SHAPE,
    id_header="request-id",
    rate_limits=RateLimitHeaders("Anthropic-RateLimit-{kind}-{part}", _moment),
)
