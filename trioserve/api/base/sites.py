"""Requests that a browser sends on behalf of another site's page are refused before they act.

Two attacks need no more than that somebody on this machine opens a page:

- Cross-site request forgery. The page cannot read the answer, but a POST of ``text/plain`` needs
  no preflight, so it would generate, erase slots or set scales. Browsers name the page's site in
  ``Origin``; one that ``--cors-origins`` does not let in gets status 403.
- DNS rebinding. The page's own name is made to point to this machine, so that it may read the
  answers too. Its name is in ``Host``: a server without keys, reached over a loopback address,
  answers to loopback names and to ``--allowed-hosts`` only.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from quart import Quart, request
from werkzeug.datastructures import Headers

from trioserve.api.base import cors
from trioserve.api.base.intake import intake_of
from trioserve.config import Config
from trioserve.errors import PermissionDeniedError

#: Routes that tell nothing and do nothing: probes may ask them from anywhere.
OPEN = frozenset({"/health", "/v1/health", "/health/live", "/health/ready"})


def is_loopback(host: str) -> bool:
    """Whether a name or an address, without a port, always means this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_in(authority: str) -> str:
    """The name or the address in a value of ``Host``, in lower case; empty when there is none."""
    try:
        return urlsplit(f"//{authority}").hostname or ""
    except ValueError:
        return ""


def answers_to(host: str, config: Config) -> bool:
    """Whether ``--allowed-hosts`` or loopback lets a name in. ``.example.org``: all below it."""
    names = config.allowed_hosts
    return (
        is_loopback(host)
        or "*" in names
        or any(
            host == name.lstrip(".") or (name[:1] == "." and host.endswith(name)) for name in names
        )
    )


def is_own(origin: str, authority: str) -> bool:
    """Whether an origin is the server itself, by the name that the client used for it."""
    try:
        return urlsplit(origin).netloc.lower() == authority.lower() != ""
    except ValueError:
        return False


def check(path: str, headers: Headers, server: str, config: Config) -> None:
    """Look where a request is from.

    Args:
        path: what it asks for.
        headers: its headers; ``Host`` and ``Origin`` are looked at.
        server: the address that it came to; empty for a Unix socket.
        config: what the server lets in.

    Raises:
        PermissionDeniedError: the request is refused.
    """
    if path in OPEN:
        return
    authority, origin = headers.get("Host", ""), headers.get("Origin")
    if not config.api_keys and is_loopback(server) and authority:
        host = host_in(authority)
        if not answers_to(host, config):
            raise PermissionDeniedError(
                f"This server does not answer to the name {host!r}. Start it with "
                "--allowed-hosts, or with --api-key."
            )
    if origin and not is_own(origin, authority) and cors.allowed(origin, config) is None:
        raise PermissionDeniedError(
            f"Pages of {origin} may not use this server. --cors-origins lets them."
        )


def check_embedding(headers: Headers, config: Config) -> None:
    """Refuse a GET of another site's page that tells no origin, such as one for an image.

    Raises:
        PermissionDeniedError: it is one.
    """
    foreign = headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
    if foreign and not headers.get("Origin") and cors.allowed("", config) is None:
        raise PermissionDeniedError("Pages of other sites may not use this route.")


def install(app: Quart) -> None:
    """Refuse what comes from other sites. To be done before keys are looked at."""

    async def look() -> None:
        server = request.scope.get("server") or ("",)  # none: a Unix socket
        check(request.path, request.headers, server[0], intake_of(app).config)

    app.before_request(look)
