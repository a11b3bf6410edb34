"""Slots, which can be saved to a file and restored; and LoRA adapters."""

from __future__ import annotations

from typing import Any

import attrs
from quart import Blueprint, request
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base import limits, readers, sse
from trioserve.api.base.body import read_body_as
from trioserve.api.base.connection import current_request
from trioserve.api.base.fields import (
    RequestBody,
    field,
)
from trioserve.api.base.http import json_response
from trioserve.api.base.rights import manages
from trioserve.api.base.service import awake_server, current_server
from trioserve.api.base.settings import generation_settings
from trioserve.api.llama import answers
from trioserve.api.openapi import gives, takes
from trioserve.errors import InvalidRequestError, NotSupportedError, UnavailableError
from trioserve.types import SlotStatus
from trioserve.whole_numbers import whole_number

# -- slots


blueprint = Blueprint("slots", __name__)


@blueprint.get("/slots")
@takes(
    None,
    query={
        "fail_on_no_slot": "with any value: 503 when no slot is idle",
        "queue": "with any value: an object with the slots, the requests that wait, the KV cache, "
        "and totals",
    },
)
@gives(answers.SLOTS)
async def slots() -> Response:
    """Tell what each slot does. ``?fail_on_no_slot=1``: 503 when none is idle.

    A model that sleeps sleeps on; all its slots are idle.

    ``?queue=1``: an object with these slots, the requests that wait for one, and figures of the
    KV cache and of all requests so far.
    """
    server = current_server()
    if not server.config.slots_endpoint:
        raise NotSupportedError(
            "This server does not support slots endpoint. Start it with `--slots`"
        )
    status = await server.status()
    if request.args.get("fail_on_no_slot") and all(s.task_id is not None for s in status.slots):
        raise UnavailableError("no slot available")
    owner = _current_owner()
    written = [_slot(slot, owner) for slot in status.slots]
    if not request.args.get("queue"):
        return json_response(written)
    counters = status.counters
    return json_response(
        {
            "slots": written,
            "queue": [sse.place(one) for one in status.waiting],
            "kv_cache": {
                "cells": counters.n_cells,
                "used": counters.n_cells_used,
                "copied": counters.n_cells_copied,
            },
            "cache": {
                "kv_bytes": counters.kv_bytes,
                "ram_bytes": counters.ram_bytes,
                "disk_bytes": counters.disk_bytes,
                "ram_tokens": counters.ram_tokens,
                "disk_tokens": counters.disk_tokens,
                "disk_read_bytes": counters.disk_read_bytes,
                "disk_written_bytes": counters.disk_written_bytes,
            },
            "totals": {
                "prompt_tokens": counters.prompt_queries,
                "cached_tokens": counters.cached_tokens,
                "generated_tokens": counters.predicted_tokens,
            },
            "drafts": [attrs.asdict(one) for one in status.drafts],
        }
    )


def _current_owner() -> str:
    """Whose texts the current request may see; see `CacheSharing`."""
    return current_server().resources.cache_sharing.owner(current_request().api_key)


def _slot(slot: SlotStatus, owner: str) -> dict[str, Any]:
    """Write a slot. An idle one still tells of its last request.

    Of a request of another owner it tells numbers alone.
    """
    written: dict[str, Any] = {
        "id": slot.id,
        "n_ctx": slot.n_ctx,
        "speculative": slot.speculative,
        "is_processing": slot.task_id is not None,
        "state": slot.state,
        "paused": slot.paused,
        "encoding": slot.encoding,
    }
    if slot.task is None:
        return written
    runs = slot.task_id is not None
    written |= {
        "id_task": slot.task.id,
        "n_prompt_tokens": slot.n_prompt if runs else slot.n_past,
        "n_prompt_tokens_processed": max(min(slot.n_past, slot.n_prompt) - slot.n_cached, 0),
        "n_prompt_tokens_cache": slot.n_cached,
    }
    if slot.task.root.owner != owner:
        return written | {"next_token": [{"has_next_token": runs, "n_decoded": slot.n_decoded}]}
    limit = slot.task.params.max_tokens
    written |= {
        "params": generation_settings(
            slot.task.params, draft_types=current_server().config.draft_types
        ),
        "next_token": [
            {
                "has_next_token": runs,
                "has_new_line": slot.has_new_line,
                "n_remain": limit - slot.n_decoded if runs and limit >= 0 else -1,
                "n_decoded": slot.n_decoded,
            }
        ],
    }
    return written


@attrs.frozen(kw_only=True)
class SlotRequest(RequestBody):
    """``POST /slots/{id}`` with ``save`` or ``restore``; ``erase`` takes no body."""

    filename: str = field(read=readers.text_of(limits.MAX_PATH))


@blueprint.post("/slots/<id_slot>")
@manages
@takes(SlotRequest, query={"action": "save, restore or erase"})
@gives(answers.MOVED)
async def act(id_slot: str) -> Response:
    """Save what a slot computed last to a file, restore it from one, or erase it.

    A slot that runs is waited for.
    """
    current_server().model.check_generates()
    files = (await awake_server()).slots
    files.check()
    if (slot_id := whole_number(id_slot)) is None:
        raise InvalidRequestError("Invalid slot ID", param="id_slot")
    action, owner = request.args.get("action"), _current_owner()
    if action == "erase":
        return json_response({"id_slot": slot_id, "n_erased": await files.erase(slot_id, owner)})
    if action not in ("save", "restore"):
        raise InvalidRequestError("Invalid action", param="action")
    filename = (await read_body_as(SlotRequest.parse)).filename
    head = {"id_slot": slot_id, "filename": filename}
    if action == "save":
        moved = await files.save(slot_id, filename, owner)
        names = ("n_saved", "n_written", "save_ms")
    else:
        moved = await files.restore(slot_id, filename, owner)
        names = ("n_restored", "n_read", "restore_ms")
    tokens, size, time = names
    figures = {tokens: moved.n_tokens, size: moved.n_bytes, "timings": {time: moved.ms}}
    return json_response(head | figures)
