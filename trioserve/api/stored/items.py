"""The items of responses and conversations, as they are stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from trioserve.api.openai.responses.client_tools import CLIENT_TOOLS
from trioserve.api.openai.responses.input import NOT_STORED, REFERENCE, kind_of
from trioserve.api.stored.shelf import Shelf
from trioserve.errors import RecordTooLargeError, UnsupportedFieldError
from trioserve.store import Part, Record, Records, Ref, new_id

Item = dict[str, Any]

RESPONSE, CONVERSATION = "response", "conversation"
INPUT, OUTPUT, ITEMS = "input", "output", "items"

#: The prefixes of the ids of items, by type, as OpenAI has them.
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    **{tool.item: tool.prefix for tool in CLIENT_TOOLS.values()},
}


#: Items that are ever added to a conversation, which is deleted at once, while others wait. No
#: response continues a tenth of them.
_MAX_ITEMS = 100_000

#: References that are looked for in one transaction: a name may have been given to many items.
_N_AT_ONCE = 16


def with_ids(items: Iterable[Item]) -> list[Item]:
    """Give items a type and an id, unless they have them."""
    made = []
    for item in items:
        kind = item.get("type") or "message"
        id_ = item.get("id")
        if not isinstance(id_, str) or not id_:
            id_ = new_id(_PREFIXES.get(kind, "item"))
        made.append({"status": "completed", **item, "type": kind, "id": id_})
    return made


async def resolved(shelf: Shelf, items: Sequence[Any], name: str) -> list[Any]:
    """Put stored items of the client in the place of references in the field `name`.

    Raises:
        UnsupportedFieldError: there is no such item.
    """
    whole = list(items)
    places = [i for i, each in enumerate(items) if is_reference(each)]
    if not places:
        return whole

    def find(records: Records, some: Sequence[str]) -> list[Ref | None]:
        return [records.named(id_, shelf.owner, RESPONSE, CONVERSATION) for id_ in some]

    ids = list(dict.fromkeys(items[i]["id"] for i in places))
    found: dict[str, Ref | None] = {}
    for start in range(0, len(ids), _N_AT_ONCE):
        some = ids[start : start + _N_AT_ONCE]
        found |= zip(some, await shelf.look_up(partial(find, some=some)), strict=True)
    refs: list[Ref] = []
    for i in places:
        if (ref := found[items[i]["id"]]) is None:
            raise UnsupportedFieldError.at(f"{name}[{i}]", NOT_STORED)
        refs.append(ref)
    for i, item in zip(places, await shelf.values(await shelf.bodies(refs)), strict=True):
        if is_reference(item):
            raise UnsupportedFieldError.at(f"{name}[{i}]", NOT_STORED)
        whole[i] = item
    return whole


def is_reference(item: Any) -> bool:
    """True for an item that stands for a stored one."""
    if not isinstance(item, Mapping) or kind_of(item) != REFERENCE:
        return False
    return isinstance(id_ := item.get("id"), str) and bool(id_)  # what else is for others to say


def parts_of(items: Iterable[Item]) -> Iterator[Part]:
    """Make parts of items, which are found by their ids."""
    return (Part.of(n, item["id"], item) for n, item in enumerate(items))


def add_to_conversation(records: Records, conversation: Record, items: Sequence[Part]) -> None:
    """Append items to a conversation. Raises StoreFullError, RecordTooLargeError."""
    first = records.next_number(conversation.id, ITEMS)
    if first + len(items) > _MAX_ITEMS:
        raise RecordTooLargeError(f"A conversation takes at most {_MAX_ITEMS} items in all.")
    numbered = (attrs.evolve(each, n=n) for n, each in enumerate(items, first))
    records.append(conversation.id, ITEMS, numbered)
