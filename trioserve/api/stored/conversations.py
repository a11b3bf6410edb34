"""``/v1/conversations``: lists of items that responses continue and are added to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import attrs
from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.answers import Answer
from trioserve.api.base.app_state import current_app_state
from trioserve.api.base.body import read_body_as
from trioserve.api.base.connection import current_request
from trioserve.api.base.fields import PART, RequestBody, field, json_type, list_schema, objects
from trioserve.api.base.http import json_response, long_response
from trioserve.api.openai.responses.input import read_input
from trioserve.api.openapi import gives, takes
from trioserve.api.stored.items import (
    CONVERSATION,
    ITEMS,
    Item,
    add_to_conversation,
    parts_of,
    resolved,
    with_ids,
)
from trioserve.api.stored.listing import (
    QUERY,
    DeletedRecord,
    Page,
    Side,
    StoredItem,
    StoredItems,
    current_owner,
    missing,
    page_body,
)
from trioserve.api.stored.reading import PER_NUMBER, bodies, decoded, look_up, respond
from trioserve.chat.messages import MAX_MESSAGES
from trioserve.errors import InvalidRequestError
from trioserve.fair_limiter import offload
from trioserve.store import Part, Record, Records, Ref, new_id

blueprint = Blueprint("stored_conversations", __name__)


@json_type(list_schema(PART, MAX_MESSAGES))
def _items(value: Any) -> tuple[Item, ...]:
    return objects(value)


@attrs.frozen(kw_only=True)
class ConversationRequest(RequestBody):
    """``POST /v1/conversations``."""

    metadata: dict[str, str] = attrs.field(factory=dict)
    items: tuple[Item, ...] = field(read=_items, default=())


class Conversation(Answer):
    """A conversation, without its items."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


@attrs.frozen(kw_only=True)
class ConversationChange(RequestBody):
    """``POST /v1/conversations/{id}``."""

    metadata: dict[str, str]


@attrs.frozen(kw_only=True)
class ItemsRequest(RequestBody):
    """``POST /v1/conversations/{id}/items``."""

    items: tuple[Item, ...] = field(read=_items)


async def _made_of(items: Sequence[Item]) -> tuple[list[Item], list[Part]]:
    """Check that the items of the current request can be the input of a response.

    Returns:
        They, as they are shown, and as they are stored.
    """
    whole = await resolved(items, "items")

    def make() -> tuple[list[Item], list[Part]]:
        if whole:
            try:
                read_input({"input": whole})
            except InvalidRequestError as error:
                error.message = error.message.replace("input[", "items[")
                error.param = error.param and error.param.replace("input[", "items[")
                raise
        made = with_ids(whole)
        return made, list(parts_of(made))

    return await offload(make, current_request().held.n_bytes)


@blueprint.post("/v1/conversations")
@takes(ConversationRequest)
@gives(Conversation)
async def create() -> Response:
    """Begin a conversation."""
    wanted, own = await read_body_as(ConversationRequest.parse), current_owner()
    _, items = await _made_of(wanted.items)
    id_ = new_id("conv")
    body = {"metadata": wanted.metadata}

    def write(records: Records) -> Record:
        records.add(id_, CONVERSATION, own, body)
        made = _found(records, id_, own)
        add_to_conversation(records, made, items)
        return made

    return json_response(_shown(await current_app_state().store.do(write)))


@blueprint.get("/v1/conversations/<id_>")
@gives(Conversation)
async def show(id_: str) -> Response:
    """Give a conversation, without its items."""
    return json_response(_shown(await _find(id_)))


@blueprint.post("/v1/conversations/<id_>")
@takes(ConversationChange)
@gives(Conversation)
async def change(id_: str) -> Response:
    """Replace the metadata of a conversation."""
    wanted, own = await read_body_as(ConversationChange.parse), current_owner()

    def write(records: Records) -> Record:
        _found(records, id_, own)
        records.change(id_, {"metadata": wanted.metadata})
        return _found(records, id_, own)

    return json_response(_shown(await current_app_state().store.do(write)))


@blueprint.delete("/v1/conversations/<id_>")
@gives(DeletedRecord)
async def delete(id_: str) -> Response:
    """Delete a conversation with its items. Responses that continued it stay."""
    await _find(id_)
    await current_app_state().store.delete(id_)
    return json_response({"id": id_, "object": "conversation.deleted", "deleted": True})


@blueprint.post("/v1/conversations/<id_>/items")
@takes(ItemsRequest)
@gives(StoredItems)
async def add_items(id_: str) -> Response:
    """Add items to a conversation."""
    wanted, own = await read_body_as(ItemsRequest.parse), current_owner()
    items, parts = await _made_of(wanted.items)
    await current_app_state().store.do(
        lambda records: add_to_conversation(records, _found(records, id_, own), parts)
    )
    size = sum(len(part.body) for part in parts)
    return await long_response(lambda: page_body(items), size // PER_NUMBER)


@blueprint.get("/v1/conversations/<id_>/items")
@takes(None, query=QUERY)
@gives(StoredItems)
async def list_items(id_: str) -> Response:
    """List the items of a conversation."""
    page, own = Page.of_request(), current_owner()

    def find(records: Records) -> list[Side]:
        return [(_found(records, id_, own).id, ITEMS)]

    return await page.items(find)


@blueprint.get("/v1/conversations/<id_>/items/<item>")
@gives(StoredItem)
async def show_item(id_: str, item: str) -> Response:
    """Give one item of a conversation."""
    data = await bodies([await _item(id_, item)])
    return await respond(data, lambda: decoded(data)[0])


@blueprint.delete("/v1/conversations/<id_>/items/<item>")
@gives(Conversation)
async def delete_item(id_: str, item: str) -> Response:
    """Delete one item of a conversation."""
    conversation, found = await _find(id_), await _item(id_, item)
    await current_app_state().store.do(lambda records: records.remove(id_, ITEMS, found.n))
    return json_response(_shown(conversation))


async def _item(id_: str, item: str) -> Ref:
    own = current_owner()

    def find(records: Records) -> Ref:
        _found(records, id_, own)
        for record, side, n in records.places(item):
            if (record, side) == (id_, ITEMS):
                return records.refs(id_, ITEMS, after=n - 1, limit=1)[0]
        raise missing("item", item)

    return await look_up(find)


async def _find(id_: str) -> Record:
    own = current_owner()
    return await look_up(lambda records: _found(records, id_, own))


def _found(records: Records, id_: str, owner: bytes) -> Record:
    if (record := records.find(id_, CONVERSATION, owner)) is None:
        raise missing(CONVERSATION, id_)
    return record


def _shown(record: Record) -> dict[str, Any]:
    return {
        "id": record.id,
        "object": CONVERSATION,
        "created_at": int(record.created),
        **record.body,
    }
