"""``/v1/conversations``: lists of items that responses continue and are added to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import attrs

from trioserve.api.base.answers import Answer
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import PART, RequestBody, field, json_type, list_schema, objects
from trioserve.api.base.reply import Reply, json, long_json
from trioserve.api.base.routes import Query, Routes
from trioserve.api.base.stored import bring
from trioserve.api.openai.responses.input import read_input
from trioserve.api.openapi import gives, takes
from trioserve.api.service import AppState
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
    deleted,
    page_of,
)
from trioserve.api.stored.shelf import PER_NUMBER, Shelf, decoded, missing
from trioserve.chat.messages import MAX_MESSAGES
from trioserve.errors import InvalidRequestError, UnknownFileError
from trioserve.fair_limiter import offload
from trioserve.store import Part, Record, Records, Ref, new_id

routes = Routes()


@json_type(list_schema(PART, MAX_MESSAGES))
def _items(value: Any) -> tuple[Item, ...]:
    return objects(value)


@attrs.frozen(kw_only=True)
class ConversationRequest(RequestBody):
    """``POST /v1/conversations``."""

    metadata: dict[str, str] = attrs.field(factory=dict)
    items: tuple[Item, ...] = field(read=_items, default=())


class Conversation(Answer, kw_only=True):
    """A conversation, without its items."""

    id: str
    object: Literal["conversation"] = "conversation"
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


async def _made_of(
    shelf: Shelf, items: Sequence[Item], caller: Caller, app: AppState
) -> tuple[list[Item], list[Part]]:
    """Check that the items of a request can be the input of a response.

    Returns:
        They, as they are shown, and as they are stored.
    """
    whole = await resolved(shelf, items, "items")

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

    try:
        return await offload(make, shelf.held.n_bytes)
    except UnknownFileError:
        await bring(whole, shelf.held.n_bytes, caller, app)
    return await offload(make, shelf.held.n_bytes)


@routes.post("/v1/conversations")
@takes(ConversationRequest)
@gives(Conversation)
async def create(request: ConversationRequest, caller: Caller, app: AppState) -> Reply:
    """Begin a conversation."""
    shelf = Shelf.of(caller, app)
    _, items = await _made_of(shelf, request.items, caller, app)
    id_, body = new_id("conv"), {"metadata": request.metadata}

    def write(records: Records) -> Record:
        records.add(id_, CONVERSATION, shelf.owner, body)
        made = shelf.found(records, CONVERSATION, id_)
        add_to_conversation(records, made, items)
        return made

    return json(_shown(await shelf.store.do(write)))


@routes.get("/v1/conversations/<id_>")
@gives(Conversation)
async def show(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Give a conversation, without its items."""
    return json(_shown(await Shelf.of(caller, app).find(CONVERSATION, id_)))


@routes.post("/v1/conversations/<id_>")
@takes(ConversationChange)
@gives(Conversation)
async def change(request: ConversationChange, caller: Caller, app: AppState, id_: str) -> Reply:
    """Replace the metadata of a conversation."""
    shelf = Shelf.of(caller, app)
    return json(_shown(await shelf.change(CONVERSATION, id_, metadata=request.metadata)))


@routes.delete("/v1/conversations/<id_>")
@gives(DeletedRecord)
async def delete(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """Delete a conversation with its items. Responses that continued it stay."""
    await Shelf.of(caller, app).delete(CONVERSATION, id_)
    return deleted("conversation.deleted", id_)


@routes.post("/v1/conversations/<id_>/items")
@takes(ItemsRequest)
@gives(StoredItems)
async def add_items(request: ItemsRequest, caller: Caller, app: AppState, id_: str) -> Reply:
    """Add items to a conversation."""
    shelf = Shelf.of(caller, app)
    items, parts = await _made_of(shelf, request.items, caller, app)

    def write(records: Records) -> None:
        add_to_conversation(records, shelf.found(records, CONVERSATION, id_), parts)

    await shelf.store.do(write)
    size = sum(len(part.body) for part in parts)
    return long_json(lambda: page_of(items), size // PER_NUMBER)


@routes.get("/v1/conversations/<id_>/items")
@takes(None, query=QUERY)
@gives(StoredItems)
async def list_items(query: Query, caller: Caller, app: AppState, id_: str) -> Reply:
    """List the items of a conversation."""
    shelf = Shelf.of(caller, app)

    def find(records: Records) -> list[Side]:
        return [(shelf.found(records, CONVERSATION, id_).id, ITEMS)]

    return await Page.of(query).items(shelf, find)


@routes.get("/v1/conversations/<id_>/items/<item>")
@gives(StoredItem)
async def show_item(query: Query, caller: Caller, app: AppState, id_: str, item: str) -> Reply:
    """Give one item of a conversation."""
    shelf = Shelf.of(caller, app)
    data = await shelf.bodies([await _item(shelf, id_, item)])
    return await shelf.reply(data, lambda: decoded(data)[0])


@routes.delete("/v1/conversations/<id_>/items/<item>")
@gives(Conversation)
async def delete_item(query: Query, caller: Caller, app: AppState, id_: str, item: str) -> Reply:
    """Delete one item of a conversation."""
    shelf = Shelf.of(caller, app)
    conversation, found = await shelf.find(CONVERSATION, id_), await _item(shelf, id_, item)
    await shelf.store.do(lambda records: records.remove(id_, ITEMS, found.n))
    return json(_shown(conversation))


async def _item(shelf: Shelf, id_: str, item: str) -> Ref:
    def find(records: Records) -> Ref:
        shelf.found(records, CONVERSATION, id_)
        for record, side, n in records.places(item):
            if (record, side) == (id_, ITEMS):
                return records.refs(id_, ITEMS, after=n - 1, limit=1)[0]
        raise missing("item", item)

    return await shelf.look_up(find)


def _shown(record: Record) -> Conversation:
    return Conversation(id=record.id, created_at=int(record.created), **record.body)
