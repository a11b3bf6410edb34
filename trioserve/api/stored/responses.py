"""Stored responses: ``store``, ``previous_response_id``, ``conversation`` and ``background``.

`take_over` changes a POST before its handler gets it: items that are stored stand before its input.
`keep` reads the answer on its way to the client, and holds back its last event until the response
is stored. With ``background``, both happen in a stream that outlives the connection; see
`trioserve.api.streams`.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import trio
from quart import Blueprint, request
from quart.wrappers.response import IterableBody, ResponseBody
from quart_trio.wrappers import TrioResponse as Response
from werkzeug.routing import BaseConverter

from trioserve.api import streams
from trioserve.api.base import errors, sse
from trioserve.api.base.app_state import current_app_state
from trioserve.api.base.body import look_into, parse_object
from trioserve.api.base.connection import current_request
from trioserve.api.base.http import long_response
from trioserve.api.base.stored_as import STORED, StoredAs
from trioserve.api.openai.responses import events
from trioserve.api.openai.responses.events import code_of
from trioserve.api.openai.responses.request import StoringRequest
from trioserve.api.openapi import gives, takes
from trioserve.api.sessions import Send, StreamSession
from trioserve.api.stored.history import history, items_of, lineage
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
from trioserve.api.stored.listing import (
    QUERY,
    DeletedRecord,
    Page,
    StoredItems,
    current_owner,
    deleted,
    missing,
)
from trioserve.api.stored.reading import PER_NUMBER, bodies, decoded, look_up, respond, values
from trioserve.api.stored.runs import StoredRun
from trioserve.chat.messages import MAX_MESSAGES
from trioserve.concurrency import Phase
from trioserve.errors import (
    InvalidRequestError,
    PayloadTooLargeError,
    StoreError,
    UnavailableError,
)
from trioserve.fair_limiter import offload
from trioserve.left_out import leave_out
from trioserve.server.limits.memory import MemoryReservation
from trioserve.store import Part, Record, Records, Ref, check_sizes, new_id
from trioserve.whole_numbers import whole_number

blueprint = Blueprint("stored_responses", __name__)

#: The endpoints whose POSTs may continue stored responses; of the first, answers are stored.
_RESPONSES, _COUNT = "responses.responses", "responses.input_tokens"

#: The key of a `StoredRun` in the scope of the request whose answer it stores. A request within the
#: app shares Quart's `g`.
_RUN = "trioserve.run"

_OVER = ("completed", "incomplete", "failed", "cancelled")
_LAST_EVENT = re.compile(rb"event: response\.(?:completed|incomplete|failed)\n")
_FIRST_EVENT = b"event: response.created\n"
_NUMBER = re.compile(rb'\ndata: \{"type":"[\w.]+","sequence_number":(\d+),')

#: Seconds before the end of a response in the background is stored again, if the store failed.
_PAUSE, _MAX_PAUSE = 1.0, 30.0


# -- POSTs


async def take_over() -> Response | None:
    """Have the answer to the current POST stored, or run it in the background, as it asks for.

    Raises:
        InvalidRequestError: it continues what is not there.
        UnavailableError: the store cannot be used, and the request asks for it.
    """
    if request.endpoint not in (_RESPONSES, _COUNT):
        return None
    scope: Any = request.scope
    if _RUN in scope:
        return None
    try:
        n_bytes, fields = await look_into(lambda data: (len(data), parse_object(data)))
        options = StoringRequest.parse(fields)
    except PayloadTooLargeError:
        return None  # for the handler to say
    except InvalidRequestError as error:
        if error.param is None:
            return None
        raise
    if not (options.store or options.previous_response_id or options.conversation):
        return None
    if isinstance(given := fields.get("input"), list) and len(given) > MAX_MESSAGES:
        return None  # for the handler to say
    wants_stream, runs = fields.get("stream") is True, request.endpoint == _RESPONSES
    if runs and options.background:
        fields["stream"] = True
    run, stored, body = await _prepare(fields, options, n_bytes)
    if runs and options.background:
        run.body, run.size = _queued(run, fields), len(body)
        ask = streams.asking(body, **{_RUN: run, STORED: stored})
        return await _begin(run, ask, wants_stream=wants_stream)
    current = current_request()
    current.body.clear()
    current.held.shrink_to(0)
    current.held.grow(len(body))
    current.body.append(body)
    scope[STORED] = stored
    if runs and options.store:
        scope[_RUN] = run
    return None


async def _prepare(
    fields: dict[str, Any], options: StoringRequest, n_bytes: int
) -> tuple[StoredRun, StoredAs, bytes]:
    """Find what the request continues. Returns also what its handler gets: that, and its body."""
    is_asked = fields.get("store") is True or options.background
    continues = options.previous_response_id or options.conversation
    own, given = current_owner(), fields.get("input")
    if not isinstance(given, str | list):
        given = None  # for the handler to say
    state, before = current_app_state(), list[Part]()
    if options.previous_response_id:
        turns = await history(own, options.previous_response_id)
        before = await items_of(turns, "previous_response_id")
    elif (conversation := options.conversation) is not None:
        if await look_up(lambda records: records.fields(conversation, CONVERSATION, own)) is None:
            raise InvalidRequestError.at("conversation", "is not stored here.")
        before = await items_of([(conversation, ITEMS)], "conversation")
    items = await resolved(given, "input") if isinstance(given, list) else []
    if isinstance(given, str):
        part = {"type": "input_text", "text": given}
        items = [{"type": "message", "role": "user", "content": [part]}]
    run = StoredRun(
        id=new_id("resp"),
        owner=own,
        store=state.store,
        gate=state.gate,
        options=options,
        is_asked=is_asked or bool(continues),
        input=[],
    )
    for name in attrs.fields_dict(StoringRequest):
        fields.pop(name, None)
    fields["store"] = False  # the process of a model stores nothing

    def write() -> tuple[StoredAs, bytes]:
        run.input = list(parts_of(with_ids(each for each in items if isinstance(each, dict))))
        first = (
            [] if given is None else [each.body for each in before if not is_reference(each.value)]
        )
        if first or isinstance(given, list):
            fields["input"] = items
        return StoredAs(run.id, run.repeated, len(first)), _with_input(fields, first)

    n_before = sum(len(each.body) for each in before)
    stored, body = await offload(write, n_bytes + n_before)
    if run.is_asked and options.store:
        n_items = sum(len(each.body) for each in run.input)
        check_sizes(len(body) - n_before - n_items, n_items)
    return run, stored, body


def _with_input(fields: Mapping[str, Any], first: Sequence[bytes]) -> bytes:
    """Write a body, in which items of JSON are the first ones of the input."""
    if not first:
        return "".join(sse.encode_in_steps(fields)).encode()
    rest = {name: value for name, value in fields.items() if name != "input"}
    items = [*first, *("".join(sse.encode_in_steps(each)).encode() for each in fields["input"])]
    head = "".join(sse.encode_in_steps(rest)).removesuffix("}").encode()
    return b'%b,"input":[%b]}' % (head, b",".join(items))


async def keep(response: Response) -> Response:
    """Store the answer to the current request, if it is to be stored."""
    scope: Any = request.scope
    run: StoredRun | None = scope.get(_RUN)
    if run is None or response.status_code != 200:
        return response
    path = request.path
    if response.content_type == sse.CONTENT_TYPE:
        body = response.response
        response.response = IterableBody(_kept_stream(run, body, path))
        return response
    data = await response.get_data(as_text=False)
    whole = await offload(lambda: json.loads(data), len(data))
    try:
        await run.keep(whole, len(data))
    except UnavailableError as error:
        if run.is_asked:
            return errors.response(error)
        _tell_not_stored(error)
        whole["store"] = False
        response.set_data(await offload(lambda: sse.encode(whole).encode(), len(data)))
    return response


def _tell_not_stored(error: UnavailableError) -> None:
    leave_out("store", f"it is the default, and not possible at the moment: {error.message}")


async def _kept_stream(run: StoredRun, body: ResponseBody, path: str) -> AsyncIterator[bytes]:
    """Pass on a stream; its last event waits until the response is stored."""
    # An async generator, so no nursery or cancel scope may be open at a `yield`.
    rest = b""
    async with body as parts:
        async for part in parts:
            new = max(len(rest) - 1, 0)
            rest += part.encode() if isinstance(part, str) else part
            end = rest.rfind(b"\n\n", new) + 2
            if end < 2:
                continue
            events, rest = rest[:end], rest[end:]
            if run.body.get("status") == "queued" and _FIRST_EVENT in events:
                first = events[events.index(_FIRST_EVENT) :]
                _, run.body = await _response_in(first.partition(b"\n\n")[0])
            if (last := _LAST_EVENT.search(events)) is None:
                yield events
                continue
            yield events[: last.start()]
            if (failure := await _keep_last(run, events[last.start() :], path)) is not None:
                yield failure
                return
            yield events[last.start() :]
    if rest:
        yield rest


async def _keep_last(run: StoredRun, event: bytes, path: str) -> bytes | None:
    """Store the response in the last event. Returns an error in place of it, if that is one."""
    number, response = await _response_in(event.partition(b"\n\n")[0])
    if run.options.background and response["status"] == "failed" and run.has_to_end():
        response["status"] = "cancelled"
    pause = _PAUSE
    while True:
        try:
            await run.keep(response, len(event))
            return None
        except UnavailableError as error:
            failure = error
        if not (run.options.background and isinstance(failure, StoreError)) or run.has_to_end():
            break
        with trio.move_on_after(pause):
            await run.gate.phase.wait_value(lambda phase: phase is not Phase.OPEN)
        pause = min(2 * pause, _MAX_PAUSE)
    if run.is_asked:
        return errors.shape_of(path).event(errors.bodies_on(path)(failure), number)
    _tell_not_stored(failure)
    return None


async def _response_in(event: bytes) -> tuple[int, dict[str, Any]]:
    """The number of an event, and the response in it."""
    data = event.partition(b"\ndata: ")[2]
    fields = await offload(lambda: json.loads(data), len(data))
    return fields["sequence_number"], fields["response"]


# -- in the background


async def _begin(run: StoredRun, ask: streams.Ask, *, wants_stream: bool) -> Response:
    """Run the current request in the background; make the response to it."""
    runs = current_app_state().stored_runs
    live = partial(_live, run, runs, ask, current_request().held.another())
    session = run.session = streams.begin(run.id, live)
    await run.begun.wait()
    wait = streams.WAIT if run.is_there else math.inf  # without a record, it fails at once
    if (failed := await streams.answer_of_failed(session, wait)) is not None:
        await run.store.delete(run.id)
        return failed
    if wants_stream:
        return streams.respond(session, 0)
    return await long_response(lambda: run.body, run.size // PER_NUMBER)


async def _live(
    run: StoredRun,
    runs: dict[str, StoredRun],
    ask: streams.Ask,
    held: MemoryReservation,
    send: Send,
) -> None:
    """Store that a request runs, run it, and store how it ends. It is in `runs` until it is."""
    runs[run.id] = run
    try:
        with held:
            held.grow(run.size)
            await run.add()
            run.begun.set()
            await _ask(run, ask, send)
    finally:
        if run.is_kept or not run.is_there:
            del runs[run.id]
        run.begun.set()
        run.ended.set()


async def _ask(run: StoredRun, ask: streams.Ask, send: Send) -> None:
    assert run.session is not None
    status, problem, code = "failed", None, ""
    try:
        await ask(send)
    except trio.Cancelled:
        status = "cancelled"
        raise
    except Exception as failure:
        problem = run.session.form.body(failure)
        code = code_of(getattr(failure, "status", 500))
        raise
    finally:
        problem = problem or run.session.what_went_wrong()
        head = run.session.head
        code = code or code_of(500 if head is None else head.status)
        error = {"code": code, "message": problem["error"]["message"]}
        with trio.CancelScope(shield=True):
            await _keep_end(run, status, error)


async def _keep_end(run: StoredRun, status: str, error: Mapping[str, str]) -> None:
    """Store how a run has ended that has not come to its last event."""
    if run.is_kept:
        return
    if run.has_to_end():
        status = "cancelled"
    failure = error if status == "failed" else None
    body = {**run.body, "status": status, "error": failure, "output": []}
    try:
        await run.keep(body, 0)
    except UnavailableError as problem:
        leave_out("the end of a background response", problem.message)
    finally:
        run.body = body


def _queued(run: StoredRun, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The response before its request has a place."""
    none = ("completed_at", "error", "incomplete_details", "usage")
    given = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p", "user")
    return {
        **dict.fromkeys(none),
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


# -- routes


class ResponseId(BaseConverter):
    """The id of a response in a path: other names below ``/v1/responses`` are no routes."""

    regex = "resp_[^/]+"


@blueprint.get("/v1/responses/<response:id_>")
@blueprint.get("/responses/<response:id_>", endpoint="show_short")
@takes(
    None,
    query={
        "stream": "true: the events of a response in the background",
        "starting_after": "with stream: the number of the last event that is not wanted",
    },
)
@gives(events.Response)
async def show(id_: str) -> Response:
    """Give a stored response, or the events of one in the background from an event on."""
    if request.args.get("stream") != "true":
        return await _show(id_)
    await _find(id_)
    return _resume(id_)


def _resume(id_: str) -> Response:
    """Make the response with the events after the one that a client has.

    Raises:
        InvalidRequestError: they are not kept, or there is no such event.
    """
    session = current_app_state().streams.find(current_request().api_key, id_)
    if session is None:
        raise InvalidRequestError.at(
            "stream", "needs a response in the background whose events are still kept."
        )
    given = request.args.get("starting_after")
    if given is None:
        session.ring.check(0, "starting_after")
        return streams.respond(session, 0)
    if (after := whole_number(given)) is None:
        raise InvalidRequestError.at("starting_after", "must be the number of an event.")
    return streams.respond(session, _offset_after(session, after))


def _offset_after(session: StreamSession, number: int) -> int:
    """Where the events after one begin. Raises InvalidRequestError: that one is not kept."""
    ring = session.ring
    offset, last = ring.start, -1
    while offset < ring.end:
        events = ring.read(offset, 2**16)
        for found in _NUMBER.finditer(events):
            last = int(found[1])
            if last == number:
                return offset + events.index(ring.mark, found.start()) + len(ring.mark)
            if last > number:
                raise InvalidRequestError.at("starting_after", "is an event that is not kept.")
        offset += len(events)
    raise InvalidRequestError.at("starting_after", f"is above {last}, the last event so far.")


@blueprint.delete("/v1/responses/<response:id_>")
@blueprint.delete("/responses/<response:id_>", endpoint="delete_short")
@gives(DeletedRecord)
async def delete(id_: str) -> Response:
    """Delete a stored response. One that runs in the background is cancelled first."""
    await _find(id_)
    await _stop(id_)
    state = current_app_state()
    await state.store.delete(id_)
    state.stored_runs.pop(id_, None)
    return deleted(RESPONSE, id_)


@blueprint.post("/v1/responses/<response:id_>/cancel")
@blueprint.post("/responses/<response:id_>/cancel", endpoint="cancel_short")
@takes(None)
@gives(events.Response)
async def cancel(id_: str) -> Response:
    """Cancel a response that runs in the background."""
    body, _ = await _find(id_)
    if not body["background"]:
        raise InvalidRequestError("Only a response in the background can be cancelled.")
    await _stop(id_)
    return await _show(id_)


async def _stop(id_: str) -> None:
    """Cancel a run, and wait for its end. Has no effect if there is none."""
    state = current_app_state()
    run: StoredRun | None = state.stored_runs.get(id_)
    if run is not None and run.session is not None:
        state.streams.stop(run.session, "The response was cancelled.")
        await run.ended.wait()


@blueprint.get("/v1/responses/<response:id_>/input_items")
@blueprint.get("/responses/<response:id_>/input_items", endpoint="input_items_short")
@takes(None, query=QUERY)
@gives(StoredItems)
async def input_items(id_: str) -> Response:
    """List the input items of a stored response, with those that it continues."""
    page, own = Page.of_request(), current_owner()
    if await look_up(lambda records: records.fields(id_, RESPONSE, own)) is None:
        raise missing(RESPONSE, id_)
    turns = await lineage(own, id_, is_over=False)
    sides = [(turn, side) for turn in turns for side in (INPUT, OUTPUT)]
    return await page.items(lambda records: sides[:-1])


async def _find(id_: str) -> tuple[dict[str, Any], Sequence[Ref]]:
    """Find a response of the client, as it is now, and its output. Raises NotFoundError."""
    own, state = current_owner(), current_app_state()

    def look(records: Records) -> tuple[Record | None, Sequence[Ref]]:
        return records.find(id_, RESPONSE, own), records.refs(id_, OUTPUT)

    run: StoredRun | None = state.stored_runs.get(id_)  # it is there until its end is stored
    record, output = await look_up(look)
    if record is None:
        raise missing(RESPONSE, id_)
    (body,) = await values([record.data])
    if run is None or body["status"] in _OVER:
        return body, output
    current_request().held.grow(run.size)
    return run.body, output


async def _show(id_: str) -> Response:
    body, output = await _find(id_)
    data = await bodies(output)
    return await respond(data, lambda: {**body, "output": decoded(data)})
