"""``/v1/messages/batches``: many messages in one request, which `trioserve.api.batches` runs."""

from __future__ import annotations

import re
import time
from functools import partial
from typing import Any, Literal

import attrs
import trio

from trioserve.api.base.answers import Answer, Bytes
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
    required,
    text,
)
from trioserve.api.base.reply import Reply, json
from trioserve.api.base.routes import Query, Routes
from trioserve.api.batches import DATA, ERRORS, MESSAGES, OUTPUT, batch_body, body_of
from trioserve.api.openapi import gives, takes
from trioserve.api.service import AppState
from trioserve.api.stored.batches import begin, cancelled, part_of
from trioserve.api.stored.files import content_of
from trioserve.api.stored.listing import (
    ANTHROPIC_QUERY,
    AnthropicPage,
    DeletedOfAnthropic,
    Page,
    moment,
    page_of_anthropic,
)
from trioserve.api.stored.shelf import Shelf
from trioserve.concurrency import check_cancelled
from trioserve.errors import InvalidRequestError
from trioserve.fair_limiter import text_threads
from trioserve.store import Part, Record, Records, new_id

routes = Routes()

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
        parts.append(part_of(n, request["custom_id"], _PATH, request["params"], prompt))
    requests.clear()  # in this thread: it takes long
    return parts


def _shown(record: Record) -> MessageBatch:
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
async def create(request: MessageBatchRequest, caller: Caller, app: AppState) -> Reply:
    """Begin a batch. An invalid message does not stop the others: its result is an error."""
    shelf, prompt = Shelf.of(caller, app), app.route_at("POST", _PATH).prompt_fields
    parts = await text_threads().run_sync(partial(_parts, request.requests, prompt))
    shelf.held.grow(sum(len(each.body) for each in parts))
    counts = {"total": len(parts), "completed": 0, "failed": 0}
    id_, now = new_id("msgbatch"), int(time.time())
    body = batch_body(id_, "in_progress", now, endpoint=_PATH, request_counts=counts)
    return json(_shown(await begin(shelf, app, MESSAGES, body, parts)))


@routes.get("/v1/messages/batches")
@takes(None, query=ANTHROPIC_QUERY)
@gives(AnthropicPage)
async def list_batches(query: Query, caller: Caller, app: AppState) -> Reply:
    """List the batches of the client, the newest first."""
    page, shelf = Page.of_anthropic(query), Shelf.of(caller, app)
    return await page.records(shelf, MESSAGES, entry=_shown, form=page_of_anthropic)


@routes.get("/v1/messages/batches/<id_>")
@gives(MessageBatch)
async def show(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Tell how far a batch is."""
    return json(_shown(await Shelf.of(caller, app).find(MESSAGES, id_)))


@routes.post("/v1/messages/batches/<id_>/cancel")
@takes(None)
@gives(MessageBatch)
async def cancel(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Cancel a batch. What was answered until then is in its results."""
    return json(_shown(await cancelled(Shelf.of(caller, app), app, MESSAGES, id_)))


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
async def delete(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Delete a batch that has ended, and its results."""
    shelf = Shelf.of(caller, app)

    def hide(records: Records) -> list[str]:
        ids = [id_, *_files_of(_ended(records, shelf, id_))]
        for each in ids:
            records.hide(each)
        return ids

    with trio.CancelScope(shield=True):
        for each in await shelf.store.do(hide):
            await shelf.store.delete(each)
    return json(DeletedOfAnthropic(id_, "message_batch_deleted"))


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
