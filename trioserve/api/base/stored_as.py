"""Tells a handler how the server stores its answer.

Both are in one process, or a router stores and the process of a model answers. Clients cannot tell
it: a handler finds it in the scope of its request, or in a header that only a router's word counts
for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs

from trioserve.api.base.app_state import current_app_state
from trioserve.api.base.connection import STORED_HEADER, Request, current_request
from trioserve.api.base.fields import json_type

#: Names a `StoredAs` in the scope of a request, and in its body once that is read.
STORED = "trioserve.stored"


@attrs.frozen
class StoredAs:
    """The decision about storing a response.

    Attributes:
        id: of the response; empty: any.
        repeated: fields of the response that tell how it is stored.
        n_before: how many items of the input are stored ones, which stand before the client's.
    """

    id: str = ""
    repeated: Mapping[str, Any] = attrs.field(factory=dict)
    n_before: int = 0

    @classmethod
    def of_current(cls) -> StoredAs:
        """The decision about the current request, made here or by a router."""
        request = current_request()
        if (stored := _in(request.scope)) is not None:
            return stored
        told = request.headers.get(STORED_HEADER) if current_app_state().has_router else None
        return cls() if told is None else cls(**json.loads(told))

    @classmethod
    @json_type(properties={})
    def of(cls, body: Mapping[str, Any]) -> StoredAs:
        """The decision that was put into a body after it was read. JSON cannot have it."""
        return _in(body) or cls()


def _in(fields: Mapping[str, Any]) -> StoredAs | None:
    stored = fields.get(STORED)
    return stored if isinstance(stored, StoredAs) else None


def headers_for_model(request: Request) -> list[tuple[bytes, bytes]]:
    """The headers that tell the process of a model what was decided about a request."""
    if (stored := _in(request.scope)) is None:
        return []
    return [(STORED_HEADER.lower().encode(), json.dumps(attrs.asdict(stored)).encode())]
