"""Lists of what is stored, in pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import attrs

from trioserve.api.base.answers import Answer
from trioserve.api.base.reply import Json, json
from trioserve.api.base.routes import Query
from trioserve.api.stored.shelf import Shelf, decoded
from trioserve.errors import InvalidRequestError, RecordDamagedError
from trioserve.store import Record, Records, Ref
from trioserve.whole_numbers import whole_number

_T = TypeVar("_T")

#: A side of a record, by the id of the record.
Side: TypeAlias = tuple[str, str]

#: Records of a list that one transaction reads.
_N_AT_ONCE = 500

#: The parameters of a list, for its description; and those of Anthropic's lists.
QUERY = {
    "after": "the id of the last entry of the page before",
    "limit": "how many entries to list",
    "order": "desc: newest first; asc: oldest first",
}

ANTHROPIC_QUERY = {
    "after_id": QUERY["after"],
    "before_id": "the id of the first entry of the page after",
    "limit": QUERY["limit"],
}


class StoredItem(Answer):
    """An item of the input or output. Its other fields are those that its type has at OpenAI."""

    is_open = True
    id: str
    type: str
    status: str


class PageOf(Answer, kw_only=True):
    """A page of a list."""

    object: Literal["list"] = "list"
    data: Sequence[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


class AnthropicPage(Answer):
    """A page of a list, as Anthropic's API has it."""

    data: Sequence[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool
    next_page: str | None


class StoredItems(PageOf):
    """Some items."""

    data: Sequence[StoredItem]


class DeletedRecord(Answer):
    """A deleted record."""

    id: str
    object: str
    deleted: bool = True


class DeletedOfAnthropic(Answer):
    """The id and the type of a deleted item, in Anthropic's form."""

    id: str
    type: str


@attrs.frozen
class Page:
    """The entries of a list that a request asks for."""

    limit: int
    after: str | None
    newest: bool
    before: str | None = None  # the entry that the page ends before
    place: str = "after"  # the parameter that names the entry

    @classmethod
    def of(cls, query: Query, *, default: int = 20, most: int = 100, order: str = "desc") -> Page:
        """Read the parameters of a request. Raises InvalidRequestError."""
        given, order = query.get("limit", str(default)), query.get("order", order)
        if (limit := whole_number(given, least=1, most=most)) is None:
            raise InvalidRequestError.at("limit", f"must be a number from 1 to {most}.")
        if order not in ("asc", "desc"):
            raise InvalidRequestError.at("order", 'must be "asc" or "desc".')
        return cls(limit, query.get("after") or None, order == "desc")

    @classmethod
    def of_anthropic(cls, query: Query) -> Page:
        """Read the parameters that Anthropic's API has for a list. Raises InvalidRequestError."""
        limit = cls.of({"limit": query.get("limit", "20")}, most=1000).limit
        given = {name: query[name] for name in ("before_id", "page", "after_id") if query.get(name)}
        place = next(iter(given), "after_id")
        id_ = given.get(place, "").removeprefix(_CURSOR) or None
        if place == "before_id":
            return cls(limit, None, newest=True, before=id_, place=place)
        return cls(limit, id_, newest=True, place=place)

    async def items(self, shelf: Shelf, find: Callable[[Records], Sequence[Side]]) -> Json:
        """Answer with a page of the items on some sides of records.

        Raises:
            InvalidRequestError: there is no item `after` which the page begins.
            TrioServeError: from `find`.
        """
        refs = await shelf.look_up(lambda records: self._refs(records, find(records)))
        data, more = await shelf.bodies(refs[: self.limit]), len(refs) > self.limit
        return await shelf.reply(data, lambda: page_of(decoded(data), more=more))

    def _refs(self, records: Records, sides: Sequence[Side]) -> list[Ref]:
        """Find the items of a page, and one more, without reading them."""
        sides, after = list(reversed(sides)) if self.newest else sides, None
        if self.after is not None:
            places = {(id_, side): n for id_, side, n in records.places(self.after)}
            first = next((i for i, side in enumerate(sides) if side in places), None)
            if first is None:
                raise self._unknown()
            sides, after = sides[first:], places[sides[first]]
        refs: list[Ref] = []
        for id_, side in sides:
            left = self.limit + 1 - len(refs)
            refs += records.refs(id_, side, after=after, limit=left, newest=self.newest)
            after = None
            if len(refs) > self.limit:
                break
        return refs

    async def records(
        self,
        shelf: Shelf,
        kind: str,
        is_wanted: Callable[[Record], bool] = lambda record: True,
        entry: Callable[[Record], Any] = lambda record: record.body,
        form: Callable[..., Answer] | None = None,
    ) -> Json:
        """Answer with a page of the client's records of a kind.

        `entry` makes what the list has of a record, and `form` the page. Records that are damaged
        are logged and left out, unless `entry` can read them.

        Raises:
            InvalidRequestError: there is no record `after` which the page begins.
        """
        shown, more = await self.found(shelf, kind, is_wanted)
        make = form or page_of
        return await shelf.reply(
            [each.data for each in shown],
            lambda: make([body for _, body in sound(shown, entry)], more=more),
        )

    async def found(
        self, shelf: Shelf, kind: str, is_wanted: Callable[[Record], bool]
    ) -> tuple[list[Record], bool]:
        """Find the records of a page, and whether there are more. Raises as `records`."""
        own, found, after = shelf.owner, list[Record](), None
        if (name := self.before or self.after) is not None:
            after = await shelf.look_up(lambda records: records.find(name, kind, own))
            if after is None:
                raise self._unknown()
        newest = self.newest == (self.before is None)
        listed = partial(Records.listed, kind=kind, owner=own, newest=newest)
        limit = min(self.limit + 1, _N_AT_ONCE)
        while len(found) <= self.limit:
            some = await shelf.look_up(partial(listed, limit=limit, after=after))
            if not some:
                break
            found += [each for each, wanted in sound(some, is_wanted) if wanted]
            after = some[-1]
        shown = found[: self.limit]
        if self.before is not None:
            shown.reverse()
        return shown, len(found) > self.limit

    def _unknown(self) -> InvalidRequestError:
        return InvalidRequestError.at(self.place, "names no entry of the list.")


def sound(records: Sequence[Record], read: Callable[[Record], _T]) -> Iterator[tuple[Record, _T]]:
    """Read records; those are left out whose damage `read` cannot cope with."""
    for each in records:
        with suppress(RecordDamagedError):
            yield each, read(each)


def page_of(shown: Sequence[dict[str, Any]], *, more: bool = False) -> PageOf:
    """A page with some entries, and whether there are more."""
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return PageOf(data=shown, first_id=first, last_id=last, has_more=more)


#: The prefix of cursors in Anthropic's lists.
_CURSOR = "page_"


def page_of_anthropic(shown: Sequence[Any], *, more: bool = False) -> AnthropicPage:
    """A page in Anthropic's form, of answers with an id."""
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    return AnthropicPage(shown, first, last, more, f"{_CURSOR}{last}" if more else None)


def moment(seconds: float) -> str:
    """Write a Unix time as Anthropic's API has it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def deleted(kind: str, id_: str) -> Json:
    """Tell what was deleted."""
    return json(DeletedRecord(id_, kind))
