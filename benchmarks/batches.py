"""What batches are good for: many short chats, and an interactive stream beside them.

    python -m benchmarks.batches --model model.gguf

One server, in two tables. In the first, a batch of short chats is measured in turn with clients
that send as many, each one after another: their answers are whole, as those of a batch are. All
chats of a run share a system prompt. The time of a batch is that from the upload of its file to the
download of its answers. In the second, a few streams follow one another, beside a batch that does
not end before them, and alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from benchmarks import report
from benchmarks.driver import run
from benchmarks.harness import Flags, running, trioserve
from benchmarks.load import Load, bounded, interleave, progress, warm_up
from benchmarks.measuring import finish
from benchmarks.plan import Plan, Request
from benchmarks.stats import Metric, Numbers, Sample, ratio, sample_of, worst_failures
from benchmarks.targets import Target, TargetError, ask
from benchmarks.wire import Shape, understand_all
from trioserve.bench.prompts import words
from trioserve.models import BUNDLED

#: At least, of the output tokens a second that clients get.
FASTER = 1.2
#: At most, of the gaps of a stream alone.
LONGER = 1.3

CHATS = "/v1/chat/completions"

#: Seconds between two looks at a batch.
_INTERVAL = 0.2

THROUGHPUT = (
    Metric("tokens/s", "", more_is_better=True),
    Metric("chats/s", "", more_is_better=True),
    Metric("wall s", "s", digits=2),
)
GAPS = (
    Metric("itl p50", "ms", digits=2),
    Metric("itl p99", "ms", digits=2),
    Metric("itl max", "ms", digits=2),
    Metric("ttft p50", "ms"),
    Metric("tokens/s", "", more_is_better=True),
    Metric("batch lines/s", "", more_is_better=True, digits=2),
)


@attrs.frozen(kw_only=True)
class Chats:
    """Short chats with a common system prompt, by a batch or by clients: the target's name says."""

    count: int
    clients: int
    max_tokens: int
    system_words: int
    question_words: int
    max_time: float

    def bodies(self, seed: str) -> list[dict[str, Any]]:
        """Make the requests. The same seed makes the same."""
        system = {"role": "system", "content": words(self.system_words, f"{seed} system")}
        return [
            {
                "model": "benchmark",
                "messages": [
                    system,
                    {"role": "user", "content": words(self.question_words, f"{seed} {n}")},
                ],
                "max_tokens": self.max_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
            }
            for n in range(self.count)
        ]

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once. The two ways get different prompts, so that neither finds the other's cached.

        Raises:
            TargetError: the server does not take the batch, or does not end it.
        """
        bodies = self.bodies(f"{seed} {target.name}")
        began = time.perf_counter()
        if target.name == "batch":
            answers, n_failed = answers_of_batch(target, bodies, self.max_time)
        else:
            answers, n_failed = self._by_clients(target, bodies)
        seconds = time.perf_counter() - began
        tokens = sum(each["usage"]["completion_tokens"] for each in answers)
        numbers: Numbers = {
            "tokens/s": tokens / seconds,
            "chats/s": len(answers) / seconds,
            "wall s": seconds,
        }
        return Sample(numbers=numbers, requests=self.count, failed=n_failed)

    def _by_clients(
        self, target: Target, bodies: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], int]:
        requests = [Request("POST", CHATS, json.dumps(body).encode()) for body in bodies]
        plans = [Plan(requests=requests[n :: self.clients]) for n in range(self.clients)]
        outcomes = run(target.address, plans, max_time=self.max_time).outcomes
        good = [one for one in outcomes if one.status == 200 and not one.error]
        return [json.loads(one.body) for one in good], self.count - len(good)


@attrs.frozen(kw_only=True)
class Streams:
    """Streams one after another, beside a batch or alone: the name of the target says which."""

    load: Load
    chats: Chats

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once.

        Raises:
            TargetError: the server does not take the batch, or the batch ends too early.
        """
        if target.name == "alone":
            return self._streams(target, seed)
        with batch_beside(target, self.chats.bodies(f"{seed} {target.name}")) as n_done:
            before, began = n_done(), time.perf_counter()
            sample = self._streams(target, seed)
            n_lines, seconds = n_done() - before, time.perf_counter() - began
        sample.numbers["batch lines/s"] = n_lines / seconds
        return sample

    def _streams(self, target: Target, seed: str) -> Sample:
        load = self.load
        # Not the same prompts beside a batch and alone: the second time, they would be cached.
        plans = load.plans(f"{seed} {target.name}")
        result = run(target.address, plans, timeout=load.timeout, max_time=load.max_time)
        sample = sample_of(result, planned=load.clients * load.requests)
        gaps = [gap for stream in understand_all(result.outcomes) for gap in stream.gaps]
        sample.numbers["itl max"] = max(gaps, default=0.0) * 1e3
        return sample


