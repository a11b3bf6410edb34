"""Stored responses: ``store``, ``previous_response_id``, ``conversation`` and ``background``.

`stored` makes the answer of a route one that is stored: items that are stored stand before the
input of its request, and its reply is kept when it ends. With ``background``, both happen in a
session that outlives the connection; see `trioserve.api.streams`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import attrs

from trioserve.api import streams
from trioserve.api.base.body import Incoming
from trioserve.api.base.caller import Caller
from trioserve.api.base.reply import Json, Reply, long_json
from trioserve.api.base.routes import Query, Responder, Route, Routes
from trioserve.api.base.stored import StoredAs
from trioserve.api.openai.responses import events
from trioserve.api.openai.responses.request import StoringRequest
from trioserve.api.openapi import gives, takes
from trioserve.api.service import AppState
from trioserve.api.sessions import Ring
from trioserve.api.stored.items import (
    CONVERSATION,
    INPUT,
    ITEMS,
    OUTPUT,
    RESPONSE,
    is_reference,
    parts_of,
    resolved,
    with_ids,
)
from trioserve.api.stored.listing import QUERY, DeletedRecord, Page, Side, StoredItems, deleted
from trioserve.api.stored.runs import OF_END, StoredRun
from trioserve.api.stored.shelf import PER_NUMBER, Shelf, decoded, missing
from trioserve.chat.messages import MAX_MESSAGES
from trioserve.errors import InvalidRequestError, UnavailableError
from trioserve.fair_limiter import offload
from trioserve.store import Part, Record, Records, Ref, check_sizes, new_id
from trioserve.whole_numbers import whole_number

routes = Routes()

_OVER = ("completed", "incomplete", "failed", "cancelled")


# -- POSTs


def stored(route: Route, app: AppState, answer: Responder) -> Responder:
    """Have the answers of a route stored, or run in the background, as requests ask for it.

    Of the routes that only count tokens or compact, nothing is stored.
    """
    stores = not route.path.endswith(("/input_tokens", "/compact"))

    async def begin(
        incoming: Incoming, caller: Caller, values: Mapping[str, str], **more: Any
    ) -> Reply:
        fields = await incoming.fields()
        options = await incoming.aside(partial(StoringRequest.parse, fields))
        given = fields.get("input")
        continues = options.previous_response_id or options.conversation
        is_too_long = isinstance(given, list) and len(given) > MAX_MESSAGES
        if is_too_long or not (options.store or continues):
            return await answer(incoming, caller, values, **more)
        run, how = await _prepare(Shelf.of(caller, app), app, incoming, options, needs_input=stores)
        if not (stores and options.store):
            return await answer(incoming, caller, values, stored=how)
        if options.background:
            return await in_background(run, how, incoming, caller)
        return await run.stored(await answer(incoming, caller, values, stored=how))

    async def in_background(
        run: StoredRun, how: StoredAs, incoming: Incoming, caller: Caller
    ) -> Reply:
        fields = await incoming.fields()
        wants_stream = fields.get("stream") is True
        incoming.ask_for_stream()
        run.queued, run.size = _queued(run, fields), incoming.size

        async def ask(other: Caller) -> Reply:
            incoming.held = other.held
            await other.open(run.live(app.stored_runs))
            return await run.stored(await answer(incoming, other, {}, stored=how))

        run.session = app.streams.start(caller, run.id, route, ask)
        await run.begun.wait()
        wait = streams.WAIT if run.is_there else math.inf  # without a record, it fails at once
        if (failed := await streams.reply_of_failed(app, run.session, wait)) is not None:
            await run.store.delete(run.id)
            return failed
        if wants_stream:
            return streams.follow(caller, run.session, 0)
        return long_json(lambda: dict(run.body), run.size // PER_NUMBER)

    return begin


async def _prepare(
    shelf: Shelf, app: AppState, incoming: Incoming, options: StoringRequest, *, needs_input: bool
) -> tuple[StoredRun, StoredAs]:
    """Find what the request continues, and decide how it is stored.

    Raises:
        InvalidRequestError: it continues what is not there.
        UnavailableError: the store cannot be used, and the request asks for it.
    """
    fields, before = await incoming.fields(), list[Part]()
    is_asked = fields.get("store") is True or options.background
    given = fields.get("input")
    if not isinstance(given, str | list):
        given = None  # for the request class to say
    if options.previous_response_id:
        sides = await _history(shelf, options.previous_response_id)
        before = await _items_of(shelf, sides, "previous_response_id")
    elif (id_ := options.conversation) is not None:
        own = shelf.owner
        if await shelf.look_up(lambda records: records.fields(id_, CONVERSATION, own)) is None:
            raise InvalidRequestError.at("conversation", "is not stored here.")
        before = await _items_of(shelf, [(id_, ITEMS)], "conversation")
    items = await resolved(shelf, given, "input") if isinstance(given, list) else []
    if isinstance(given, str):
        part = {"type": "input_text", "text": given}
        items = [{"type": "message", "role": "user", "content": [part]}]
    run = StoredRun(
        id=new_id("resp"),
        owner=shelf.owner,
        store=shelf.store,
        gate=app.gate,
        options=options,
        path=incoming.path,
        is_asked=bool(is_asked or options.previous_response_id or options.conversation),
        input=[],
    )
    for name in attrs.fields_dict(StoringRequest):
        fields.pop(name, None)

    def make() -> list[Any]:
        run.input = list(parts_of(with_ids(each for each in items if isinstance(each, dict))))
        return [value for each in before if not is_reference(value := each.value)]

    first = await offload(make, incoming.size + sum(len(each.body) for each in before))
    if given is None and needs_input:
        first = []  # which the client should have continued
    elif first or isinstance(given, list):
        fields["input"] = items
    if run.is_asked and options.store:
        n_items = sum(len(each.body) for each in run.input)
        check_sizes(max(0, incoming.size - n_items), n_items)
    return run, StoredAs(run.id, run.repeated, first)


def _queued(run: StoredRun, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The response before its request has a place."""
    given = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p", "user")
    return {
        **dict.fromkeys(OF_END),
        **{name: fields.get(name) for name in given},
        "id": run.id,
        "object": "response",
        "created_at": int(time.time()),
        "model": fields.get("model") or "",
        "parallel_tool_calls": fields.get("parallel_tool_calls", True),
        "tool_choice": fields.get("tool_choice", "auto"),
        "tools": fields.get("tools") or [],
        "status": "queued",
        "output": [],
        **run.repeated,
    }


