"""``/v1/batches`` and ``/v1/messages/batches``: requests that `trioserve.api.batches` runs.

OpenAI's are in a file, and Anthropic's in the body.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import attrs
import trio

from trioserve.api.base.answers import Answer, Bytes
from trioserve.api.base.body import parse_object
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import (
    ARGUMENTS,
    NAME,
    PromptFields,
    RequestBody,
    field,
    json_type,
    list_schema,
    mapping,
    object_schema,
    objects,
    one_of,
    required,
    text,
)
from trioserve.api.base.reply import Reply, json as json_reply
from trioserve.api.base.routes import Query, Routes
from trioserve.api.batches import (
    DATA,
    ERRORS,
    FILE,
    KIND,
    MESSAGES,
    OUTPUT,
    Batch,
    add_batch,
    batch_body,
    body_of,
)
from trioserve.api.openapi import gives, takes
from trioserve.api.service import AppState
from trioserve.api.stored.files import content_of, data_of
from trioserve.api.stored.listing import (
    ANTHROPIC_QUERY,
    QUERY,
    AnthropicPage,
    DeletedOfAnthropic,
    Page,
    PageOf,
    moment,
    page_of_anthropic,
)
from trioserve.api.stored.shelf import Shelf
from trioserve.concurrency import check_cancelled
from trioserve.errors import InvalidRequestError, NotFoundError
from trioserve.fair_limiter import text_threads
from trioserve.store import DRAFT, Part, Record, Records, new_id

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
    return _part_of(n, id_, endpoint, body, prompt)


def _part_of(
    n: int, id_: str, endpoint: str, body: Mapping[str, Any], prompt: PromptFields | None
) -> Part:
    """Make the part of a batch that has a request."""
    kept = {name: value for name, value in body.items() if name not in _DROPPED}
    return Part.of(n, _beginning(prompt, kept), {"custom_id": id_, "url": endpoint, "body": kept})


def _beginning(fields: PromptFields | None, body: Mapping[str, Any]) -> str:
    """Make a name of a prompt: sorted by name, prompts that begin alike follow one another."""
    names = [] if fields is None else [*fields.head, *fields.turns]
    written = json.dumps([body.get("model"), *(body.get(name) for name in names)])
    lengths = (n for i, n in enumerate(_BEGINNINGS) if i == 0 or len(written) > _BEGINNINGS[i - 1])
    texts = (written[:length].encode(errors="replace") for length in lengths)
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
        await _begin(shelf, app, KIND, body, lines)
    return json_reply(body)


async def _begin(
    shelf: Shelf, app: AppState, kind: str, body: dict[str, Any], lines: Sequence[Part]
) -> Record:
    """Store a batch of a kind, and start it."""
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
    return json_reply((await _cancelled(Shelf.of(caller, app), app, KIND, id_)).body)


async def _cancelled(shelf: Shelf, app: AppState, kind: str, id_: str) -> Record:
    """Cancel a batch of a kind that is not over."""

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


# -- batches of messages, in Anthropic's form


_PATH = "/v1/messages"

#: Requests of a batch: Anthropic's bound.
_MAX_REQUESTS = 100_000

_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)

#: The statuses of the stored form, by those of Anthropic's. All others mean that it has ended.
_STATUSES = {"in_progress": "in_progress", "cancelling": "canceling"}


class _MessageCounts(Answer):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(Answer, kw_only=True):
    """A batch of messages."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: _MessageCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None = None
    results_url: str | None


_REQUEST = object_schema("custom_id", "params", custom_id=NAME, params=ARGUMENTS)


@json_type(list_schema(_REQUEST, _MAX_REQUESTS, minItems=1))
def _requests(value: Any) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = value
    if not objects(value):
        raise InvalidRequestError.at("requests", "must not be empty.")
    ids: set[str] = set()
    for i, request in enumerate(requests):
        check_cancelled()
        path = f"requests[{i}]"
        id_ = required(request, "custom_id", text, path)
        if not _ID.fullmatch(id_) or id_ in ids:
            raise InvalidRequestError.at(
                f"{path}.custom_id",
                "must be 1 to 64 letters, digits, '-' or '_', and no other request's.",
            )
        ids.add(id_)
        required(request, "params", mapping, path)
    return requests


@attrs.frozen(kw_only=True)
class MessageBatchRequest(RequestBody):
    """``POST /v1/messages/batches``."""

    requests: list[dict[str, Any]] = field(read=_requests)


def _parts(requests: list[dict[str, Any]], prompt: PromptFields | None) -> list[Part]:
    """Make the parts of a batch of requests, which are then gone. It may take long."""
    parts = []
    for n, request in enumerate(requests):
        check_cancelled()
        parts.append(_part_of(n, request["custom_id"], _PATH, request["params"], prompt))
    requests.clear()  # in this thread: it takes long
    return parts


