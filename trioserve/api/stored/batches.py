"""``/v1/batches``: files of requests, which `trioserve.api.batches` runs."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any

import attrs
import trio
from quart import Blueprint
from quart_trio import QuartTrio
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base import vendors
from trioserve.api.base.app_state import AppState, current_app_state
from trioserve.api.base.body import parse_object, read_body_as
from trioserve.api.base.fields import RequestBody, field, one_of
from trioserve.api.base.http import json_response
from trioserve.api.batches import KIND, Batch, add_batch, batch_body, body_of
from trioserve.api.openapi import gives, takes
from trioserve.api.stored.files import data_of, find
from trioserve.api.stored.listing import QUERY, Page, PageOf, current_owner, missing
from trioserve.api.within import Answer, ask
from trioserve.concurrency import check_cancelled
from trioserve.errors import InvalidRequestError
from trioserve.fair_limiter import text_threads
from trioserve.store import Part, Record, Records, new_id

blueprint = Blueprint("stored_batches", __name__)

_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")

#: Lines of a batch, and errors that are listed of one whose lines are not valid.
_MAX_LINES = 50_000
_MAX_ERRORS = 100

#: Fields of a line that would have its answer sent, or run, in another way.
_DROPPED = ("stream", "stream_options", "background")

#: Characters of prompts that are compared to find out which begin alike.
_BEGINNINGS = (256, 1024, 4096, 16384)


async def ask_for_line(
    app: QuartTrio, served: AppState, key: str, path: str, body: bytes
) -> Answer:
    """Send the body of a line to the app, as a client with an API key would."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "client": None,
        "server": None,
        "extensions": {},
    }
    headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
    return await ask(app, scope, served.config.api_prefix + path, body, headers)


# -- reading lines


@attrs.frozen
class _Lines:
    """The lines of a file: parts of a batch, or what is wrong with them."""

    parts: list[Part]
    errors: list[dict[str, Any]]


def _read(data: bytes, endpoint: str) -> _Lines:
    """Read the lines of a file. It may take long."""
    parts: list[Part] = []
    errors: list[dict[str, Any]] = []
    ids: set[str] = set()
    for n, line in enumerate(data.splitlines()):
        check_cancelled()
        if not line.strip():
            continue
        try:
            if len(parts) >= _MAX_LINES:
                raise InvalidRequestError(f"A batch has at most {_MAX_LINES} lines.")
            parts.append(_part(n, line, endpoint, ids))
        except InvalidRequestError as error:
            errors.append(
                {"code": "invalid", "line": n + 1, "message": error.message, "param": error.param}
            )
            if len(errors) >= _MAX_ERRORS or len(parts) >= _MAX_LINES:
                break
    if not parts and not errors:
        message = "The file has no lines."
        errors.append({"code": "empty_file", "line": None, "message": message, "param": None})
    return _Lines(parts, errors)


def _part(n: int, data: bytes, endpoint: str, ids: set[str]) -> Part:
    line = parse_object(data)
    id_, body = line.get("custom_id"), line.get("body")
    if not isinstance(id_, str) or not id_ or id_ in ids:
        raise InvalidRequestError.at("custom_id", "must be a string that no other line has.")
    ids.add(id_)
    if line.get("method", "POST") != "POST":
        raise InvalidRequestError.at("method", 'must be "POST".')
    if line.get("url") != endpoint:
        raise InvalidRequestError.at("url", f"must be the endpoint of the batch, {endpoint!r}.")
    if not isinstance(body, dict):
        raise InvalidRequestError.at("body", "must be an object.")
    kept = {name: value for name, value in body.items() if name not in _DROPPED}
    return Part.of(n, _beginning(endpoint, kept), {"custom_id": id_, "url": endpoint, "body": kept})


def _beginning(endpoint: str, body: Mapping[str, Any]) -> str:
    """Make a name of a prompt: sorted by these, prompts that begin alike follow one another."""
    fields = vendors.prompt_fields(endpoint)
    names = [] if fields is None else [*fields.head, *fields.turns]
    text = json.dumps([body.get("model"), *(body.get(name) for name in names)])
    lengths = (n for i, n in enumerate(_BEGINNINGS) if i == 0 or len(text) > _BEGINNINGS[i - 1])
    return "".join(_digest(text[:length]) for length in lengths)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=4).hexdigest()


# -- routes


class Batches(PageOf):
    """Some batches."""

    data: list[Batch]


@attrs.frozen(kw_only=True)
class BatchRequest(RequestBody):
    """``POST /v1/batches``."""

    input_file_id: str
    endpoint: str = field(read=one_of(*_ENDPOINTS))
    completion_window: str = field(read=one_of("24h"), default="24h")
    metadata: dict[str, str] = attrs.field(factory=dict)


@blueprint.post("/v1/batches")
@takes(BatchRequest)
@gives(Batch)
async def create() -> Response:
    """Begin a batch of the requests in a file."""
    wanted, own = await read_body_as(BatchRequest.parse), current_owner()
    state = current_app_state()
    file = await find(wanted.input_file_id, "input_file_id")
    data = await data_of(file)
    read = await text_threads().run_sync(lambda: _read(data, wanted.endpoint))
    body = _body(wanted, read)

    state.gate.check()  # a batch in memory ends with the server
    if read.errors:
        await state.store.do(lambda records: records.add(body["id"], KIND, own, body))
        return json_response(body)
    with trio.CancelScope(shield=True):  # what is stored is started, if the client leaves, too
        state.batches.start(await add_batch(state.store, own, body, read.parts))
    return json_response(body)


def _body(wanted: BatchRequest, read: _Lines) -> dict[str, Any]:
    return batch_body(
        new_id("batch"),
        "failed" if read.errors else "in_progress",
        int(time.time()),
        endpoint=wanted.endpoint,
        errors={"object": "list", "data": read.errors} if read.errors else None,
        input_file_id=wanted.input_file_id,
        request_counts={"total": len(read.parts), "completed": 0, "failed": 0},
        metadata=wanted.metadata,
    )


@blueprint.get("/v1/batches")
@takes(None, query={name: text for name, text in QUERY.items() if name != "order"})
@gives(Batches)
async def list_batches() -> Response:
    """List the batches of the client, the newest first."""
    return await Page.of_request().records(KIND, entry=body_of)


@blueprint.get("/v1/batches/<id_>")
@gives(Batch)
async def show(id_: str) -> Response:
    """Tell how far a batch is."""
    own = current_owner()
    found = await current_app_state().store.do(lambda records: _found(records, id_, own))
    return json_response(body_of(found))


@blueprint.post("/v1/batches/<id_>/cancel")
@takes(None)
@gives(Batch)
async def cancel(id_: str) -> Response:
    """Cancel a batch. What was answered until then is in its files."""
    own, state = current_owner(), current_app_state()

    def write(records: Records) -> Record:
        found = _found(records, id_, own)
        if found.is_open and found.body["status"] != "cancelling":
            found.body.update(status="cancelling", cancelling_at=int(time.time()))
            records.change(id_, found.body, is_open=True)
        return found

    found = await state.store.do(write)
    if not found.is_open:
        raise InvalidRequestError(f"The batch is {found.body['status']}, and cannot be cancelled.")
    state.batches.cancel(id_)
    return json_response(found.body)


def _found(records: Records, id_: str, owner: bytes) -> Record:
    if (record := records.find(id_, KIND, owner)) is None:
        raise missing(KIND, id_)
    return record
