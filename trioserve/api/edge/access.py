"""Access to the API: requests from other sites, API keys, and pages of other origins.

Two attacks need no more than a page that is open in a browser on this machine:

- Cross-site request forgery. The page cannot read the answer, but a POST of ``text/plain`` needs
  no preflight, so it would generate, erase slots or set scales. Browsers name the page's site in
  ``Origin``; one that ``--cors-origins`` does not let in gets status 403. A GET, as for an image,
  has no ``Origin``, but ``Sec-Fetch-Site``; it is refused, unless it follows a link to the page.
- DNS rebinding. The page's own name is made to point to this machine, so that it may read the
  answers too. Its name is in ``Host``: a server without keys, reached over a loopback address,
  answers to loopback names and to ``--allowed-hosts`` only.

A page that `trioserve` serves itself needs none of this. llama-server lets every origin in by
default; here the default is those on this machine, because a web page elsewhere must not be able
to use a server without keys.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from werkzeug.datastructures import Headers

from trioserve.api.base import vendors
from trioserve.config import Config
from trioserve.errors import PermissionDeniedError
from trioserve.fair_limiter import set_client
from trioserve.hosts import is_local, parse_authority, parse_origin

if TYPE_CHECKING:
    from trioserve.api.edge.connection import Request
    from trioserve.api.service import AppState

# -- API keys: ``Authorization: Bearer KEY``, or ``x-api-key: KEY`` as Anthropic's clients send


#: Routes without data or effects, which probes may request from anywhere.
OPEN = frozenset({"/health", "/v1/health", "/health/live", "/health/ready"})

#: Routes that need no key, as in llama-server; and the page, which holds no secrets.
PUBLIC = OPEN | {"/"}

#: Rules that begin so have an id that stands in for a key: an `EventSource` sends no headers.
PUBLIC_RULES = "/v1/stream/"

#: Rules of the page's own files. Those of ``--path`` in their place need the key.
PAGE_RULES = ("/assets/", "/licenses.txt", "/sw.js")

_BEARER = re.compile(r"bearer +", re.IGNORECASE)


def key_in(authorization: str | None, x_api_key: str | None) -> str:
    """The API key in a request; empty: none was sent.

    Headers come as Latin-1, whatever their bytes mean; keys are UTF-8.
    """
    shown = (authorization or x_api_key or "").encode("latin-1", "replace")
    text = shown.decode("utf-8", "surrogateescape")
    return _BEARER.sub("", text, count=1) if _BEARER.match(text) else text


def shown_key(headers: Headers) -> str:
    """The API key in the headers of a request; empty: none was sent."""
    return key_in(headers.get("Authorization"), headers.get("X-Api-Key"))


async def check_key(state: AppState, request: Request) -> None:
    """Refuse a request that has no valid key. From here on, the task works for the key's client."""
    # By the rule, not by the path: a path may lead out of its beginning again.
    rule = "" if request.route is None else request.route.path
    if request.path in PUBLIC or rule.startswith(PUBLIC_RULES):
        return
    if state.config.static_path is None and rule.startswith(PAGE_RULES):
        return
    caller, shown = request.caller, shown_key(request.headers)
    caller.key = await state.keys.check(shown)
    caller.api_key = shown
    if request.route is not None and request.route.manages:
        caller.check_manages(f"{request.method} {request.path}")
    caller.held.belongs_to(shown)
    set_client(shown)


# -- Pages from other origins


#: Seconds that a browser may remember the answer to a preflight request.
_MAX_AGE = "600"

_EXPOSED = (
    "Location",
    "Mcp-Protocol-Version",
    "Mcp-Session-Id",
    "Preference-Applied",
    "Request-Id",
    "Retry-After",
    "WWW-Authenticate",
    "X-Request-Id",
)


def is_of_this_machine(origin: str) -> bool:
    """True for the origin of a page that this machine serves."""
    parsed = parse_origin(origin)
    return parsed is not None and is_local(parsed[1].host)


# -- Requests from pages of other sites


