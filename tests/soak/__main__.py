"""Run the soak test: ``make soak``, or ``python -m tests.soak [SECONDS]``.

It runs `trioserve` with the bundled model, sends a mixed load for this time, and prints a table of
requests and answers. It exits with 1 when something is wrong, and lists the faults.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import trio

from tests.soak import curve, verdict
from tests.soak.checked import CheckedClient, quiet_answers
from tests.soak.clients import Client
from tests.soak.process import Process, Sample, started
from tests.soak.tally import Tally

#: Clients at the same time, and seconds of the same load before the one that is measured.
N_CLIENTS, WARM_UP = 16, 60.0


async def soak(seconds: float, seed: int, saved: Path) -> tuple[Process, list[Sample]]:
    """Run the whole test. Returns the server, which has ended, and the samples."""
    tally = Tally()
    async with started(saved, tally) as server:
        source = random.Random(seed)
        quiet = await quiet_answers(Client(server.url, tally, source), source)
        clients = [
            CheckedClient(server.url, tally, random.Random(f"{seed} {number}"), quiet)
            for number in range(N_CLIENTS)
        ]
        await _load(server, clients, min(WARM_UP, seconds / 2))
        before = await verdict.settle(server)
        server.began = time.monotonic()
        samples = await _load(server, clients, seconds)
        if server.process.poll() is not None:
            tally.fault(f"the process has ended, with code {server.process.returncode}")
            return server, samples
        await clients[0].check_batches()
        await verdict.check_rest(server, before)
        verdict.check_load(tally, samples)
        await _drain(server)
    return server, samples


async def _load(server: Process, clients: Sequence[CheckedClient], seconds: float) -> list[Sample]:
    """Run the clients for some seconds."""
    samples: list[Sample] = []
    with trio.move_on_after(seconds) as load:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.count_tokens)
            nursery.start_soon(_take_samples, server, samples, load)
            for client in clients:
                nursery.start_soon(client.run)
    return samples


async def _take_samples(server: Process, samples: list[Sample], load: trio.CancelScope) -> None:
    """Take a sample a second. The load ends with the process."""
    try:
        while True:
            samples.append(server.sample())
            await trio.sleep(1)
    except OSError:
        load.cancel()


async def _drain(server: Process) -> None:
    """Send SIGTERM while two streams run: they end whole, and the process with code 0."""
    begun = trio.Event()

    async def read(client: httpx.AsyncClient) -> None:
        body = {"prompt": "Once", "n_predict": 300, "ignore_eos": True, "stream": True}
        text = ""
        async with client.stream("POST", "/completion", json=body) as answer:
            async for part in answer.aiter_text():
                text += part
                begun.set()
        if '"stop":true' not in text:
            server.tally.fault(f"a stream that ran at SIGTERM ended with {text[-200:]!r}")

    async def ask(client: httpx.AsyncClient) -> None:
        """Ask for more: it is refused, by a status or by a closed port."""
        try:
            status = (await client.get("/health")).status_code
        except httpx.TransportError:
            return
        if status not in (200, 503):
            server.tally.fault(f"/health has status {status} while the server drains")

    async with server.client() as client:
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(read, client)
                await begun.wait()
                nursery.start_soon(server.terminate)
                await trio.sleep(0.1)
                nursery.start_soon(ask, client)
        except* httpx.HTTPError as group:
            server.tally.fault(f"a stream that ran at SIGTERM broke: {group.exceptions[0]!r}")


def report(server: Process, samples: Sequence[Sample], seconds: float) -> str:
    """Write the table, and what is wrong."""
    tally = server.tally
    lines = [tally.table(), ""]
    if samples:
        first, last = samples[0], samples[-1]
        lines.append(
            f"{tally.n_requests} requests and {last.tokens} tokens in {seconds:g} seconds; "
            f"memory {first.rss_kib // 1024} to {last.rss_kib // 1024} MiB, "
            f"{verdict.growth(samples, last.seconds):+.1%} after the warm-up; "
            f"at most {max(one.descriptors for one in samples)} descriptors "
            f"and {max(one.threads for one in samples)} threads"
        )
    lines += [f"warning in the log, {n} times: {event}" for event, n in server.events.items()]
    lines += [f"FAULT: {fault}" for fault in tally.sentences()]
    return "\n".join([*lines, "", tally.verdict(), ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("seconds", nargs="?", type=float, default=600.0)
    parser.add_argument("--csv", type=Path, default=Path(".cache/soak.csv"), help="the samples")
    parser.add_argument("--svg", type=Path, help="a picture of them")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of what is sent")
    options = parser.parse_args(argv)
    print(f"{options.seconds:g} seconds, seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as saved:
        server, samples = trio.run(soak, options.seconds, options.seed, Path(saved))
    curve.write_csv(options.csv, samples)
    if options.svg is not None:
        options.svg.write_text(curve.svg(samples))
    print(report(server, samples, options.seconds), end="")
    return 1 if server.tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
