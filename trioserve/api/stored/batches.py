"""``/v1/batches``: files of requests, which `trioserve.api.batches` runs."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import trio

from trioserve.api.base.body import parse_object
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import PromptFields, RequestBody, field, one_of
from trioserve.api.base.reply import Reply, json as json_reply
from trioserve.api.base.routes import Query, Routes
from trioserve.api.batches import FILE, KIND, Batch, add_batch, batch_body, body_of
from trioserve.api.openapi import gives, takes
from trioserve.api.service import AppState
from trioserve.api.stored.files import data_of
from trioserve.api.stored.listing import QUERY, Page, PageOf
from trioserve.api.stored.shelf import Shelf
from trioserve.concurrency import check_cancelled
from trioserve.errors import InvalidRequestError, NotFoundError
from trioserve.fair_limiter import text_threads
from trioserve.store import Part, Record, Records, new_id

routes = Routes()

_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")

#: Lines of a batch, and errors that are listed of one whose lines are not valid.
_MAX_LINES = 50_000
_MAX_ERRORS = 100

#: Fields of a line that would have its answer sent, or run, in another way.
_DROPPED = ("stream", "stream_options", "background")

#: Characters of prompts that are compared to find out which begin alike.
_BEGINNINGS = (256, 1024, 4096, 16384)


# -- reading lines


def _read(
    data: bytes, endpoint: str, prompt: PromptFields | None
) -> tuple[list[Part], list[dict[str, Any]]]:
    """Read the lines of a file. Gives parts of a batch, and what is wrong. It may take long."""
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
            parts.append(_part(n, line, endpoint, prompt, ids))
        except InvalidRequestError as error:
            errors.append(
                {"code": "invalid", "line": n + 1, "message": error.message, "param": error.param}
            )
            if len(errors) >= _MAX_ERRORS or len(parts) >= _MAX_LINES:
                break
    if not parts and not errors:
        message = "The file has no lines."
        errors.append({"code": "empty_file", "line": None, "message": message, "param": None})
    return parts, errors


def _part(n: int, data: bytes, endpoint: str, prompt: PromptFields | None, ids: set[str]) -> Part:
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
    return part_of(n, id_, endpoint, body, prompt)


def part_of(
    n: int, id_: str, endpoint: str, body: Mapping[str, Any], prompt: PromptFields | None
) -> Part:
    """Make the part of a batch that has a request."""
    kept = {name: value for name, value in body.items() if name not in _DROPPED}
    return Part.of(n, _beginning(prompt, kept), {"custom_id": id_, "url": endpoint, "body": kept})


def _beginning(fields: PromptFields | None, body: Mapping[str, Any]) -> str:
    """Make a name of a prompt: sorted by these, prompts that begin alike follow one another."""
    names = [] if fields is None else [*fields.head, *fields.turns]
    text = json.dumps([body.get("model"), *(body.get(name) for name in names)])
    lengths = (n for i, n in enumerate(_BEGINNINGS) if i == 0 or len(text) > _BEGINNINGS[i - 1])
    texts = (text[:length].encode(errors="replace") for length in lengths)
    return "".join(hashlib.blake2b(each, digest_size=4).hexdigest() for each in texts)


# -- routes


class Batches(PageOf):
    """Some batches."""

    data: Sequence[Batch]


@attrs.frozen(kw_only=True)
class BatchRequest(RequestBody):
    """``POST /v1/batches``."""

    input_file_id: str
    endpoint: str = field(read=one_of(*_ENDPOINTS))
    completion_window: str = field(read=one_of("24h"), default="24h")
    metadata: dict[str, str] = attrs.field(factory=dict)


@routes.post("/v1/batches")
@takes(BatchRequest)
@gives(Batch)
async def create(request: BatchRequest, caller: Caller, app: AppState) -> Reply:
    """Begin a batch of the requests in a file."""
    shelf = Shelf.of(caller, app)
    try:
        data = await data_of(shelf, await shelf.find(FILE, request.input_file_id))
    except NotFoundError:
        raise InvalidRequestError.at("input_file_id", "names no file.") from None
    prompt = app.route_at("POST", request.endpoint).prompt_fields
    lines, problems = await text_threads().run_sync(lambda: _read(data, request.endpoint, prompt))
    body = batch_body(
        new_id("batch"),
        "failed" if problems else "in_progress",
        int(time.time()),
        endpoint=request.endpoint,
        errors={"object": "list", "data": problems} if problems else None,
        input_file_id=request.input_file_id,
        request_counts={"total": len(lines), "completed": 0, "failed": 0},
        metadata=request.metadata,
    )
    if problems:
        app.gate.check()
        await shelf.store.do(lambda records: records.add(body["id"], KIND, shelf.owner, body))
    else:
        await begin(shelf, app, KIND, body, lines)
    return json_reply(body)


async def begin(
    shelf: Shelf, app: AppState, kind: str, body: dict[str, Any], lines: Sequence[Part]
) -> Record:
    """Store a batch of a kind, and start it. Raises StoreFullError."""
    app.gate.check()  # a batch in memory ends with the server
    with trio.CancelScope(shield=True):  # what is stored is started, if the client leaves, too
        batch = await add_batch(shelf.store, kind, shelf.owner, body, lines)
        app.batches.start(batch)
    return batch


@routes.get("/v1/batches")
@takes(None, query={name: text for name, text in QUERY.items() if name != "order"})
@gives(Batches)
async def list_batches(query: Query, caller: Caller, app: AppState) -> Reply:
    """List the batches of the client, the newest first."""
    return await Page.of(query).records(Shelf.of(caller, app), KIND, entry=body_of)


@routes.get("/v1/batches/<id_>")
@gives(Batch)
async def show(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Tell how far a batch is."""
    return json_reply(body_of(await Shelf.of(caller, app).find(KIND, id_)))


@routes.post("/v1/batches/<id_>/cancel")
@takes(None)
@gives(Batch)
async def cancel(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Cancel a batch. What was answered until then is in its files."""
    return json_reply((await cancelled(Shelf.of(caller, app), app, KIND, id_)).body)


async def cancelled(shelf: Shelf, app: AppState, kind: str, id_: str) -> Record:
    """Cancel a batch of a kind. Raises InvalidRequestError: it is over."""

    def write(records: Records) -> Record:
        found = shelf.found(records, kind, id_)
        if found.is_open and found.body["status"] != "cancelling":
            found.body.update(status="cancelling", cancelling_at=int(time.time()))
            records.change(id_, found.body, is_open=True)
        return found

    found = await app.store.do(write)
    if not found.is_open:
        raise InvalidRequestError(f"The batch is {found.body['status']}, and cannot be cancelled.")
    app.batches.cancel(id_)
    return found
