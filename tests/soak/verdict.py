"""Comparing the server after the load with the server before it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import httpx
import trio

from tests.soak.process import Process, Sample
from tests.soak.tally import Check, Tally

#: The part of a run that warms the server up, and its least seconds, unless that is more than
#: half the run: the heap grows for about a minute. The tenth of the run that follows, and the
#: last tenth, are compared.
_WARM_UP, _MIN_WARM_UP, _PART = 0.2, 60.0, 0.1

#: The allowed growth of memory, as a share.
MAX_GROWTH = 0.05

#: The allowed growth of descriptors and threads: the connection of the check, and workers of Trio
#: that have not ended yet.
MAX_DESCRIPTORS = 4
MAX_THREADS = 4

#: Seconds in which the server comes to rest: its timeouts, and then some.
REST = 30.0

#: Seconds after the last request in which it has returned free memory to the system.
TRIM = 7.0


def growth(samples: Sequence[Sample], seconds: float) -> float:
    """The growth of memory from the warm-up to the end, as a share."""
    warm = max(_WARM_UP * seconds, min(_MIN_WARM_UP, seconds / 2))
    early = _memory(samples, warm, warm + _PART * seconds)
    late = _memory(samples, (1 - _PART) * seconds, seconds)
    return late / early - 1 if early and late else 0.0


def _memory(samples: Sequence[Sample], start: float, end: float) -> float:
    return median([one.rss_kib for one in samples if start <= one.seconds <= end] or [0])


def check_load(tally: Tally, samples: Sequence[Sample]) -> None:
    """Note what was compared, and how the memory has grown under load."""
    compared = tally.outcomes["compared"]
    answers = f"{compared['equal']} equal, {compared['different']} different"
    is_equal = compared["equal"] > 0 and not compared["different"]
    tally.check(Check("answers as those of a quiet server", "", answers, is_equal))
    more = growth(samples, samples[-1].seconds if samples else 0.0)
    tally.check(Check("growth of memory under load", "", f"{more:+.1%}", more <= MAX_GROWTH))


async def settle(server: Process) -> Sample:
    """Wait until the server is at rest before the load; returns what it uses then."""
    await check_rest(server, None)
    await trio.sleep(TRIM)
    return server.sample()


async def check_rest(server: Process, before: Sample | None) -> None:
    """Wait until the server is at rest again, and note what is not as before the load."""
    checks = [Check("the server answers", "yes", "no", False)]
    with trio.move_on_after(REST):
        while not all(check.is_good for check in checks):
            checks = await _checks(server, before)
            await trio.sleep(0.5)
    for check in checks:
        if before is not None or not check.is_good:
            server.tally.check(check)


async def _checks(server: Process, before: Sample | None) -> list[Check]:
    try:
        async with server.client() as client:
            status = (await client.get("/health")).status_code
            answer = (await client.get("/slots?queue=1")).json()
            metrics = (await client.get("/metrics")).text.splitlines()
            now = server.sample()
    except (OSError, httpx.HTTPError, ValueError) as error:
        return [Check("the server answers", "yes", repr(error), False)]
    busy = [slot["id"] for slot in answer["slots"] if slot["is_processing"]]
    checks = [
        Check("status of /health", 200, status, status == 200),
        Check("slots in use", "none", busy or "none", not busy),
        Check("requests that wait", 0, len(answer["queue"]), not answer["queue"]),
    ]
    for name in ("num_requests_running", "num_requests_waiting"):
        start = f"trioserve:{name}{{"
        values = [line.rpartition(" ")[2] for line in metrics if line.startswith(start)]
        checks.append(Check(name, "0.0", ", ".join(values), values == ["0.0"]))
    if before is None:
        return checks
    most = before.rss_kib * (1 + MAX_GROWTH)
    return [
        *checks,
        _not_more("descriptors", before.descriptors, now.descriptors, MAX_DESCRIPTORS),
        _not_more("threads", before.threads, now.threads, MAX_THREADS),
        Check("KiB of memory", before.rss_kib, now.rss_kib, now.rss_kib <= most),
    ]


def _not_more(name: str, before: int, after: int, more: int) -> Check:
    return Check(name, before, after, after <= before + more)
