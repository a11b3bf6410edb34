"""`Usage`: what API keys use, counted in memory and kept in a store; and their daily budgets."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import msgspec
import trio

from trioserve.children.reports import KeyUsage
from trioserve.concurrency import Bell, alongside, repeat
from trioserve.config.keys import Key
from trioserve.errors import InsufficientQuotaError, UnavailableError
from trioserve.log import get_logger
from trioserve.server.observers.observer import Event, RequestRecord
from trioserve.store.store import Store
from trioserve.store.usage import UsageQuery, UsageRow, Used, add_usage, day_of

_log = get_logger("trioserve.usage")

#: Seconds between two writes. A process that is killed loses what was used since the last one.
_INTERVAL = 3.0

_DAY = 86400

#: Requests that are counted together, at most.
_MANY = 256


class Usage:
    """An observer that counts what each API key uses, by day and model.

    Used on the event loop. Nothing is written for a single request: `kept` writes what has
    gathered. While the store fails, that stays in memory, as one row for each day, key and model.
    """

    def __init__(self) -> None:
        self._totals: defaultdict[tuple[str, str], Used] = defaultdict(Used)
        #: Requests that are not counted yet: when they ended, the key, the model and the amounts.
        self._ended: list[tuple[float, str, str, tuple[Any, ...]]] = []
        self._unsaved: defaultdict[UsageRow, Used] = defaultdict(Used)
        self.news = Bell()  # there is something to take
        self._day = ""
        self._tokens: Counter[str] = Counter()  # of this day, by key

    def on_event(self, event: Event) -> None:
        """Count a request that has ended, however it did."""
        if not isinstance(event, RequestRecord):
            return
        request, end = event.request, event.end
        n_input = request.n_prompt if end.had_slot else 0
        n_cached = 0 if end.timings is None else end.timings.cache_n
        amounts = (1, n_input, n_cached, end.n_output, end.total_s)
        self._ended.append((time.time(), request.key, request.model, amounts))
        self.news.ring()
        if len(self._ended) >= _MANY:
            self._count_ended()

    def _count_ended(self) -> None:
        ended, self._ended = self._ended, []
        for moment, key, model, amounts in ended:
            self.add(UsageRow(day_of(moment), key, model), Used(*amounts))

    @property
    def totals(self) -> Mapping[tuple[str, str], Used]:
        """Since the start, by the names of the key and of the model."""
        self._count_ended()
        return self._totals

    def add(self, row: UsageRow, used: Used) -> None:
        """Count what was used."""
        self._totals[row.key, row.model].add(used)
        self._put(row, used)
        self._count(row, used)

    def take_rows(self) -> list[KeyUsage]:
        """Take what was not taken before, for a report, without the model."""
        taken = self.take().items()
        return [KeyUsage(row.day, row.key, *attrs.astuple(used)) for row, used in taken]

    def add_reported(self, model: str, rows: Iterable[KeyUsage]) -> None:
        """Count what the process of a model has reported."""
        for day, key, *amounts in map(msgspec.structs.astuple, rows):
            self.add(UsageRow(day, key, model), Used(*amounts))

    def _put(self, row: UsageRow, used: Used) -> None:
        self._unsaved[row].add(used)
        self.news.ring()

    def _count(self, row: UsageRow, used: Used) -> None:
        self._turn_day()
        if row.day == self._day:
            self._tokens[row.key] += used.tokens

    def _turn_day(self) -> None:
        if (today := day_of(time.time())) != self._day:
            self._day = today
            self._tokens.clear()

    def take(self) -> Mapping[UsageRow, Used]:
        """Take what was not taken before."""
        self._count_ended()
        taken, self._unsaved = self._unsaved, defaultdict(Used)
        return taken

    # -- budgets

    def check(self, key: Key | None, n_running: int = 0) -> None:
        """Check that a key has tokens left of its budget for this day.

        Args:
            n_running: the tokens of its requests that run, which are not counted yet.

        Raises:
            InsufficientQuotaError: it has none; has the time until the next day.
        """
        if key is None or not key.daily_tokens:
            return
        self._count_ended()
        self._turn_day()
        if self._tokens[key.name] + n_running >= key.daily_tokens:
            raise InsufficientQuotaError(
                f"The API key {key.name!r} has used up its {key.daily_tokens} tokens of this day, "
                "which ends at midnight UTC.",
                retry_after=_DAY - time.time() % _DAY,
            )

    # -- the store

    @asynccontextmanager
    async def kept(self, store: Store) -> AsyncIterator[None]:
        """Read what was used today, and write what is used from now on, for a block.

        At its end it writes the rest, also when it is cancelled.

        Raises:
            StoreError: the store cannot be read.
        """
        today = day_of(time.time())
        query = UsageQuery(start=today, end=today, groups=["key"])
        for one in await store.do(lambda records: query.read(records.connection)):
            self._count(
                UsageRow(today, one["key"], ""),
                Used(0, one["input_tokens"], 0, one["output_tokens"]),
            )
        try:
            async with alongside(partial(repeat, partial(self._save_soon, store))):
                yield
        finally:
            await self.save(store)

    async def _save_soon(self, store: Store) -> None:
        await self.news.wait()
        await trio.sleep(_INTERVAL)
        await self.save(store)

    async def save(self, store: Store) -> None:
        """Write what is new. If the store fails, that is written later.

        Is not cancelled: it must be known whether it is written.
        """
        if not (counted := self.take()):
            return
        try:
            with trio.CancelScope(shield=True):
                await store.do(lambda records: add_usage(records.connection, counted))
        except Exception as error:
            _log.warning("what was used is written later", problem=str(error))
            for row, used in counted.items():
                self._put(row, used)
            if not isinstance(error, UnavailableError):
                raise
