"""Whether the server is after the load what it was before."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import httpx
import trio

from tests.soak.process import Process, Sample

#: What part of a run warms the server up, and seconds that it takes at least, unless that is more
#: than half the run: the heap grows for about a minute. The tenth of the run that follows, and the
#: last tenth, are compared.
_WARM_UP, _MIN_WARM_UP, _PART = 0.2, 60.0, 0.1

#: How much more memory the server may use at the end.
MAX_GROWTH = 0.05

#: How many more descriptors and threads: a connection that is asked over, and workers of Trio's
#: that have not ended yet.
MAX_DESCRIPTORS = 4
MAX_THREADS = 4

#: Seconds in which the server comes to rest: its timeouts, and then some.
REST = 30.0


def growth(samples: Sequence[Sample], seconds: float) -> float:
    """How much more memory is in use at the end than after the warm-up, as a share of it."""
    warm = max(_WARM_UP * seconds, min(_MIN_WARM_UP, seconds / 2))
    early = _memory(samples, warm, warm + _PART * seconds)
    late = _memory(samples, (1 - _PART) * seconds, seconds)
    return late / early - 1 if early and late else 0.0


def _memory(samples: Sequence[Sample], start: float, end: float) -> float:
    return median([one.rss_kib for one in samples if start <= one.seconds <= end] or [0])


async def check_rest(server: Process, before: Sample) -> None:
    """Wait until the server is at rest again, and note what is not as before the load."""
    problems = ["the server did not answer"]
    with trio.move_on_after(REST):
        while problems:
            problems = await _unrest(server, before)
            await trio.sleep(0.5)
    for problem in problems:
        server.tally.fault(f"at rest after the load: {problem}")


async def _unrest(server: Process, before: Sample) -> list[str]:
    problems = []
    try:
        async with server.client() as client:
            if (status := (await client.get("/health")).status_code) != 200:
                problems.append(f"/health has status {status}")
            answer = (await client.get("/slots?queue=1")).json()
            metrics = (await client.get("/metrics")).text.splitlines()
            now = server.sample()
    except (OSError, httpx.HTTPError, ValueError) as error:
        return [f"the server does not answer: {error!r}"]
    if busy := [slot["id"] for slot in answer["slots"] if slot["is_processing"]]:
        problems.append(f"slots {busy} are in use")
    if answer["queue"]:
        problems.append(f"{len(answer['queue'])} requests wait")
    for name in ("trioserve:num_requests_running", "trioserve:num_requests_waiting"):
        values = [line.rpartition(" ")[2] for line in metrics if line.startswith(name + "{")]
        if values != ["0.0"]:
            problems.append(f"{name} is not 0")
    if now.descriptors > before.descriptors + MAX_DESCRIPTORS:
        problems.append(f"{now.descriptors} descriptors are open, {before.descriptors} before")
    if now.threads > before.threads + MAX_THREADS:
        problems.append(f"there are {now.threads} threads, {before.threads} before")
    return problems
