"""`Shelf`: what a client has stored, as one of its requests reads it.

It is counted in the memory of the request before it is read, in pieces between which other clients
have their turns, and decoded in a thread if it is long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self, TypeVar

import attrs

from trioserve.api.base.body import parse_json
from trioserve.api.base.caller import Caller
from trioserve.api.base.reply import Json, long_json
from trioserve.api.service import AppState
from trioserve.errors import InvalidRequestError, NotFoundError
from trioserve.fair_limiter import offload
from trioserve.server.limits.memory import MemoryReservation, weight_of
from trioserve.store import Record, Records, Ref, Store, damaged

_T = TypeVar("_T")

#: Bytes that are decoded on the event loop.
_SHORT = 32 * 1024

#: Bytes of JSON that count as a number of a list, for `Json.size`.
PER_NUMBER = 8


@attrs.frozen(eq=False)
class Shelf:
    """The records of one client."""

    store: Store
    owner: bytes  # an API key, or all clients without one
    held: MemoryReservation  # of the request

    @classmethod
    def of(cls, caller: Caller, app: AppState) -> Self:
        """The records of a caller. Raises as `AppState.store`."""
        store = app.store
        return cls(store, store.owner_of(caller.api_key), caller.held)

    async def look_up(self, work: Callable[[Records], _T]) -> _T:
        """Run work that reads. Raises as `Store.do`, and what `MemoryBudget.take` raises."""
        return await self.store.do(work, self.held.grow)

    async def find(self, kind: str, id_: str) -> Record:
        """Find a record. Raises NotFoundError: it does not exist; as `look_up`."""
        return await self.look_up(partial(self.found, kind=kind, id_=id_))

    def found(self, records: Records, kind: str, id_: str) -> Record:
        """Find a record, in the thread of the store. Raises NotFoundError: it does not exist."""
        if (record := records.find(id_, kind, self.owner)) is None:
            raise missing(kind, id_)
        return record

    async def change(self, kind: str, id_: str, **fields: Any) -> Record:
        """Change fields of a record's body. Raises as `find`, and RecordTooLargeError."""

        def write(records: Records) -> Record:
            records.change(id_, {**self.found(records, kind, id_).body, **fields})
            return self.found(records, kind, id_)

        return await self.look_up(write)

    async def delete(self, kind: str, id_: str) -> None:
        """Delete a record. Raises as `find`."""
        await self.find(kind, id_)
        await self.store.delete(id_)

    async def bodies(self, refs: Sequence[Ref]) -> list[bytes]:
        """Read parts. Raises as `look_up`, and NotFoundError: one was deleted meanwhile."""
        return [part.body for part in await self.store.read(refs, self.held.grow)]

    async def values(self, data: Sequence[bytes]) -> list[Any]:
        """Decode what was read. Raises StoreError: it is damaged; MemoryFullError."""
        n_bytes = await self._weigh(data)
        return await offload(partial(decoded, data), n_bytes, _SHORT)

    async def reply(self, data: Sequence[bytes], make: Callable[[], Any]) -> Json:
        """Answer with what was read, which `make` decodes. Raises as `values`."""
        await self._weigh(data)  # beside what was read before
        return long_json(make, self.held.n_bytes // PER_NUMBER)

    async def _weigh(self, data: Sequence[bytes]) -> int:
        """Count the memory of values, and of one more text of them; returns the bytes."""
        n_bytes = sum(map(len, data))
        weight = await offload(lambda: sum(map(weight_of, data)), n_bytes, _SHORT)
        self.held.grow(weight)
        return n_bytes


def missing(kind: str, id_: str) -> NotFoundError:
    """Make the error about what is not stored, or belongs to another API key."""
    return NotFoundError(f"There is no {kind} with the id {id_!r:.80}.")


def decoded(data: Sequence[bytes]) -> list[Any]:
    """Decode what was read, in the thread that calls this. Raises StoreError: it is damaged."""
    try:
        return [parse_json(each) for each in data]
    except InvalidRequestError:
        raise damaged() from None
