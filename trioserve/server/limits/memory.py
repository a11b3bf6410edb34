"""Memory accounting: the bytes that all requests hold in bodies, parsed values and prompts."""

from __future__ import annotations

import ctypes
import gc
from contextlib import AbstractContextManager
from typing import Self

import attrs
import trio

from trioserve.concurrency import Bell, repeat, run_in_worker
from trioserve.config import Config
from trioserve.errors import MemoryFullError, PayloadTooLargeError

#: Bytes for each token of a prompt: its id, and the engine's data for it.
BYTES_PER_TOKEN = 64

#: Bytes for the parsed values of a JSON body, in addition to their text: a list item for each
#: comma, an object member for each colon, half a string for each quote.
_WEIGHTS = {b"[": 72, b"{": 72, b",": 44, b":": 56, b'"': 28}

#: Prefixes of the escapes of characters that take four bytes.
_ESCAPES = (b"\\ud", b"\\uD")

#: Bytes that one step scans. A step holds the GIL.
_STEP = 2**20

#: Seconds between the end of a request and the trim that returns free memory to the system. One
#: trim takes a millisecond and covers all requests of that time.
_TRIM_DELAY = 5.0

#: Seconds after which a rejected client may retry.
_RETRY_AFTER = 1.0


def trim() -> None:
    """Return free memory to the system. It takes a millisecond."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if malloc_trim is not None:
        malloc_trim(0)


def release_memory() -> None:
    """Free the memory of an engine that has ended: its objects form reference cycles.

    Also collects objects that are exempt from collection, and exempts the survivors again. It takes
    a tenth of a second and holds the GIL.
    """
    has_exempt = gc.get_freeze_count() > 0
    if has_exempt:
        gc.unfreeze()
    gc.collect()
    if has_exempt:
        gc.freeze()
    trim()


def weight_of(body: bytes) -> int:
    """Estimate the bytes that a JSON body and its values take. Milliseconds for some megabytes."""
    values, has_escapes = 0, False
    for start in range(0, len(body), _STEP):
        stop = start + _STEP
        values += sum([body.count(sign, start, stop) * each for sign, each in _WEIGHTS.items()])
        has_escapes |= any(body.find(one, start, stop + 2) >= 0 for one in _ESCAPES)
    # Python stores a text with four bytes a character if one character needs them.
    width = 4 if has_escapes or not body.isascii() else 1
    return len(body) * (1 + width) + values


@attrs.define(eq=False, slots=False)
class MemoryBudget:
    """A limit of the bytes that requests may hold.

    With several owners, each may hold the limit divided by one more than the number of owners that
    hold something. This leaves room for another owner.
    """

    limit: int  # bytes in total
    _shared: bool = attrs.field(default=False, kw_only=True)  # whether each owner has a limit, too
    n_held: int = attrs.field(init=False, default=0)
    #: Of several owners; only those with more than 0.
    _held_by: dict[str, int] = attrs.field(init=False, factory=dict)
    _released: Bell = attrs.field(init=False, factory=Bell)

    @classmethod
    def of(cls, config: Config) -> Self:
        """Make the budget of a configuration."""
        return cls(config.max_request_memory, shared=config.has_several_keys)

    def hold(self, owner: str = "") -> MemoryReservation:
        """Start counting the bytes that a request holds."""
        return MemoryReservation(self, owner)

    def take(self, n_bytes: int, owner: str, n_more: int) -> None:
        """Add `n_more` bytes to a request that holds `n_bytes`.

        Raises:
            MemoryFullError: the budget has no room for them now.
            PayloadTooLargeError: they would not fit even if no other request held memory.
        """
        n_owners = len(self._held_by.keys() | {owner}) if self._shared and owner else 0
        most = self.limit // 2 if n_owners else self.limit
        if n_bytes + n_more > most:
            raise PayloadTooLargeError(
                f"The request takes {n_bytes + n_more} bytes of memory, and {most} is the most."
            )
        if self.n_held + n_more > self.limit:
            raise MemoryFullError(
                f"Requests hold as much memory as they may, {self.limit} bytes.",
                retry_after=_RETRY_AFTER,
            )
        own = self._held_by.get(owner, 0)
        if n_owners and own + n_more > self.limit // (n_owners + 1):
            raise MemoryFullError(
                f"Requests with this API key hold {own} bytes of memory, and have to leave room "
                "for other keys.",
                retry_after=_RETRY_AFTER,
            )
        self.n_held += n_more
        if self._shared:
            self._count(n_more, owner)

    def give_back(self, n_bytes: int, owner: str) -> None:
        """Return bytes that `take` has taken."""
        self.n_held -= n_bytes
        if self._shared:
            self._count(-n_bytes, owner)
        self._released.ring()

    def pass_on(self, n_bytes: int, old: str, new: str) -> None:
        """Move bytes to another owner, even above its limit."""
        if self._shared:
            self._count(-n_bytes, old)
            self._count(n_bytes, new)

    def _count(self, n_bytes: int, owner: str) -> None:
        held = self._held_by.get(owner, 0) + n_bytes
        if held:
            self._held_by[owner] = held
        else:
            self._held_by.pop(owner, None)

    async def keep_trim(self) -> None:
        """Return free memory to the system after requests, until cancelled.

        malloc keeps freed memory, which then still counts as memory of the process.
        """
        await repeat(self._trim_after_requests)

    async def _trim_after_requests(self) -> None:
        await self._released.wait()
        await trio.sleep(_TRIM_DELAY)
        await run_in_worker(trim)


@attrs.define(eq=False)
class MemoryReservation(AbstractContextManager["MemoryReservation"]):
    """The bytes that one request holds of a budget, as a context manager."""

    _budget: MemoryBudget
    owner: str
    n_bytes: int = 0

    def __exit__(self, *_error: object) -> None:
        self.release()

    def grow(self, n_bytes: int) -> None:
        """Hold more bytes. Raises what `MemoryBudget.take` raises."""
        self._budget.take(self.n_bytes, self.owner, n_bytes)
        self.n_bytes += n_bytes

    def change(self, n_bytes: int) -> None:
        """Hold more bytes, or fewer. Raises what `MemoryBudget.take` raises."""
        if n_bytes >= 0:
            self.grow(n_bytes)
        else:
            self.shrink_to(self.n_bytes + n_bytes)

    def shrink_to(self, n_bytes: int) -> None:
        """Reduce the bytes to a number."""
        self._budget.give_back(self.n_bytes - n_bytes, self.owner)
        self.n_bytes = n_bytes

    def release(self) -> None:
        """Release all bytes. A second call does nothing."""
        if self.n_bytes:
            self.shrink_to(0)

    def belongs_to(self, owner: str) -> None:
        """Count current and later bytes for an owner."""
        self._budget.pass_on(self.n_bytes, self.owner, owner)
        self.owner = owner

    def detach(self) -> MemoryReservation:
        """Move the bytes to a new reservation, which outlives the block."""
        n_bytes, self.n_bytes = self.n_bytes, 0
        return MemoryReservation(self._budget, self.owner, n_bytes)
