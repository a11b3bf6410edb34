"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from trioserve.api.anthropic import events, routes
from trioserve.api.base.vendors import PromptFields, RateLimitHeaders, Vendor


def _moment(seconds: float) -> str:
    """Write the moment that is this number of seconds away."""
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat(timespec="seconds")


VENDOR = Vendor(
    paths=("/v1/messages",),
    routes=(routes.blueprint,),
    errors=events.SHAPE,
    rate_limits=RateLimitHeaders("Anthropic-RateLimit-{kind}-{part}", _moment),
    prompts={"/v1/messages": PromptFields(head=("system", "tools"), turns=("messages",))},
)
