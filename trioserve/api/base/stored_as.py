"""`StoredAs`: how the response to a request is stored, and what it continues."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

#: The header with what a router has decided about storing the answer to a request.
STORED_HEADER = "X-Trioserve-Stored"


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

    def told(self) -> str:
        """Write it for the process of a model, whose request has these items in its input."""
        return json.dumps([self.id, self.repeated, len(self.before)])

    @classmethod
    def of_told(cls, told: str, fields: dict[str, Any]) -> StoredAs:
        """Read what a router has written, and take the items out of the input."""
        id_, repeated, n_before = json.loads(told)
        given = fields.get("input")
        if not isinstance(given, list):
            return cls(id_, repeated)
        fields["input"] = given[n_before:]
        return cls(id_, repeated, given[:n_before])


#: A response that is not stored.
NOT_STORED = StoredAs()
