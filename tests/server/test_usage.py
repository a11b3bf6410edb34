"""The usage of API keys: counted in memory, written to a store, and their budgets of a day."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.support.waiting import until
from trioserve.config.keys import Key
from trioserve.errors import InsufficientQuotaError, StoreError
from trioserve.server import usage as usage_module
from trioserve.server.usage import Usage
from trioserve.store import Records, Store, open_store
from trioserve.store.usage import AMOUNTS, GROUPS, UsageQuery, UsageRow, Used

#: 2026-01-31, an hour before midnight in UTC.
NOW = 1769900400.0
TODAY = "2026-01-31"
ALICE = Key(name="alice", digest=b"", daily_tokens=100)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    moment = [NOW]
    monkeypatch.setattr(usage_module.time, "time", lambda: moment[0])
    return moment


def stored(records: Records) -> dict[UsageRow, Used]:
    found = UsageQuery(start="0001-01-01", end="9999-12-31").read(records.connection)
    return {
        UsageRow(*(one[name] for name in GROUPS)): Used(*(one[name] for name in AMOUNTS))
        for one in found
    }


def use(usage: Usage, n: int, *, day: str = TODAY, key: str = "alice", model: str = "m") -> None:
    used = Used(requests=1, input_tokens=n, output_tokens=1, seconds=0.5)
    usage.add(UsageRow(day, key, model), used)


async def test_what_is_used_is_written_after_a_while_and_at_the_end(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_module, "_INTERVAL", 0.0)
    row = UsageRow(TODAY, "alice", "m")
    async with open_store() as store:
        usage = Usage()
        async with usage.kept(store):
            use(usage, 10)
            use(usage, 20)
            await until(lambda: not usage._unsaved)
            assert await store.do(stored) == {row: Used(2, 30, 0, 2, 1.0)}
            use(usage, 5, model="other")
        found = await store.do(stored)
    assert found[UsageRow(TODAY, "alice", "other")].input_tokens == 5 and len(found) == 2
    assert usage.totals["alice", "m"] == Used(2, 30, 0, 2, 1.0)


async def test_a_store_that_fails_gets_it_later(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store() as store:
        usage = Usage()
        real = Store.do

        async def fail(_store: Store, _work: object) -> None:
            raise StoreError("full")

        monkeypatch.setattr(Store, "do", fail)
        for _ in range(3):
            use(usage, 1)
            await usage.save(store)
        assert len(usage._unsaved) == 1
        monkeypatch.setattr(Store, "do", real)
        await usage.save(store)
        await usage.save(store)  # not twice
        (used,) = (await store.do(stored)).values()
        assert (used.requests, used.input_tokens) == (3, 3)


async def test_a_write_is_not_cancelled(now: list[float]) -> None:
    async with open_store() as store:
        usage = Usage()
        with trio.CancelScope() as scope:
            async with usage.kept(store):
                use(usage, 7)
                scope.cancel()
                await trio.sleep_forever()
        assert [used.input_tokens for used in (await store.do(stored)).values()] == [7]


async def test_a_budget_ends_at_midnight_and_outlives_a_restart(
    now: list[float], tmp_path: Path
) -> None:
    path = str(tmp_path / "a.db")
    async with open_store(path) as store:
        usage = Usage()
        async with usage.kept(store):
            use(usage, 98)
            usage.check(ALICE)
            use(usage, 0, model="other")
            with pytest.raises(InsufficientQuotaError, match="'alice' has used up its 100"):
                usage.check(ALICE)
            usage.check(Key(name="bob", digest=b"", daily_tokens=1))
            usage.check(Key(name="alice", digest=b""))
            usage.check(None)
    async with open_store(path) as store:
        usage = Usage()
        async with usage.kept(store):
            with pytest.raises(InsufficientQuotaError) as refusal:
                usage.check(ALICE)
            assert refusal.value.retry_after == pytest.approx(3600)
            now[0] += 3600
            usage.check(ALICE)
            use(usage, 99)  # of the day before, told late
            usage.check(ALICE)