# -- what a response continues


#: Responses that one transaction looks at.
_N_AT_ONCE = 64


class PreviousResponseError(InvalidRequestError, code="previous_response_not_found"):
    """A response that another one is to continue cannot be continued."""


async def _items_of(shelf: Shelf, sides: Sequence[Side], param: str) -> list[Part]:
    """Read the items on some sides of records, which a field names.

    They count twice in the memory of the request, as text and as values, before they are read.
    """

    def find(records: Records) -> list[Ref]:
        refs: list[Ref] = []
        for id_, side in sides:
            refs += records.refs(id_, side, limit=MAX_MESSAGES + 1)
            _check_number(len(refs), param)
        return refs

    refs = await shelf.look_up(find)
    shelf.held.grow(2 * sum(ref.size for ref in refs))
    return await shelf.store.read(refs)


def _check_number(n: int, param: str) -> None:
    if n > MAX_MESSAGES:
        raise InvalidRequestError.at(param, f"continues more than {MAX_MESSAGES} items.")


async def _history(shelf: Shelf, id_: str, *, is_over: bool = True) -> list[Side]:
    """The items of a response and of all that it continues, the oldest first.

    With `is_over`, the response itself must have ended, too.
    """
    turns: list[str] = []
    before: str | None = id_

    def look(records: Records, at: str | None) -> tuple[list[str], str | None]:
        """Some turns from one on, and the one before them."""
        found: list[str] = []
        while at is not None and len(found) < _N_AT_ONCE:
            fields = records.fields(at, RESPONSE, shelf.owner, "status", "previous_response_id")
            if fields is None:
                problem = f"The response {at!r:.80} is not stored here, or not any more."
                raise PreviousResponseError(problem, param="previous_response_id")
            if fields[0] in ("queued", "in_progress") and (is_over or at != id_):
                problem = f"The response {at!r:.80} is not complete."
                raise PreviousResponseError(problem, param="previous_response_id")
            found.append(at)
            at = fields[1]
        return found, at

    while before is not None:
        some, before = await shelf.look_up(partial(look, at=before))
        turns += some
        _check_number(len(turns), "previous_response_id")
    return [(turn, side) for turn in reversed(turns) for side in (INPUT, OUTPUT)]


