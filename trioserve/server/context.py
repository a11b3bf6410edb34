"""Who asks and until when, and the single fields that a program passes by name.

``server.chat(messages, tools=[...], temperature=0, timeout=5)`` names a field of `ChatParams`, one
of `SamplingParams` and the time of a `RequestContext`. Each `take_` function takes its own out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import trio

from trioserve.chat.params import ChatParams
from trioserve.errors import DeadlineExceededError, InvalidRequestError
from trioserve.types import CancelReason, GenerationParams, SamplingParams


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
            raise DeadlineExceededError("The request's deadline has passed.")


_SAMPLING = frozenset(attrs.fields_dict(SamplingParams))
_GENERATION = frozenset(attrs.fields_dict(GenerationParams)) - {"sampling"}
_CHAT = frozenset(attrs.fields_dict(ChatParams))
_CONTEXT = frozenset(attrs.fields_dict(RequestContext)) - {"deadline"} | {"timeout"}


def take_context(fields: dict[str, Any], base: RequestContext | None) -> RequestContext:
    """Make the context of a call; `timeout` is in seconds from now, None for no limit."""
    changes = {name: fields.pop(name) for name in _CONTEXT & fields.keys()}
    if "timeout" in changes:
        timeout = changes.pop("timeout")
        changes["deadline"] = math.inf if timeout is None else trio.current_time() + timeout
    return attrs.evolve(base or RequestContext(), **changes)


def take_chat(fields: dict[str, Any], base: ChatParams | None) -> ChatParams:
    """Make the parameters of a chat."""
    changes = {name: fields.pop(name) for name in _CHAT & fields.keys()}
    return attrs.evolve(base or ChatParams(), **changes)


def generation_params(base: GenerationParams, fields: Mapping[str, Any]) -> GenerationParams:
    """Change fields of `GenerationParams` and of its `SamplingParams`.

    Raises:
        InvalidRequestError: a field is unknown, has the wrong type or is out of range.
    """
    refuse({name: fields[name] for name in fields.keys() - _SAMPLING - _GENERATION})
    sampling = {name: fields[name] for name in _SAMPLING & fields.keys()}
    changes = {name: fields[name] for name in _GENERATION & fields.keys()}
    if sampling:
        changes["sampling"] = attrs.evolve(base.sampling, **sampling)
    return attrs.evolve(base, **changes) if changes else base


def refuse(fields: Mapping[str, Any]) -> None:
    """Refuse fields that are left over. Raises InvalidRequestError."""
    for name in sorted(fields):
        raise InvalidRequestError(f"'{name}' is not a parameter here.", param=name)
