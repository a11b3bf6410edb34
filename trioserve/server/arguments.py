"""Single fields that a program passes by name, sorted by the object that each belongs to.

``server.chat(messages, tools=[...], temperature=0, timeout=5)`` names a field of `ChatParams`, one
of `SamplingParams` and the time of a `RequestContext`. Each function takes its own out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import trio

from trioserve.chat.params import ChatParams
from trioserve.errors import InvalidRequestError
from trioserve.server.context import RequestContext
from trioserve.types import GenerationParams, SamplingParams

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