def _message_batch(record: Record) -> MessageBatch:
    """A batch as clients see it."""
    body = body_of(record)
    counts, status = body["request_counts"], _STATUSES.get(body["status"], "ended")
    others = [counts.get(name, 0) for name in ("completed", "failed", "canceled", "expired")]
    has_ended = status == "ended"
    ended = body.get(f"{body['status']}_at") if has_ended else None
    since = body["cancelling_at"]
    return MessageBatch(
        id=body["id"],
        processing_status=status,  # type: ignore[arg-type]
        request_counts=_MessageCounts(max(0, counts["total"] - sum(others)), *others),
        created_at=moment(body["created_at"]),
        expires_at=moment(body["expires_at"]),
        ended_at=None if ended is None else moment(ended),
        cancel_initiated_at=None if since is None else moment(since),
        results_url=f"{_PATH}/batches/{body['id']}/results" if has_ended else None,
    )


@routes.post("/v1/messages/batches")
@takes(MessageBatchRequest)
@gives(MessageBatch)
async def create_messages(request: MessageBatchRequest, caller: Caller, app: AppState) -> Reply:
    """Begin a batch. An invalid message does not stop the others: its result is an error."""
    shelf, prompt = Shelf.of(caller, app), app.route_at("POST", _PATH).prompt_fields
    parts = await text_threads().run_sync(partial(_parts, request.requests, prompt))
    shelf.held.grow(sum(len(each.body) for each in parts))
    counts = {"total": len(parts), "completed": 0, "failed": 0}
    id_, now = new_id("msgbatch"), int(time.time())
    body = batch_body(id_, "in_progress", now, endpoint=_PATH, request_counts=counts)
    return json_reply(_message_batch(await _begin(shelf, app, MESSAGES, body, parts)))


@routes.get("/v1/messages/batches")
@takes(None, query=ANTHROPIC_QUERY)
@gives(AnthropicPage)
async def list_message_batches(query: Query, caller: Caller, app: AppState) -> Reply:
    """List the batches of the client, the newest first."""
    page, shelf = Page.of_anthropic(query), Shelf.of(caller, app)
    return await page.records(shelf, MESSAGES, entry=_message_batch, form=page_of_anthropic)


@routes.get("/v1/messages/batches/<id_>")
@gives(MessageBatch)
async def show_messages(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Tell how far a batch is."""
    return json_reply(_message_batch(await Shelf.of(caller, app).find(MESSAGES, id_)))


@routes.post("/v1/messages/batches/<id_>/cancel")
@takes(None)
@gives(MessageBatch)
async def cancel_messages(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Cancel a batch. What was answered until then is in its results."""
    return json_reply(_message_batch(await _cancelled(Shelf.of(caller, app), app, MESSAGES, id_)))


@routes.get("/v1/messages/batches/<id_>/results")
@gives(Bytes, "application/x-jsonl")
async def results(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Give the results of a batch that has ended: a line of JSON for each message."""
    shelf = Shelf.of(caller, app)

    def find(records: Records) -> list[tuple[str, int]]:
        files = _files_of(_ended(records, shelf, id_))
        return [(file, records.size_of(file, DATA)) for file in files]

    return await content_of(shelf, await shelf.look_up(find), "application/x-jsonl")


@routes.delete("/v1/messages/batches/<id_>")
@gives(DeletedOfAnthropic)
async def delete_messages(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Delete a batch that has ended, and its results."""
    shelf = Shelf.of(caller, app)

    def hide(records: Records) -> list[str]:
        ids = [id_, *_files_of(_ended(records, shelf, id_))]
        for each in ids:
            records.mark(each, DRAFT)
        return ids

    with trio.CancelScope(shield=True):
        for each in await shelf.store.do(hide):
            await shelf.store.delete(each)
    return json_reply(DeletedOfAnthropic(id_, "message_batch_deleted"))


def _ended(records: Records, shelf: Shelf, id_: str) -> Record:
    """Find a batch that has ended. Raises NotFoundError; InvalidRequestError: it has not."""
    batch = shelf.found(records, MESSAGES, id_)
    if batch.is_open:
        raise InvalidRequestError(
            "The batch has not ended; its results are there, and it can be deleted, once it has."
        )
    return batch


def _files_of(batch: Record) -> list[str]:
    """The ids of the records that have the results."""
    body = body_of(batch)
    ids = (body[f"{name}_file_id"] for name in (OUTPUT, ERRORS))
    return [id_ for id_ in ids if id_ is not None]
