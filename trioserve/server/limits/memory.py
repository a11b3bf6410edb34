"""How many bytes requests hold, all together: bodies, what is made of them, prompts that wait."""

from __future__ import annotations

import ctypes
import gc
from types import TracebackType
from typing import Self

import trio

from trioserve.config import Config
from trioserve.errors import MemoryFullError, PayloadTooLargeError

#: Bytes for each token of a prompt: its id, and what the engine keeps beside it.
BYTES_PER_TOKEN = 64

#: Bytes for the values of a JSON body that was read, beside their text: for each comma one value in
#: a list, for each colon a name in an object, for each quote half a string.
_WEIGHTS = {b"[": 72, b"{": 72, b",": 44, b":": 56, b'"': 28}

#: How characters that take four bytes begin, where they are escaped.
_ESCAPES = (b"\\ud", b"\\uD")

#: Bytes that are looked at in one step, which lets no other thread run.
_STEP = 2**20

#: Seconds after a request has let go of something, until memory that is free is given back to the
#: system. It takes a millisecond, for all that was let go meanwhile.
_TRIM_DELAY = 5.0

#: Seconds after which somebody who was refused may try again.
_RETRY_AFTER = 1.0


def trim() -> None:
    """Give memory that is free back to the system. It takes a millisecond."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if malloc_trim is not None:
        malloc_trim(0)


def release_memory() -> None:
    """Give back what a model has left behind: an engine's objects refer to each other in circles.

    Objects that were exempt from collection are looked at, too; what is left of them is exempt
    again. It takes a tenth of a second, in which no other thread runs Python.
    """
    has_exempt = gc.get_freeze_count() > 0
    if has_exempt:
        gc.unfreeze()
    gc.collect()
    if has_exempt:
        gc.freeze()
    trim()


def weight_of(body: bytes) -> int:
    """Estimate what a JSON body and its values take. With some megabytes it takes milliseconds."""
    values, has_escapes = 0, False
    for start in range(0, len(body), _STEP):
        stop = start + _STEP
        values += sum(body.count(sign, start, stop) * each for sign, each in _WEIGHTS.items())
        has_escapes |= any(body.find(one, start, stop + 2) >= 0 for one in _ESCAPES)
    # Text takes four bytes a character where one character needs them.
    width = 4 if has_escapes or not body.isascii() else 1
    return len(body) * (1 + width) + values


class MemoryBudget:
    """Bytes that requests may hold.

    Of API keys, each may hold its part of them: what is there, divided by one more than the
    number of keys that hold something. So there is room for another one.

    Args:
        limit: bytes in all.
        shared: whether owners of what is held are told apart.
    """

    def __init__(self, limit: int, *, shared: bool = False) -> None:
        self.limit = limit
        self.n_held = 0
        self._shared = shared
        self._held_by: dict[str, int] = {}  # those that are not 0
        self._released = trio.Event()

    @classmethod
    def of(cls, config: Config) -> Self:
        """Make the budget of a configuration."""
        return cls(config.max_request_memory, shared=len(config.api_keys) > 1)

    def hold(self, owner: str = "") -> MemoryReservation:
        """Begin to count what a request holds."""
        return MemoryReservation(self, owner)

    def take(self, n_bytes: int, owner: str, n_more: int) -> None:
        """Let a request that holds `n_bytes` hold `n_more`.

        Raises:
            MemoryFullError: there is no room for them.
            PayloadTooLargeError: there would be none if nobody else held anything.
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
        self._count(n_more, owner)

    def give_back(self, n_bytes: int, owner: str) -> None:
        """Undo `take`."""
        self._count(-n_bytes, owner)
        self._released.set()

    def pass_on(self, n_bytes: int, old: str, new: str) -> None:
        """Count bytes for another owner, who may have any number of them."""
        self._count(-n_bytes, old)
        self._count(n_bytes, new)

    def _count(self, n_bytes: int, owner: str) -> None:
        self.n_held += n_bytes
        held = self._held_by.get(owner, 0) + n_bytes
        if held:
            self._held_by[owner] = held
        else:
            self._held_by.pop(owner, None)

    async def keep_trim(self) -> None:
        """Give memory back to the system after requests, until cancelled.

        malloc keeps what was freed: it would look as if the requests were still there.
        """
        while True:
            await self._released.wait()
            await trio.sleep(_TRIM_DELAY)
            self._released = trio.Event()
            await trio.to_thread.run_sync(trim)


class MemoryReservation:
    """What one request holds of a budget, for as long as a block lasts."""

    def __init__(self, budget: MemoryBudget, owner: str) -> None:
        self._budget = budget
        self.owner = owner
        self.n_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def grow(self, n_bytes: int) -> None:
        """Hold more. Raises what `MemoryBudget.take` raises."""
        self._budget.take(self.n_bytes, self.owner, n_bytes)
        self.n_bytes += n_bytes

    def shrink_to(self, n_bytes: int) -> None:
        """Hold only so much of it."""
        self._budget.give_back(self.n_bytes - n_bytes, self.owner)
        self.n_bytes = n_bytes

    def release(self) -> None:
        """Hold nothing. Doing so twice is fine."""
        self.shrink_to(0)

    def belongs_to(self, owner: str) -> None:
        """Count what is held, and what will be, for an owner."""
        self._budget.pass_on(self.n_bytes, self.owner, owner)
        self.owner = owner

    def detach(self) -> MemoryReservation:
        """Make another one of what is held, which outlasts the block."""
        other = MemoryReservation(self._budget, self.owner)
        other.n_bytes, self.n_bytes = self.n_bytes, 0
        return other
