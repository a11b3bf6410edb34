"""The registry of vendors: what all other folders need to know of an API, in one entry for each.

A vendor is a folder with its routes, and a `Vendor` that `trioserve.api` registers. Whatever
differs between APIs outside of these folders is a field here: errors, headers, the fields of a
prompt. A path that belongs to no vendor, such as ``/health``, has the forms of the first one.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, TypeAlias

import attrs
from quart import Blueprint

from trioserve.api.base import sse
from trioserve.api.base.answers import Answer
from trioserve.errors import InvalidRequestError, TrioServeError
from trioserve.server.limits.rates import Remaining

#: The fields of a request's body, as far as that is an object or a form.
Fields: TypeAlias = Mapping[str, Any]

_KINDS = ("requests", "tokens")


def _plain_event(body: Mapping[str, Any], n_before: int) -> bytes:
    return sse.event(body)


@attrs.frozen
class ErrorShape:
    """The form that errors have on the routes of a vendor.

    `event` writes a body as the last event of a stream, after `n` others.
    """

    body: Callable[[TrioServeError, str], dict[str, Any]]  # of an error and the id of its request
    form: type[Answer] | None = None  # of the body; none: the common one
    event: Callable[[Mapping[str, Any], int], bytes] = _plain_event
    status: Callable[[TrioServeError], int] = operator.attrgetter("status")


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


def _asks_for_stream(path: str, fields: Fields) -> bool:
    return fields.get("stream") is True


@attrs.frozen
class StreamForm:
    """How answers are streamed, for a router that writes to a client while the model loads.

    Attributes:
        content_type: of such an answer.
        is_asked: whether a request to this path, with these fields, asks for one.
        ping: writes what keeps it alive, of the path and the name of the model; none: comments,
            which tell where the request stands.
    """

    content_type: str = "text/event-stream"
    is_asked: Callable[[str, Fields], bool] = _asks_for_stream
    ping: Callable[[str, str], bytes] | None = None


@attrs.frozen(kw_only=True)
class PromptFields:
    """The fields of a request that make up its prompt, in the order of most chat templates.

    `head` is what conversations have in common; a message list in `turns` is read one by one.
    """

    head: tuple[str, ...] = ()
    turns: tuple[str, ...]


def _loads_always(path: str, fields: Fields) -> None:
    return None


@attrs.frozen(kw_only=True)
class Vendor:
    """An API whose errors and headers have a form that clients expect.

    Attributes:
        paths: what has the vendor's forms: these paths, and all below them.
        routes: about requests to a model. A router forwards them.
        routes_of_server: further ones of a server that has one model.
        routes_of_router: returns those of a router in place of them, which only a router imports.
        errors: the form of errors; none: the common one.
        rate_limits: the headers that tell of rate limits.
        streams: how answers are streamed.
        model_fields: the fields that may hold the name of the model.
        prompts: the paths whose requests have a prompt that can be cached, and its fields.
        lists: the paths that list models, and for each the list of a model that has only a name.
        common_paths: what all servers answer alike, whatever their model.
        answer_rules: rules of POSTs about an answer which is being given: only its server knows it.
        orders_priorities: whether priorities are in the vendor's order, whatever a flag says.
        unloaded: the answer to a request whose model is not loaded; none: to be loaded for it.
    """

    paths: tuple[str, ...] = ()
    routes: tuple[Blueprint, ...] = ()
    routes_of_server: tuple[Blueprint, ...] = ()
    routes_of_router: Callable[[], tuple[Blueprint, ...]] = tuple
    errors: ErrorShape | None = None
    rate_limits: RateLimitHeaders = RateLimitHeaders()
    streams: StreamForm = StreamForm()
    model_fields: tuple[str, ...] = ("model",)
    prompts: Mapping[str, PromptFields] = attrs.field(factory=dict)
    lists: Mapping[str, Callable[[str], Mapping[str, Any]]] = attrs.field(factory=dict)
    common_paths: frozenset[str] = frozenset()
    answer_rules: tuple[str, ...] = ()
    orders_priorities: bool = False
    unloaded: Callable[[str, Fields], Mapping[str, Any] | None] = _loads_always

    _beginnings: tuple[str, ...] = attrs.field(init=False)

    @_beginnings.default
    def _find_beginnings(self) -> tuple[str, ...]:
        return tuple(f"{path}/" for path in self.paths)

    def has(self, path: str) -> bool:
        """Whether a path has the vendor's forms."""
        return f"{path}/".startswith(self._beginnings)


#: The vendors, in the order of their registration.
registered: list[Vendor] = []


def register(*vendors: Vendor) -> None:
    """Register more APIs. Call this before creating apps."""
    registered.extend(vendors)


def vendor_of(path: str) -> Vendor:
    """The vendor whose forms a path has."""
    return next((each for each in registered if each.has(path)), registered[0])


def model_in(path: str, fields: Fields, query: Mapping[str, str]) -> str | None:
    """The name of the model in a request; None: there is none. Raises InvalidRequestError."""
    for name in vendor_of(path).model_fields:
        given = fields.get(name)
        if given is not None and not isinstance(given, str):
            raise InvalidRequestError.at(name, "must be a string.")
        if given is not None:
            return given or None
    return query.get("model") or None


def prompt_fields(path: str) -> PromptFields | None:
    """The fields of the prompt in a request to this path; None: it has none that is cached."""
    return next((each.prompts[path] for each in registered if path in each.prompts), None)


def is_about_answer(path: str) -> bool:
    """Whether a POST to this path is about an answer that another request began."""
    rules = (rule for each in registered for rule in each.answer_rules)
    return any(_pattern_of(rule).fullmatch(path) for rule in rules)


@cache
def _pattern_of(rule: str) -> re.Pattern[str]:
    return re.compile(re.sub("<[^>]*>", "[^/]+", rule))
