"""Slots, which can be saved to a file and restored."""

from __future__ import annotations

from typing import Any

import attrs
from msgspec import UNSET, UnsetType

from trioserve.api.base import limits, readers
from trioserve.api.base.answers import Answer
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import RequestBody, field
from trioserve.api.base.models import Models
from trioserve.api.base.output import generation_settings
from trioserve.api.base.reply import Reply, json
from trioserve.api.base.routes import Query, Routes, manages, quiet
from trioserve.api.openapi import gives, takes
from trioserve.errors import InvalidRequestError, NotSupportedError, UnavailableError
from trioserve.server.generation.requests import cache_owner
from trioserve.server.generation.slots import check_slot_files
from trioserve.server.model_server import ModelServer
from trioserve.types import SlotStatus, WaitingStatus
from trioserve.whole_numbers import whole_number

# -- slots


routes = Routes(of_model=True)


class _NextToken(Answer, kw_only=True):
    has_next_token: bool
    has_new_line: bool | UnsetType = UNSET
    n_remain: int | UnsetType = UNSET
    n_decoded: int


class Slot(Answer, kw_only=True):
    """A slot, and the request that it runs or has run last."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool
    state: str
    paused: bool
    encoding: bool
    id_task: int | UnsetType = UNSET
    n_prompt_tokens: int | UnsetType = UNSET
    n_prompt_tokens_processed: int | UnsetType = UNSET
    n_prompt_tokens_cache: int | UnsetType = UNSET
    params: dict[str, Any] | UnsetType = UNSET
    next_token: list[_NextToken] | UnsetType = UNSET


class _Waiting(Answer):
    id_task: int
    position: int
    n_prompt_tokens: int
    priority: int
    waited_s: float
    wait_s: float | None


class _KvCache(Answer):
    cells: int
    used: int
    copied: int


class _Cache(Answer):
    kv_bytes: int
    ram_bytes: int
    disk_bytes: int
    ram_tokens: int
    disk_tokens: int
    disk_read_bytes: int
    disk_written_bytes: int


class _Totals(Answer):
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


class _Drafts(Answer):
    type: str
    checked: int
    tokens: int
    accepted: int


class SlotsAndQueue(Answer):
    """The slots, the requests that wait for one, and figures of the server."""

    slots: list[Slot]
    queue: list[_Waiting]
    kv_cache: _KvCache
    cache: _Cache
    totals: _Totals
    drafts: list[_Drafts]


@routes.get("/slots")
@quiet
@takes(
    None,
    query={
        "fail_on_no_slot": "with any value: 503 when no slot is idle",
        "queue": "with any value: an object with the slots, the requests that wait, the KV cache, "
        "and totals",
    },
)
@gives(list[Slot] | SlotsAndQueue)
async def slots(query: Query, caller: Caller, models: Models) -> Reply:
    """Tell what each slot does. ``?fail_on_no_slot=1``: 503 when none is idle.

    A model that sleeps sleeps on; all its slots are idle.

    ``?queue=1``: an object with these slots, the requests that wait for one, and figures of the
    KV cache and of all requests so far.
    """
    server = await models.use(query.get("model"), caller)
    if not server.config.slots_endpoint:
        raise NotSupportedError(
            "This server does not support slots endpoint. Start it with `--slots`"
        )
    status = await server.status()
    if query.get("fail_on_no_slot") and all(s.task_id is not None for s in status.slots):
        raise UnavailableError("no slot available")
    owner = cache_owner(server.config, caller.api_key)
    written = [_slot(slot, server, owner) for slot in status.slots]
    if not query.get("queue"):
        return json(written)
    n = status.counters
    return json(
        SlotsAndQueue(
            written,
            [_waiting(one) for one in status.waiting],
            _KvCache(n.n_cells, n.n_cells_used, n.n_cells_copied),
            _Cache.like(n),
            _Totals(n.prompt_queries, n.cached_tokens, n.predicted_tokens),
            [_Drafts.like(one) for one in status.drafts],
        )
    )


def _waiting(one: WaitingStatus) -> _Waiting:
    """Write a place in the queue, without the owner of the task."""
    return _Waiting.like(
        one,
        id_task=one.task_id,
        n_prompt_tokens=one.n_prompt,
        waited_s=round(one.waited_s, 3),
        wait_s=None if one.wait_s is None else round(one.wait_s, 3),
    )


def _slot(slot: SlotStatus, server: ModelServer, owner: str) -> Slot:
    """Write a slot. An idle one still tells of its last request.

    Of a request of another owner it tells numbers alone.
    """
    runs = slot.task_id is not None
    written = Slot.like(slot, is_processing=runs)
    if slot.task is None:
        return written
    written.id_task = slot.task.id
    written.n_prompt_tokens = slot.n_prompt if runs else slot.n_past
    written.n_prompt_tokens_processed = max(min(slot.n_past, slot.n_prompt) - slot.n_cached, 0)
    written.n_prompt_tokens_cache = slot.n_cached
    next_token = _NextToken(has_next_token=runs, n_decoded=slot.n_decoded)
    written.next_token = [next_token]
    if slot.task.root.owner == owner:
        limit = slot.task.params.max_tokens
        next_token.has_new_line = slot.has_new_line
        next_token.n_remain = limit - slot.n_decoded if runs and limit >= 0 else -1
        written.params = generation_settings(
            slot.task.params, draft_types=server.config.draft_types
        )
    return written


@attrs.frozen(kw_only=True)
class SlotRequest(RequestBody):
    """``POST /slots/{id}`` with ``save`` or ``restore``; ``erase`` takes no body."""

    filename: str | None = field(read=readers.text_of(limits.MAX_PATH), default=None)


class _MoveTimings(Answer):
    save_ms: float | UnsetType = UNSET
    restore_ms: float | UnsetType = UNSET


class SlotAction(Answer):
    """The result of a command to a slot."""

    id_slot: int
    filename: str | UnsetType = UNSET
    n_erased: int | UnsetType = UNSET
    n_saved: int | UnsetType = UNSET
    n_written: int | UnsetType = UNSET
    n_restored: int | UnsetType = UNSET
    n_read: int | UnsetType = UNSET
    timings: _MoveTimings | UnsetType = UNSET


@routes.post("/slots/<id_slot>")
@manages
@takes(SlotRequest, query={"action": "save, restore or erase"})
@gives(SlotAction)
async def act(
    request: SlotRequest, caller: Caller, models: Models, id_slot: str, query: Query
) -> Reply:
    """Save what a slot computed last to a file, restore it from one, or erase it.

    A slot that runs is waited for.
    """
    server = await models.use(query.get("model"), caller)
    server.model.check_generates()
    await caller.keep_awake(server)
    check_slot_files(server.config)
    if (slot_id := whole_number(id_slot)) is None:
        raise InvalidRequestError("Invalid slot ID", param="id_slot")
    action, client = query.get("action"), caller.api_key
    if action == "erase":
        return json(SlotAction(slot_id, n_erased=await server.erase_slot(slot_id, client)))
    if action not in ("save", "restore"):
        raise InvalidRequestError("Invalid action", param="action")
    if (filename := request.filename) is None:
        raise InvalidRequestError.at("filename", "is required.")
    done = SlotAction(slot_id, filename)
    if action == "save":
        moved = await server.save_slot(slot_id, filename, client)
        done.n_saved, done.n_written = moved.n_tokens, moved.n_bytes
        done.timings = _MoveTimings(save_ms=moved.ms)
    else:
        moved = await server.restore_slot(slot_id, filename, client)
        done.n_restored, done.n_read = moved.n_tokens, moved.n_bytes
        done.timings = _MoveTimings(restore_ms=moved.ms)
    return json(done)
