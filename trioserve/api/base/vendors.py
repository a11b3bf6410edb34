"""The registry of vendors: what all other folders need to know of an API, in one entry for each.

A vendor is a folder with its routes, and a `Vendor` that `trioserve.api` registers. Whatever
differs between APIs outside of these folders is a field here: errors, headers, the fields of a
prompt. A path that belongs to no vendor, such as ``/health``, has the forms of the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from trioserve.api.base import sse
from trioserve.api.base.answers import Answer
from trioserve.errors import TrioServeError
from trioserve.server.limits.rates import Remaining

if TYPE_CHECKING:
    from trioserve.api.base.routes import Route, Routes

#: The fields of a request's body, as far as that is an object or a form.
Fields: TypeAlias = Mapping[str, Any]

_KINDS = ("requests", "tokens")


@attrs.frozen
class ErrorShape:
    """The form that errors have on the routes of a vendor.

    `event` writes a body as the last event of a stream, after `n` others.
    """

    body: Callable[[TrioServeError, str], dict[str, Any]]  # of an error and the id of its request
    form: type[Answer] | None = None  # of the body; none: the common one
    event: Callable[[Mapping[str, Any], int], bytes] = lambda body, _: sse.event(body)
    content_type: str = sse.CONTENT_TYPE  # of a stream that can end so


@attrs.frozen
class RateLimitHeaders:
    """The headers with a client's rate limits: for requests and tokens, the rest and the reset.

    `name` has places for the ``kind`` and the ``part``; `reset` writes the seconds until all of it
    is there again.
    """

    name: str = "X-RateLimit-{part}-{kind}"
    reset: Callable[[float], str] = "{:.3f}s".format

    def names(self) -> Iterator[str]:
        """The names of the headers, for pages that want to read them."""
        for kind in _KINDS:
            for part in ("Limit", "Remaining", "Reset"):
                yield self.name.format(kind=kind.title(), part=part)

    def write(self, left: Mapping[str, Remaining]) -> Iterator[tuple[str, str]]:
        """Write the headers of an answer."""
        for kind, one in left.items():
            values = {
                "limit": str(one.limit),
                "remaining": str(one.remaining),
                "reset": self.reset(one.reset),
            }
            for part, value in values.items():
                yield self.name.lower().format(kind=kind, part=part), value


@attrs.frozen(kw_only=True)
class Vendor:
    """An API whose errors and headers have a form that clients expect.

    Attributes:
        name: of the vendor.
        paths: what has the vendor's forms: these paths, and all below them.
        routes: its paths, each with its handler.
        errors: the form of errors; none: the common one.
        rate_limits: the headers that tell of rate limits.
        id_header: another header with the id of the request.
        orders_priorities: whether priorities are in the vendor's order, whatever a flag says.
    """

    name: str
    paths: tuple[str, ...] = ()
    routes: tuple[Routes, ...] = ()
    errors: ErrorShape | None = None
    rate_limits: RateLimitHeaders = RateLimitHeaders()
    id_header: str | None = None
    orders_priorities: bool = False

    def has(self, path: str) -> bool:
        return f"{path}/".startswith(tuple(f"{one}/" for one in self.paths))


#: The vendors, in the order of their registration.
registered: list[Vendor] = []


def register(*vendors: Vendor) -> None:
    """Register more APIs. Call this before creating apps."""
    registered.extend(vendors)


def vendor_of(path: str) -> Vendor:
    """The vendor whose forms a path has."""
    return next((each for each in registered if each.has(path)), registered[0])


def known_routes() -> Iterator[Route]:
    """The routes of all vendors."""
    for vendor in registered:
        for routes in vendor.routes:
            yield from routes
