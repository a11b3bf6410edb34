"""``/v1/usage``: the usage of API keys, by day and model."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from trioserve.api.base import sse
from trioserve.api.base.answers import Answer
from trioserve.api.base.caller import Caller
from trioserve.api.base.reply import Reply, json
from trioserve.api.base.routes import Query, Routes
from trioserve.api.openapi import gives, takes
from trioserve.api.service import AppState
from trioserve.api.stored.listing import QUERY, Page, PageOf, page_of
from trioserve.errors import InvalidRequestError
from trioserve.store.usage import GROUPS, Group, UsageQuery, day_before, day_of

routes = Routes()

_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", re.ASCII)

#: Days without `start`.
_DEFAULT_DAYS = 30

#: The id of an entry: this, and the values of its groups. Only the last one, the model, may have
#: the sign between them.
_ID, _BETWEEN = "usage_", "/"


class _Used(Answer):
    """Usage, summed: what it is not summed by is null."""

    id: str
    day: str | None
    key: str | None
    model: str | None
    requests: int
    input_tokens: int
    cached_input_tokens: int
    output_tokens: int
    seconds: float


class UsagePage(PageOf, kw_only=True):
    """The usage of API keys, from a day to another."""

    data: Sequence[_Used]
    start: str
    end: str


@routes.get("/v1/usage")
@takes(
    None,
    query={
        "start": f"the first day, as 2026-01-31, in UTC; by default {_DEFAULT_DAYS} days, with end",
        "end": "the last day; by default today",
        "group_by": "what to sum by: day, key or model, or several with commas between them",
        **QUERY,
        "order": "asc or desc: by the values of group_by",
    },
)
@gives(UsagePage)
async def usage(query: Query, caller: Caller, app: AppState) -> Reply:
    """Give the usage of the API key; a key that may manage the server sees all keys."""
    end = _day(query, "end") or day_of(time.time())
    start = _day(query, "start") or day_before(end, _DEFAULT_DAYS - 1)
    if start > end:
        raise InvalidRequestError.at("start", f"must not be after end, which is {end}.")
    page = Page.of(query, default=100, most=1000, order="asc")
    groups = _groups(query)
    wanted = UsageQuery(
        start=start,
        end=end,
        groups=groups,
        key=caller.own_name,
        after=_after(page, groups),
        newest=page.newest,
        limit=page.limit + 1,
    )
    await app.usage.save(app.store)
    found = await app.store.do(lambda records: wanted.read(records.connection))
    entries = [{"id": _id_of(each, groups), **each} for each in found]
    some = page_of(entries[: page.limit], more=len(entries) > page.limit)
    return json({**sse.fields_of(some), "start": start, "end": end})


def _day(query: Query, name: str) -> str | None:
    given = query.get(name)
    if not given:
        return None
    try:
        if _DAY.fullmatch(given):
            return day_before(given, 0)
    except ValueError:  # a date that does not exist
        pass
    raise InvalidRequestError.at(name, "must be a day, as 2026-01-31.")


def _groups(query: Query) -> list[Group]:
    given = query.get("group_by") or "day"
    names = dict.fromkeys(given.split(","))
    if not names.keys() <= {*GROUPS}:
        raise InvalidRequestError.at("group_by", "must be day, key or model, or several of them.")
    return [cast(Group, name) for name in names]


def _id_of(entry: Mapping[str, Any], groups: Sequence[Group]) -> str:
    return _ID + _BETWEEN.join(entry[name] for name in GROUPS if name in groups)


def _after(page: Page, groups: Sequence[Group]) -> list[str] | None:
    if page.after is None:
        return None
    values = page.after.removeprefix(_ID).split(_BETWEEN, len(groups) - 1)
    if not page.after.startswith(_ID) or len(values) != len(groups):
        raise InvalidRequestError.at("after", "names no entry of the list.")
    named = dict(zip((name for name in GROUPS if name in groups), values, strict=True))
    return [named[name] for name in groups]
