"""`StoredAs`: how the response to a request is stored, and what it continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs


@attrs.frozen
class StoredAs:
    """The decision about storing a response.

    Attributes:
        id: of the response; empty: any.
        repeated: fields of the response that tell how it is stored.
        before: stored items, which stand before the client's.
    """

    id: str = ""
    repeated: Mapping[str, Any] = attrs.field(factory=dict)
    before: Sequence[Mapping[str, Any]] = ()


#: A response that is not stored.
NOT_STORED = StoredAs()
