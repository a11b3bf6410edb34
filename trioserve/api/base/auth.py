"""API keys: ``Authorization: Bearer KEY``, or ``x-api-key: KEY`` as Anthropic's clients send."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable

from quart import Quart, request

from trioserve.api.base.intake import intake_of
from trioserve.api.base.request import current_request
from trioserve.errors import AuthenticationError

#: Routes that need no key, as in llama-server; and the page, which holds no secrets.
PUBLIC = frozenset({"/", "/health", "/v1/health", "/health/live", "/health/ready"})

#: Rules that begin so have an id that stands in for a key: an `EventSource` sends no headers.
PUBLIC_RULES = "/v1/stream/"

#: Rules of the page's own files. Those of ``--path`` in their place need the key.
PAGE_RULES = ("/assets/", "/licenses.txt", "/sw.js")

_BEARER = re.compile(r"bearer +", re.IGNORECASE)


def key_in(authorization: str | None, x_api_key: str | None) -> str:
    """The key that a request shows; empty when it shows none.

    Headers come as Latin-1, whatever their bytes mean; keys are UTF-8.
    """
    shown = (authorization or x_api_key or "").encode("latin-1", "replace")
    text = shown.decode("utf-8", "surrogateescape")
    return _BEARER.sub("", text, count=1) if _BEARER.match(text) else text


def is_valid(shown: str, keys: Iterable[str]) -> bool:
    """Compare a key with all valid ones, in a time that tells nothing of them."""
    offered = shown.encode("utf-8", "surrogateescape")
    matches = [hmac.compare_digest(offered, key.encode()) for key in keys]
    return any(matches)


def install(app: Quart) -> None:
    """Refuse requests without a valid key, once the configuration has keys."""

    async def check() -> None:
        config = intake_of(app).config
        # By the rule, not by the path: a path may lead out of its beginning again.
        rule = request.url_rule.rule if request.url_rule is not None else ""
        if not config.api_keys or request.path in PUBLIC or rule.startswith(PUBLIC_RULES):
            return
        if config.static_path is None and rule.startswith(PAGE_RULES):
            return
        shown = key_in(request.headers.get("Authorization"), request.headers.get("X-Api-Key"))
        if not is_valid(shown, config.api_keys):
            raise AuthenticationError("Invalid API Key")
        current_request().api_key = shown
        current_request().held.belongs_to(shown)

    app.before_request(check)
