"""Who asks and until when, and the single fields that a program passes by name.

``server.chat(messages, tools=[...], temperature=0, timeout=5)`` names a field of `ChatParams`, one
of `SamplingParams` and the time of a `RequestContext`. Each of them takes its own out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import attrs
import trio

from trioserve.errors import DeadlineExceededError, InvalidRequestError
from trioserve.types import CancelReason, GenerationParams, SamplingParams
from trioserve.types.params import changed

_T = TypeVar("_T", bound=attrs.AttrsInstance)


@attrs.frozen
class RequestContext:
    """Who asks, and until when. Made once, where the request comes in."""

    #: Clients take turns in the queue. It may be an API key, so it is never shown.
    client: str = attrs.field(default="", repr=False)
    #: Whose rate limits it uses up: an API key, or an address; empty: nobody's.
    limited_as: str = attrs.field(default="", repr=False)
    #: When the request is cancelled, wherever it is (`trio.current_time`).
    deadline: float = attrs.field(default=math.inf, kw_only=True)
    #: Seconds for which the model stays in memory afterwards, idle; below 0: for ever. None: as the
    #: last request said, or else the configuration.
    keep_alive: float | None = attrs.field(default=None, kw_only=True)
    #: When it came in (`trio.current_time`). None: when its task is submitted.
    arrived: float | None = attrs.field(default=None, kw_only=True)
    #: Its id, and where it stands in the traces of the caller, as in the headers of these names.
    request_id: str = attrs.field(default="", kw_only=True)
    traceparent: str = attrs.field(default="", kw_only=True)
    tracestate: str = attrs.field(default="", kw_only=True)
    #: What the log gives as the reason when the caller's scope is cancelled.
    on_cancel: CancelReason = attrs.field(default=CancelReason.CALLER, kw_only=True)

    def check_time(self) -> None:
        """Refuse a request whose time is up. Raises DeadlineExceededError."""
        if self.deadline <= trio.current_time():
            raise DeadlineExceededError


def take(cls: type[_T], fields: dict[str, Any], base: _T | None) -> _T:
    """Make an object of a class: as `base`, with those of the fields that are the class's."""
    changes = {name: fields.pop(name) for name in _names_of(cls) & fields.keys()}
    base = cls() if base is None else base
    return changed(base, changes) if changes else base


def take_context(fields: dict[str, Any], base: RequestContext | None = None) -> RequestContext:
    """Make the context of a call; `timeout` is in seconds from now, None for no limit."""
    base = fields.pop("context", None) or base
    if "timeout" in fields:
        timeout = fields.pop("timeout")
        deadline = math.inf if timeout is None else trio.current_time() + timeout
        base = attrs.evolve(base or RequestContext(), deadline=deadline)
    return take(RequestContext, fields, base)


def take_params(fields: dict[str, Any], base: GenerationParams) -> GenerationParams:
    """Change fields of `GenerationParams` and of its `SamplingParams`. Takes all there are.

    Raises:
        InvalidRequestError: a field is unknown, has the wrong type or is out of range.
    """
    if not fields:
        return base
    known = _names_of(SamplingParams) | _names_of(GenerationParams) - {"sampling"}
    refuse({name: fields[name] for name in fields.keys() - known})
    sampling = take(SamplingParams, fields, base.sampling)
    if sampling is not base.sampling:
        fields["sampling"] = sampling
    return take(GenerationParams, fields, base)


def refuse(fields: Mapping[str, Any]) -> None:
    """Refuse fields that are left over. Raises InvalidRequestError."""
    for name in sorted(fields):
        raise InvalidRequestError(f"'{name}' is not a parameter here.", param=name)


@cache
def _names_of(cls: type) -> frozenset[str]:
    return frozenset(attrs.fields_dict(cls)) - {"deadline"}
