"""``/v1/usage``: what API keys have used, by day and model."""

from __future__ import annotations

import re
import time
from typing import cast

from quart import Blueprint, request
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.app_state import current_app_state
from trioserve.api.base.connection import current_request
from trioserve.api.base.http import json_response
from trioserve.api.openapi import gives, takes
from trioserve.api.stored import answers
from trioserve.errors import InvalidRequestError
from trioserve.store.usage import (
    GROUPS,
    Group,
    day_before,
    day_of,
    read_usage,
    summed,
)

blueprint = Blueprint("usage", __name__)

_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", re.ASCII)

#: Days without `start`.
_DEFAULT_DAYS = 30


@blueprint.get("/v1/usage")
@takes(
    None,
    query={
        "start": f"the first day, as 2026-01-31, in UTC; by default {_DEFAULT_DAYS} days, with end",
        "end": "the last day; by default today",
        "group_by": "what to sum by: day, key or model, or several with commas between them",
    },
)
@gives(answers.USAGE_PAGE)
async def usage() -> Response:
    """Tell what the API key has used; a key that may manage the server sees all keys."""
    end = _day("end") or day_of(time.time())
    start = _day("start") or day_before(end, _DEFAULT_DAYS - 1)
    if start > end:
        raise InvalidRequestError.at("start", f"must not be after end, which is {end}.")
    groups, state, key = _groups(), current_app_state(), current_request().key
    own = None if key is None or key.may_manage else key.name
    await state.usage.save(state.store)
    found = await state.store.do(
        lambda records: list(read_usage(records.connection, start, end, own))
    )
    return json_response(
        {"object": "list", "start": start, "end": end, "data": summed(found, groups)}
    )


def _day(name: str) -> str | None:
    given = request.args.get(name)
    if not given:
        return None
    try:
        if _DAY.fullmatch(given):
            return day_before(given, 0)
    except ValueError:  # a date that does not exist
        pass
    raise InvalidRequestError.at(name, "must be a day, as 2026-01-31.")


def _groups() -> list[Group]:
    given = request.args.get("group_by") or "day"
    names = dict.fromkeys(given.split(","))
    if not names.keys() <= {*GROUPS}:
        raise InvalidRequestError.at("group_by", "must be day, key or model, or several of them.")
    return [cast(Group, name) for name in names]
