"""Single fields that a program passes by name, sorted by the object that each belongs to.

``server.chat(messages, tools=[...], temperature=0, timeout=5)`` names a field of `ChatParams`, one
of `SamplingParams` and the time of a `RequestContext`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

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


def generation_params(base: GenerationParams, fields: Mapping[str, Any]) -> GenerationParams:
    """Change fields of `GenerationParams` and of its `SamplingParams`.

    Raises:
        InvalidRequestError: a field is unknown, has the wrong type or is out of range.
    """
    sampling = {name: fields[name] for name in fields if name in _SAMPLING}
    others = {name: fields[name] for name in fields if name in _GENERATION}
    for name in fields:
        if name not in sampling and name not in others:
            raise InvalidRequestError(f"'{name}' is not a parameter.", param=name)
    if sampling:
        others["sampling"] = attrs.evolve(base.sampling, **sampling)
    return attrs.evolve(base, **others) if others else base


@attrs.frozen
class Arguments:
    """The fields of one call, by name."""

    generation: dict[str, Any]
    _chat: dict[str, Any]
    _context: dict[str, Any]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Sort fields. Those that nobody knows count as those of a generation, which names them."""
        return cls(
            {name: fields[name] for name in fields if name not in _CHAT | _CONTEXT},
            {name: fields[name] for name in fields if name in _CHAT},
            {name: fields[name] for name in fields if name in _CONTEXT},
        )

    def context(self, base: RequestContext | None) -> RequestContext:
        """Make the context of the call; `timeout` is in seconds from now, None for no limit."""
        changes = dict(self._context)
        if "timeout" in changes:
            timeout = changes.pop("timeout")
            changes["deadline"] = math.inf if timeout is None else trio.current_time() + timeout
        return attrs.evolve(base or RequestContext(), **changes)

    def chat(self, base: ChatParams | None) -> ChatParams:
        """Make the parameters of a chat."""
        return attrs.evolve(base or ChatParams(), **self._chat)

    def only_context(self, base: RequestContext | None) -> RequestContext:
        """Make the context of a call that takes no other fields.

        Raises:
            InvalidRequestError: there is one.
        """
        for name in (*self.generation, *self._chat):
            raise InvalidRequestError(f"'{name}' is not a parameter here.", param=name)
        return self.context(base)

    def without_chat(self) -> Self:
        """Refuse the fields of a chat where there is none. Raises InvalidRequestError."""
        for name in self._chat:
            raise InvalidRequestError(f"'{name}' is a parameter of chats.", param=name)
        return self
