"""Lists of what is stored, in pages, and the errors about what is not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from quart import request
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.app_state import current_app_state
from trioserve.api.base.connection import current_request
from trioserve.api.base.http import json_response
from trioserve.errors import InvalidRequestError, NotFoundError

#: The parameters of a list, for its description.
QUERY = {
    "after": "the id of the last entry of the page before",
    "limit": "how many entries to list",
    "order": "desc: newest first; asc: oldest first",
}


@attrs.frozen
class Page:
    """Which entries of a list a request wants."""

    limit: int
    after: str | None
    newest: bool

    @classmethod
    def of_request(cls, *, default: int = 20, most: int = 100, order: str = "desc") -> Page:
        """Read the parameters of the current request. Raises InvalidRequestError."""
        given, order = request.args.get("limit", str(default)), request.args.get("order", order)
        if not given.isascii() or not given.isdigit() or not 1 <= int(given) <= most:
            raise InvalidRequestError.at("limit", f"must be a number from 1 to {most}.")
        if order not in ("asc", "desc"):
            raise InvalidRequestError.at("order", 'must be "asc" or "desc".')
        return cls(int(given), request.args.get("after") or None, order == "desc")

    def of(self, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Cut a page, and one more entry, out of all entries, which are in their order.

        Raises:
            InvalidRequestError: there is no entry `after` which it begins.
        """
        items = list(reversed(items)) if self.newest else list(items)
        if self.after is None:
            return items[: self.limit + 1]
        ids = [each["id"] for each in items]
        if self.after not in ids:
            raise InvalidRequestError.at("after", "names no entry of the list.")
        first = ids.index(self.after) + 1
        return items[first : first + self.limit + 1]

    def respond(self, entries: Sequence[dict[str, Any]], **more: Any) -> Response:
        """Make the response with a page, of its entries and one more if there is one.

        `more` are other fields.
        """
        shown = list(entries[: self.limit])
        return json_response(
            {
                "object": "list",
                **more,
                "data": shown,
                "first_id": shown[0]["id"] if shown else None,
                "last_id": shown[-1]["id"] if shown else None,
                "has_more": len(entries) > self.limit,
            }
        )


def current_owner() -> bytes:
    """The owner of what the client of the current request stores: its API key, if there are any."""
    return current_app_state().store.owner_of(current_request().api_key)


def missing(kind: str, id_: str) -> NotFoundError:
    """Make the error about what is not stored, or belongs to another API key."""
    return NotFoundError(f"There is no {kind} with the id {id_!r:.80}.")


def deleted(kind: str, id_: str) -> Response:
    """Make the response that says what was deleted."""
    return json_response({"id": id_, "object": kind, "deleted": True})
