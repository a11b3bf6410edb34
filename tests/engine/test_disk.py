"""Texts that an engine has left on disk, and another one starts from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.engine_harness import Harness
from tests.support.waiting import until
from trioserve.engine import DiskCache
from trioserve.testing import ScriptedBackend
from trioserve.types import CacheRoot, Finished

SYSTEM = "s" * 200
CHAT = SYSTEM + "U" + "u" * 60 + "A"


@contextmanager
def serving(folder: Path, *, cache_ram: int = 2**20, **shape: int | bool) -> Iterator[Harness]:
    """Run an engine with its folder, and end it as when a server stops."""
    backend = ScriptedBackend(lambda _: "yes", **{"n_slots": 2, "n_ctx": 2000, **shape})
    disk = DiskCache(folder, 2**24, backend.state_identity, cuttable=backend.cuttable)
    harness = Harness(backend, cache_ram=cache_ram, disk=disk)
    harness.engine.start_helpers()
    try:
        yield harness
    finally:
        harness.engine._close()


async def finished(harness: Harness, task_id: int, prompt: str, **options: object) -> Finished:
    harness.submit(task_id, prompt, **options)

    def ends() -> bool:
        harness.step()
        return any(isinstance(event, Finished) for event in harness.events[task_id])

    await until(ends)
    return harness.finish(task_id)


async def settle(harness: Harness) -> None:
    """Do all that waits until no task runs."""
    await until(lambda: not harness.engine._tidy(is_soon=False))


SHAPES = pytest.mark.parametrize(
    "shape",
    [
        {},
        {"n_ctx_seq": 1000},
        {"is_elastic": True},
        {"can_cut": False},
        {"can_cut": False, "is_elastic": True},
    ],
    ids=["unified", "split", "elastic", "recurrent", "recurrent, elastic"],
)


@SHAPES
async def test_the_next_turn_starts_from_disk(tmp_path: Path, shape: dict[str, int]) -> None:
    with serving(tmp_path, **shape) as first:
        await finished(first, 1, CHAT)
    with serving(tmp_path, **shape) as second:
        timings = (await finished(second, 1, CHAT + "yes" + "U2A")).timings
        assert timings.cache_n == len(CHAT + "yes")
        assert second.text(1) == "yes"
        counters = second.engine.status().counters
        assert (counters.disk_tokens, counters.ram_tokens) == (timings.cache_n, 0)
        assert counters.disk_read_bytes > 0
        await finished(second, 2, CHAT + "yes" + "U2A" + "yesU3A")
        assert second.engine.status().counters.disk_tokens == timings.cache_n, "it is here now"


@SHAPES
async def test_another_chat_starts_from_the_part_that_it_shares(
    tmp_path: Path, shape: dict[str, int]
) -> None:
    with serving(tmp_path, **shape) as first:
        await finished(first, 1, CHAT, divergence_points=(len(SYSTEM),))
    with serving(tmp_path, **shape) as second:
        timings = (await finished(second, 1, SYSTEM + "hello")).timings
        assert timings.cache_n == len(SYSTEM)
        assert second.text(1) == "yes"


@SHAPES
async def test_idle_sequences_are_written_before_a_kill(
    tmp_path: Path, shape: dict[str, int]
) -> None:
    with serving(tmp_path, **shape) as killed:
        await finished(killed, 1, CHAT)
        await settle(killed)
        n_written = killed.engine.status().counters.disk_written_bytes
        assert n_written > 0
        with serving(tmp_path, **shape) as second:
            timings = (await finished(second, 1, CHAT + "yesU2A")).timings
            assert timings.cache_n == len(CHAT + "yes")
        await settle(killed)
        assert killed.engine.status().counters.disk_written_bytes == n_written


async def test_states_that_leave_ram_are_written(tmp_path: Path) -> None:
    with serving(tmp_path, cache_ram=2500, n_slots=1, n_seqs=1) as small:  # 4 bytes a token
        for i in range(4):
            await finished(small, i, f"{i}" * 300)
        timings = (await finished(small, 9, "0" * 300 + "more")).timings
        assert timings.cache_n >= 300
        assert small.engine.status().counters.disk_tokens >= 300


async def test_another_owner_does_not_find_it(tmp_path: Path) -> None:
    owner, other = CacheRoot(owner="a"), CacheRoot(owner="b")
    with serving(tmp_path) as first:
        await finished(first, 1, CHAT, root=owner)
    with serving(tmp_path) as second:
        assert (await finished(second, 1, CHAT, root=other)).timings.cache_n == 0
        assert (await finished(second, 2, CHAT)).timings.cache_n == 0
        assert (await finished(second, 3, CHAT + "!", root=owner)).timings.cache_n == len(CHAT)


async def test_a_prompt_that_must_not_be_cached_is_not_read(tmp_path: Path) -> None:
    with serving(tmp_path) as first:
        await finished(first, 1, CHAT)
    with serving(tmp_path) as second:
        done = await finished(second, 1, CHAT, cache_prompt=False)
        assert done.timings.cache_n == 0
        assert second.engine.status().counters.disk_read_bytes == 0


async def test_an_erased_text_is_gone(tmp_path: Path) -> None:
    with serving(tmp_path) as first:
        done = await finished(first, 1, CHAT)
        await settle(first)
        first.engine.erase_slot(done.slot_id, "")
    with serving(tmp_path) as second:
        assert (await finished(second, 1, CHAT + "!")).timings.cache_n == 0


async def test_a_state_that_does_not_fit_is_computed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trioserve.errors import InvalidRequestError

    with serving(tmp_path) as first:
        await finished(first, 1, CHAT)
    with serving(tmp_path) as second:

        def refuse(_seq: int, _data: bytes) -> None:
            raise InvalidRequestError("The saved state does not fit.")

        monkeypatch.setattr(second.backend, "restore", refuse)
        done = await finished(second, 1, CHAT + "!")
        assert done.timings.cache_n == 0 and second.text(1) == "yes"


async def test_a_request_may_be_cancelled_while_it_is_read(tmp_path: Path) -> None:
    with serving(tmp_path) as first:
        await finished(first, 1, CHAT)
    with serving(tmp_path) as second:
        second.submit(1, CHAT + "!")
        second.step()
        second.engine.cancel(1)
        await finished(second, 2, "another")
        assert not second.events[1]
        assert not second.engine.has_work
