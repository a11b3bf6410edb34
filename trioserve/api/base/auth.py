"""API keys: ``Authorization: Bearer KEY``, or ``x-api-key: KEY`` as Anthropic's clients send."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from quart import Quart, request

from trioserve.api.base.request import current_request
from trioserve.api.base.service import service_of
from trioserve.errors import AuthenticationError

#: Routes that need no key, as in llama-server; and the page, which holds no secrets.
PUBLIC = frozenset({"/", "/health", "/v1/health", "/health/live", "/health/ready"})

#: Below this the id in the path is the key: an `EventSource` sends no headers.
PUBLIC_PREFIX = "/v1/stream/"

_BEARER = "Bearer "


def key_in(authorization: str | None, x_api_key: str | None) -> str:
    """The key that a request shows; empty when it shows none."""
    shown = authorization or x_api_key or ""
    return shown.removeprefix(_BEARER)


def is_valid(shown: str, keys: Iterable[str]) -> bool:
    """Compare a key with all valid ones, in a time that tells nothing of them."""
    offered = shown.encode("utf-8", "surrogateescape")
    matches = [hmac.compare_digest(offered, key.encode()) for key in keys]
    return any(matches)


def install(app: Quart) -> None:
    """Refuse requests without a valid key, once the configuration has keys."""

    async def check() -> None:
        keys = service_of(app).config.api_keys
        if not keys or request.path in PUBLIC or request.path.startswith(PUBLIC_PREFIX):
            return
        shown = key_in(request.headers.get("Authorization"), request.headers.get("X-Api-Key"))
        if not is_valid(shown, keys):
            raise AuthenticationError("Invalid API Key")
        current_request().api_key = shown

    app.before_request(check)