#: Names of the server that clients have used, and are remembered.
_MANY_NAMES = 64


def answers_to(host: str, config: Config) -> bool:
    """True for a name that is loopback or allowed. In the flag, ``.a.org`` covers subdomains."""
    names = config.allowed_hosts
    return (
        is_local(host)
        or "*" in names
        or any(
            host == name.lstrip(".") or (name[:1] == "." and host.endswith(name)) for name in names
        )
    )


def is_own(origin: str, authority: str) -> bool:
    """True for the origin of the server itself, by the name that the client used for it."""
    page, server = parse_origin(origin), parse_authority(authority)
    return page is not None and server is not None and page[1] == server.at(page[0])


class Sites:
    """The pages that may use a server, and the names that it answers to.

    Args:
        config: of the server.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._origins = [name.strip() for name in config.cors_origins.split(",")]
        of_limits = (name for each in vendors.registered for name in each.rate_limits.names())
        self._exposed = ", ".join(dict.fromkeys((*_EXPOSED, *of_limits)))
        self._has_keys = config.has_api_keys
        #: Names that passed are remembered: clients call a server by the same few.
        self._check_name = lru_cache(_MANY_NAMES)(self._look_at_name)

    def allowed(self, origin: str) -> str | None:
        """The ``Access-Control-Allow-Origin`` for a page of this origin; None: no header."""
        names = self._origins
        if "*" in names:
            # With credentials, browsers do not accept the star.
            return origin if origin and self._config.cors_credentials else "*"
        if origin in names or (origin and "localhost" in names and is_of_this_machine(origin)):
            return origin
        return None

    def headers_for(self, origin: str, method: str) -> dict[str, str]:
        """The CORS headers that let a page of this origin read a response; empty: it may not."""
        config, allowing = self._config, self.allowed(origin)
        if not allowing:
            return {}
        headers = {
            "Access-Control-Allow-Origin": allowing,
            "Access-Control-Expose-Headers": self._exposed,
        }
        if config.cors_credentials:
            headers["Access-Control-Allow-Credentials"] = "true"
        if method == "OPTIONS":
            headers["Access-Control-Allow-Methods"] = config.cors_methods
            headers["Access-Control-Allow-Headers"] = config.cors_headers
            headers["Access-Control-Max-Age"] = _MAX_AGE
        return headers

    def check(self, path: str, headers: Headers, server: str) -> None:
        """Check the origin of a request.

        Args:
            path: what it asks for.
            headers: its headers; ``Host``, ``Origin`` and ``Sec-Fetch-Site`` are looked at.
            server: the address that it came to; empty for a Unix socket.

        Raises:
            PermissionDeniedError: the request is refused.
        """
        if path in OPEN:
            return
        authority, origin = headers.get("Host", ""), headers.get("Origin")
        if authority and not self._has_keys:
            self._check_name(authority, server)
        if origin and not is_own(origin, authority) and self.allowed(origin) is None:
            raise PermissionDeniedError(
                f"Pages of {origin} may not use this server; allow them with --cors-origins."
            )
        is_embedded = headers.get("Sec-Fetch-Site") == "cross-site" and not origin
        if is_embedded and headers.get("Sec-Fetch-Mode") != "navigate" and not self.allowed(""):
            raise PermissionDeniedError(
                "Pages of other sites may not use this server; allow them with --cors-origins."
            )

    def _look_at_name(self, authority: str, server: str) -> None:
        named = parse_authority(authority)
        if is_local(server) and (named is None or not answers_to(named.host, self._config)):
            raise PermissionDeniedError(
                f"This server does not answer to the name {authority!r}. Start it with "
                "--allowed-hosts, or with --api-key."
            )


def check_embedding(headers: Headers, config: Config) -> None:
    """Refuse a GET of another site's page that tells no origin, such as one for an image.

    Raises:
        PermissionDeniedError: it is one.
    """
    foreign = headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
    if foreign and not headers.get("Origin") and not Sites(config).allowed(""):
        raise PermissionDeniedError("Pages of other sites may not use this route.")