# -- routes


@routes.get("/v1/responses/<response:id_>")
@routes.get("/responses/<response:id_>")
@takes(
    None,
    query={
        "stream": "true: the events of a response in the background",
        "starting_after": "with stream: the number of the last event that is not wanted",
    },
)
@gives(events.Response)
async def show(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Give a stored response, or the events of one in the background from an event on."""
    if query.get("stream") != "true":
        return await _show(Shelf.of(caller, app), app, id_)
    await _find(Shelf.of(caller, app), app, id_)
    session = app.streams.find(caller.api_key, id_)
    if session is None:
        raise InvalidRequestError.at(
            "stream", "needs a response in the background whose events are still kept."
        )
    return streams.follow(caller, session, _offset(session.ring, query.get("starting_after")))


def _offset(ring: Ring, given: str | None) -> int:
    """Find the offset after the last event that a client has.

    Raises:
        InvalidRequestError: they are not kept, or there is no such event.
    """
    if given is None:
        ring.check(0, "starting_after")
        return 0
    if (after := whole_number(given)) is None:
        raise InvalidRequestError.at("starting_after", "must be the number of an event.")
    return ring.after(after, "starting_after")


@routes.delete("/v1/responses/<response:id_>")
@routes.delete("/responses/<response:id_>")
@gives(DeletedRecord)
async def delete(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Delete a stored response. One that runs in the background is cancelled first."""
    await _find(Shelf.of(caller, app), app, id_)
    await _stop(app, id_)
    await app.store.delete(id_)
    app.stored_runs.pop(id_, None)
    return deleted(RESPONSE, id_)


@routes.post("/v1/responses/<response:id_>/cancel")
@routes.post("/responses/<response:id_>/cancel")
@takes(None)
@gives(events.Response)
async def cancel(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Cancel a response that runs in the background."""
    shelf = Shelf.of(caller, app)
    body, _ = await _find(shelf, app, id_)
    if not body["background"]:
        raise InvalidRequestError("Only a response in the background can be cancelled.")
    await _stop(app, id_)
    return await _show(shelf, app, id_)


async def _stop(app: AppState, id_: str) -> None:
    """Cancel a run, if it exists, and wait for its end."""
    run: StoredRun | None = app.stored_runs.get(id_)
    if run is not None and run.session is not None:
        app.streams.stop(run.session, "The response was cancelled.")
        await run.ended.wait()


@routes.get("/v1/responses/<response:id_>/input_items")
@routes.get("/responses/<response:id_>/input_items")
@takes(None, query=QUERY)
@gives(StoredItems)
async def input_items(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """List the input items of a stored response, with those that it continues."""
    page, shelf = Page.of(query), Shelf.of(caller, app)
    if await shelf.look_up(lambda records: records.fields(id_, RESPONSE, shelf.owner)) is None:
        raise missing(RESPONSE, id_)
    sides = await _history(shelf, id_, is_over=False)
    return await page.items(shelf, lambda records: sides[:-1])


async def _find(shelf: Shelf, app: AppState, id_: str) -> tuple[Mapping[str, Any], Sequence[Ref]]:
    """Find a response of the client, as it is now, and its output. Raises NotFoundError."""

    def look(records: Records) -> tuple[Record, Sequence[Ref]]:
        return shelf.found(records, RESPONSE, id_), records.refs(id_, OUTPUT)

    run: StoredRun | None = app.stored_runs.get(id_)  # it is there until its end is stored
    record, output = await shelf.look_up(look)
    (body,) = await shelf.values([record.data])
    if run is None or body["status"] in _OVER:
        return body, output
    if run.ended.is_set():  # its end could not be stored; now it may be
        with suppress(UnavailableError):
            await run.keep(run.body, 0)
            app.stored_runs.pop(id_, None)
    shelf.held.grow(run.size)
    return run.body, output


async def _show(shelf: Shelf, app: AppState, id_: str) -> Json:
    body, output = await _find(shelf, app, id_)
    data = await shelf.bodies(output)
    return await shelf.reply(data, lambda: {**body, "output": decoded(data)})
