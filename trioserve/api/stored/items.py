"""The items of responses and conversations, as they are stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from trioserve.api.openai.responses.client_tools import CLIENT_TOOLS
from trioserve.chat.messages import MAX_MESSAGES
from trioserve.errors import InvalidRequestError
from trioserve.store import Part, Record, Records, new_id

Item = dict[str, Any]

RESPONSE, CONVERSATION = "response", "conversation"
INPUT, OUTPUT, ITEMS = "input", "output", "items"

#: What the ids of items begin with, by the type of the item, as OpenAI has them.
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    **{tool.item: tool.prefix for tool in CLIENT_TOOLS.values()},
}


class PreviousResponseError(InvalidRequestError):
    """A response that another one is to continue cannot be continued."""

    code = "previous_response_not_found"


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


def resolved(records: Records, owner: bytes, items: Sequence[Any]) -> list[Any]:
    """Put stored items in the place of references to them; others stay as they are."""
    return [_resolved(records, owner, each) for each in items]


def _resolved(records: Records, owner: bytes, item: Any) -> Any:
    if not isinstance(item, Mapping) or not isinstance(id_ := item.get("id"), str):
        return item
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    found = records.named(id_, owner) if kind == "item_reference" else None
    return item if found is None else found.value  # what is not stored is for the handler to say


def parts_of(items: Sequence[Item], first: int = 0) -> Iterator[Part]:
    """Make parts of items, which are found by their ids."""
    return (Part.of(n, item["id"], item) for n, item in enumerate(items, first))


def history(records: Records, owner: bytes, id_: str) -> list[Item]:
    """The items of a response and of all before it that it continues.

    Raises:
        PreviousResponseError: one of them is not stored any more, or is not over.
    """
    turns: list[list[Part]] = []
    found: str | None = id_
    while found is not None:
        record = records.find(found, RESPONSE, owner)
        if record is None:
            raise PreviousResponseError(
                f"The response {found!r:.80} is not stored here, or not any more.",
                param="previous_response_id",
            )
        if record.body["status"] in ("queued", "in_progress"):
            raise PreviousResponseError(
                f"The response {found!r:.80} is not complete.", param="previous_response_id"
            )
        turns.append([*records.parts(found, INPUT), *records.parts(found, OUTPUT)])
        if sum(map(len, turns)) > MAX_MESSAGES:
            raise InvalidRequestError.at(
                "previous_response_id", f"continues more than {MAX_MESSAGES} items."
            )
        found = record.body["previous_response_id"]
    return [part.value for turn in reversed(turns) for part in turn]


def conversation_items(records: Records, id_: str) -> list[Item]:
    """The items of a conversation, the oldest first."""
    return [part.value for part in records.parts(id_, ITEMS)]


def add_to_conversation(records: Records, conversation: Record, items: Sequence[Item]) -> None:
    """Append items to a conversation."""
    n = records.next_number(conversation.id, ITEMS)
    records.append(conversation.id, ITEMS, parts_of(items, n))