# -- batches


def upload(target: Target, bodies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Begin a batch of requests. Raises TargetError: the server does not take it."""
    lines = (
        json.dumps({"custom_id": f"line {n}", "method": "POST", "url": CHATS, "body": body})
        for n, body in enumerate(bodies)
    )
    mark, head = "benchmark-4f1d", 'Content-Disposition: form-data; name="'
    form = (
        f'--{mark}\r\n{head}purpose"\r\n\r\nbatch\r\n'
        f'--{mark}\r\n{head}file"; filename="batch.jsonl"\r\n\r\n'
    )
    request = urllib.request.Request(
        f"http://{target.address.authority}{target.address.prefix}/v1/files",
        (form + "\n".join(lines) + f"\r\n--{mark}--\r\n").encode(),
        {"Content-Type": f"multipart/form-data; boundary={mark}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            file = json.load(response)
    except urllib.error.HTTPError as error:
        raise TargetError(f"{target.name}: /v1/files answered {error.code}") from None
    wanted = {"input_file_id": file["id"], "endpoint": CHATS, "completion_window": "24h"}
    return _read(ask(target, "POST", "/v1/batches", wanted, timeout=60))


def _read(text: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(text)
    return body


def look(target: Target, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Tell how far a batch is."""
    return _read(ask(target, "GET", f"/v1/batches/{batch['id']}"))


def answers_of_batch(
    target: Target, bodies: Sequence[Mapping[str, Any]], max_time: float
) -> tuple[list[dict[str, Any]], int]:
    """Run a batch. Returns its answers, and how many lines failed.

    Raises:
        TargetError: the server does not take it, or it does not end in time.
    """
    until = time.monotonic() + max_time
    batch = upload(target, bodies)
    while batch["status"] == "in_progress" and time.monotonic() < until:
        time.sleep(_INTERVAL)
        batch = look(target, batch)
    if batch["status"] != "completed":
        raise TargetError(f"{target.name}: the batch is {batch['status']} after {max_time:g} s")
    text = ask(target, "GET", f"/v1/files/{batch['output_file_id']}/content", timeout=60)
    answers = [json.loads(line)["response"]["body"] for line in text.splitlines()]
    return answers, batch["request_counts"]["failed"]


@contextmanager
def batch_beside(target: Target, bodies: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """Run a batch for the length of a block, from its first answer on.

    Yields a function that counts the answers so far.

    Raises:
        TargetError: it is over before the block is.
    """
    batch = upload(target, bodies)

    def n_done() -> int:
        found = look(target, batch)
        if found["status"] != "in_progress":
            raise TargetError(f"{target.name}: the batch is {found['status']} before the streams")
        return int(found["request_counts"]["completed"])

    while not n_done():
        time.sleep(_INTERVAL)
    try:
        yield n_done
    finally:
        ask(target, "POST", f"/v1/batches/{batch['id']}/cancel", {})
        while look(target, batch)["status"] == "cancelling":
            time.sleep(_INTERVAL)


# -- the command


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batches", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--model", type=Path, default=BUNDLED, help="the model; by default the bundled one")
    add("-t", "--threads", type=bounded(1, 1024), default=None)
    add("-np", "--slots", type=bounded(1, 256), default=8)
    add("--clients", type=bounded(1, 1024), default=8)
    add(
        "--lines",
        type=bounded(1, 50_000),
        default=2000,
        help="chats of a batch, and of all clients",
    )
    add("--max-tokens", type=bounded(1, 100_000), default=32, help="tokens of each chat's output")
    add("--system-words", type=bounded(1, 10_000), default=48, help="that all chats begin with")
    add("--question-words", type=bounded(1, 10_000), default=12)
    add("--streams", type=bounded(1, 1000), default=3, help="that follow one another")
    add("--stream-tokens", type=bounded(2, 100_000), default=400, help="of each")
    add(
        "--lines-beside",
        type=bounded(1, 50_000),
        default=2000,
        help="chats of a batch beside streams, more than it can answer meanwhile",
    )
    add("--only", choices=("throughput", "gaps"), default=None, help="leave the other table out")
    add("--rounds", type=bounded(1, 1000), default=5, help="runs of each kind")
    add("--max-time", type=float, default=1800.0, help="seconds of a run, at most")
    add("--trioserve-args", default="", help="further flags of the server")
    add("--json", type=Path, default=None, help="write all samples to this file")
    add("--log", type=Path, default=None, help="keep the log of the server")
    add("--quiet", action="store_true", help="do not report progress on standard error")
    return parser.parse_args(argv)


def measure_throughput(options: argparse.Namespace, target: Target, chats: Chats) -> Any:
    """Compare a batch with clients. Returns the samples."""
    kinds = [attrs.evolve(target, name=name) for name in ("batch", "clients")]
    warm_up(kinds, attrs.evolve(chats, count=2 * options.clients).measure)
    title, note = f"{chats.count} short chats", progress(options.quiet)
    samples = interleave(kinds, options.rounds, chats.measure, title, note)
    print(report.table(title, THROUGHPUT, samples), flush=True)
    return samples


def measure_gaps(options: argparse.Namespace, target: Target, chats: Chats) -> Any:
    """Compare streams beside a batch with those alone. Returns the samples."""
    kinds = [attrs.evolve(target, name=name) for name in ("beside", "alone")]
    load = Load(
        clients=1,
        requests=options.streams,
        shape=Shape(max_tokens=options.stream_tokens),
        max_time=options.max_time,
    )
    streams = Streams(load=load, chats=attrs.evolve(chats, count=options.lines_beside))
    warm_up(kinds, streams.measure)
    title, note = "a stream beside a batch", progress(options.quiet)
    samples = interleave(kinds, options.rounds, streams.measure, title, note)
    print(report.table(title, GAPS, samples), flush=True)
    return samples


def _verdict(name: str, value: float | None, limit: float, *, at_least: bool) -> bool:
    is_met = value is not None and (value >= limit if at_least else value <= limit)
    said = "-" if value is None else f"{value:.2f}"
    sign = ">=" if at_least else "<="
    print(f"{name}: {said}, target {sign} {limit:g}: {'met' if is_met else 'missed'}", flush=True)
    return is_met


def measure_all(options: argparse.Namespace, target: Target) -> tuple[dict[str, object], bool]:
    """Measure everything and print it. Returns the samples, and whether the targets are met.

    Raises:
        TargetError: the server does not answer, or requests failed.
    """
    chats = Chats(
        count=options.lines,
        clients=options.clients,
        max_tokens=options.max_tokens,
        system_words=options.system_words,
        question_words=options.question_words,
        max_time=options.max_time,
    )
    results: dict[str, object] = {}
    is_met = True
    for name, work in (("throughput", measure_throughput), ("gaps", measure_gaps)):
        if options.only not in (None, name):
            continue
        samples = work(options, target, chats)
        if worst_failures(samples):
            raise TargetError("requests failed")
        results[name] = samples
        if name == "throughput":
            found = ratio(samples["batch"], samples["clients"], "tokens/s")
            value = None if found is None else found.median
            is_met &= _verdict("tokens/s of the batch", value, FASTER, at_least=True)
        else:
            found = ratio(samples["beside"], samples["alone"], "itl p99")
            value = None if found is None else found.median
            is_met &= _verdict("gaps of the stream, p99", value, LONGER, at_least=False)
    return results, is_met


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 when a target is missed, 2 when nothing was measured."""
    options = parse(argv)
    flags = Flags(model=options.model, threads=options.threads, slots=options.slots)
    is_met = False

    def measure() -> dict[str, object]:
        nonlocal is_met
        with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
            log = options.log or Path(folder) / "log"
            with running(trioserve(options.trioserve_args), flags, log) as target:
                results, is_met = measure_all(options, target)
        return results

    code = finish(options, measure)
    return code or (0 if is_met else 1)


if __name__ == "__main__":
    sys.exit(main())
