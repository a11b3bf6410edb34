"""The history of a response: the items of those before it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from trioserve.api.stored.items import INPUT, OUTPUT, RESPONSE, PreviousResponseError
from trioserve.api.stored.listing import Side
from trioserve.api.stored.shelf import Shelf
from trioserve.chat.messages import MAX_MESSAGES
from trioserve.errors import InvalidRequestError
from trioserve.store import Part, Records, Ref

#: Responses that one transaction looks at.
_N_AT_ONCE = 64


async def items_of(shelf: Shelf, sides: Sequence[Side], param: str) -> list[Part]:
    """Read the items on some sides of records, and count them twice: as text and as values.

    Args:
        shelf: has them.
        sides: in their order.
        param: the field that names them.

    Raises:
        InvalidRequestError: there are too many.
        PayloadTooLargeError: they take more memory than a request may. None was read.
        MemoryFullError: as above, but they may later.
    """

    def find(records: Records) -> list[Ref]:
        refs: list[Ref] = []
        for id_, side in sides:
            refs += records.refs(id_, side, limit=MAX_MESSAGES + 1)
            if len(refs) > MAX_MESSAGES:
                raise InvalidRequestError.at(param, f"continues more than {MAX_MESSAGES} items.")
        return refs

    refs = await shelf.look_up(find)
    shelf.held.grow(2 * sum(ref.size for ref in refs))
    return await shelf.store.read(refs)


async def history(shelf: Shelf, id_: str, *, is_over: bool = True) -> list[Side]:
    """The items of a response and of all before it that it continues, the oldest first.

    Args:
        shelf: has them.
        id_: of the response.
        is_over: whether it must have ended itself.

    Raises:
        PreviousResponseError: one of them is not stored any more, or is not over.
    """
    turns: list[str] = []
    at: str | None = id_
    while at is not None:
        some, at = await shelf.look_up(partial(_some, owner=shelf.owner, id_=at))
        turns += (turn for turn, _ in some)
        for turn, status in some:
            if status in ("queued", "in_progress") and (is_over or turn != id_):
                raise PreviousResponseError(
                    f"The response {turn!r:.80} is not complete.", param="previous_response_id"
                )
        if len(turns) > MAX_MESSAGES:
            raise InvalidRequestError.at(
                "previous_response_id", f"continues more than {MAX_MESSAGES} items."
            )
    return [(turn, side) for turn in reversed(turns) for side in (INPUT, OUTPUT)]


def _some(
    records: Records, *, owner: bytes, id_: str | None
) -> tuple[list[tuple[str, str]], str | None]:
    """Some responses of a history with their statuses, and the one before them."""
    turns: list[tuple[str, str]] = []
    while id_ is not None and len(turns) < _N_AT_ONCE:
        found = records.fields(id_, RESPONSE, owner, "status", "previous_response_id")
        if found is None:
            raise PreviousResponseError(
                f"The response {id_!r:.80} is not stored here, or not any more.",
                param="previous_response_id",
            )
        turns.append((id_, found[0]))
        id_ = found[1]
    return turns, id_
