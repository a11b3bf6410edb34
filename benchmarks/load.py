"""Measure servers that already run: throughput, TTFT and ITL for several numbers of clients.

    python -m benchmarks.load http://127.0.0.1:8080 http://127.0.0.1:8081 --clients 1,8

Each client sends its requests one after the other, all streamed. With several servers, rounds
alternate between them, and the last one is the base of the ratios.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from benchmarks import report
from benchmarks.driver import MAX_CLIENTS, run
from benchmarks.plan import Plan, Request
from benchmarks.stats import STREAM_METRICS, Sample, sample_of, worst_failures
from benchmarks.targets import Target, TargetError, target_of
from benchmarks.wire import APIS, Shape, words

MAX_REQUESTS = 100_000


@attrs.frozen(kw_only=True)
class Load:
    """One kind of load: how many clients, what they send, and for how long at most."""

    clients: int
    requests: int = 1  # for each client
    prompt_words: int = 32
    shared_words: int = 0  # at the front of every prompt, the same in a round
    shape: Shape = attrs.field(factory=Shape)
    keep_alive: bool = True
    timeout: float = 120.0
    max_time: float = 600.0

    def plans(self, seed: str) -> list[Plan]:
        """Make the plans of one round. The same seed makes the same prompts."""
        shared = words(self.shared_words, f"{seed} shared")
        return [
            Plan(
                requests=[
                    self._request(shared, f"{seed} {client} {number}")
                    for number in range(self.requests)
                ]
            )
            for client in range(self.clients)
        ]

    def _request(self, shared: str, seed: str) -> Request:
        return self.shape.request(words(self.prompt_words, seed), system=shared)

    def measure(self, target: Target, seed: str) -> Sample:
        """Run one round against one server."""
        result = run(
            target.address,
            self.plans(seed),
            keep_alive=self.keep_alive,
            timeout=self.timeout,
            max_time=self.max_time,
        )
        return sample_of(
            result,
            planned=self.clients * self.requests,
            expected_tokens=self.shape.max_tokens if self.shape.ignore_eos else 0,
        )


def warm_up(targets: Sequence[Target], measure: Callable[[Target, str], Sample]) -> None:
    """Measure each server once, for nothing.

    Raises:
        TargetError: a request failed, so measuring makes no sense.
    """
    for target in targets:
        sample = measure(target, "warm-up")
        if sample.failed:
            raise TargetError(f"{target.name}: warm-up failed: {'; '.join(sample.errors)}")


def interleave(
    targets: Sequence[Target],
    rounds: int,
    measure: Callable[[Target, str], Sample],
    label: str,
    note: Callable[[str], None] = lambda line: None,
) -> dict[str, list[Sample]]:
    """Measure A B A B, the order turned round every other time, and return samples by name.

    A round has the same seed for every server, so all get the same prompts.
    """
    samples: dict[str, list[Sample]] = {target.name: [] for target in targets}
    for number in range(rounds):
        order = list(targets) if number % 2 == 0 else list(reversed(targets))
        for target in order:
            sample = measure(target, f"{label} round {number}")
            samples[target.name].append(sample)
            note(f"{label}, round {number + 1} of {rounds}: {target.name}")
    return samples


def bounded(low: int, high: int) -> Callable[[str], int]:
    """Make a type for argparse: an integer between the two, both included."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not between {low} and {high}")
        return value

    return convert


def counts(text: str) -> list[int]:
    """Read numbers of clients such as ``1,5,10``."""
    return [bounded(1, MAX_CLIENTS)(part) for part in text.split(",")]


def seconds(text: str) -> float:
    """Read a time limit: more than 0 and at most an hour."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 3600")
    return value


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is sent; `compare` has them too."""
    add = parser.add_argument
    add("--clients", type=counts, default=[1, 5, 10, 20, 50], help="such as 1,5,10,20,50")
    add("--requests", type=bounded(1, MAX_REQUESTS), default=2, help="for each client")
    add("--max-tokens", type=bounded(1, 1_000_000), default=64, help="tokens of each output")
    add("--prompt-words", type=bounded(1, 100_000), default=32, help="words of each prompt")
    add("--shared-words", type=bounded(0, 100_000), default=0, help="words all prompts begin with")
    add("--api", choices=APIS, default="chat", help="which API to call")
    add("--temperature", type=float, default=0.0, help="0: greedy")
    add("--no-ignore-eos", action="store_true", help="let outputs end early; do not send the field")
    add("--model-name", default="benchmark", help="the model named in requests")
    add("--api-key", default="", help="sent as a bearer token")
    add("--no-keep-alive", action="store_true", help="a new connection for each request")
    add("--rounds", type=bounded(1, 1000), default=3, help="runs of each server")
    add("--warm-up", type=bounded(0, 1000), default=2, help="requests before, not measured")
    add("--timeout", type=seconds, default=120.0, help="seconds for one request")
    add("--max-time", type=seconds, default=600.0, help="seconds for one run of one server")
    add("--json", type=Path, default=None, help="write all samples to this file")
    add("--quiet", action="store_true", help="do not report progress on standard error")


def load_of(options: argparse.Namespace, clients: int) -> Load:
    """Make the load that the options describe."""
    shape = Shape(
        api=options.api,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        ignore_eos=not options.no_ignore_eos,
        model=options.model_name,
        api_key=options.api_key,
    )
    return Load(
        clients=clients,
        requests=options.requests,
        prompt_words=options.prompt_words,
        shared_words=options.shared_words,
        shape=shape,
        keep_alive=not options.no_keep_alive,
        timeout=options.timeout,
        max_time=options.max_time,
    )


def progress(quiet: bool) -> Callable[[str], None]:
    """Make the function that reports progress."""

    def note(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    return note


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 when a request failed, 2 when nothing could be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("urls", nargs="+", metavar="URL", help="base URL, of this machine")
    parser.add_argument("--allow-remote", action="store_true", help="measure other machines too")
    add_load_options(parser)
    options = parser.parse_args(argv)
    note = progress(options.quiet)
    results: dict[str, dict[str, list[Sample]]] = {}
    try:
        targets = [target_of(url, allow_remote=options.allow_remote) for url in options.urls]
        if len({target.name for target in targets}) < len(targets):
            raise TargetError("the same server is given twice")
        if options.warm_up:
            load = attrs.evolve(load_of(options, 1), requests=options.warm_up)
            warm_up(targets, load.measure)
    except TargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for clients in options.clients:
        label = f"{clients} clients" if clients > 1 else "1 client"
        load = load_of(options, clients)
        samples = interleave(targets, options.rounds, load.measure, label, note)
        results[label] = samples
        print(report.table(label, STREAM_METRICS, samples), flush=True)
    if options.json is not None:
        report.write_json(options.json, {"options": report.plain(options), "results": results})
    return 1 if any(worst_failures(samples) for samples in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
