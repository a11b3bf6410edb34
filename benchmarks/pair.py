"""A model with its draft model: trioserve and llama-server with the same pair, and without.

    python -m benchmarks.gguf_maker --preset pair pair.gguf
    python -m benchmarks.gguf_maker --preset pair-draft pair-draft.gguf
    python -m benchmarks.pair --model pair.gguf --draft pair-draft.gguf --llama-server PATH
    python -m benchmarks.pair --model M.gguf --draft head.gguf --spec-type draft-eagle3 ...

All four run side by side and are measured in turn. llama-server with the draft model is the base of
the ratios. Where a batch costs as much as its tokens one after the other, as with many quantized
models on a CPU, no draft can pay.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import attrs

from benchmarks.harness import Command, Flags, all_running, llama_server, trioserve
from benchmarks.load import Load, bounded, counts, warm_up
from benchmarks.measuring import finish, measure_in_turn
from benchmarks.plan import Plan
from benchmarks.scenarios import Settings, Streams
from benchmarks.stats import Metric, Sample, sample_of
from benchmarks.targets import Target, ask, tokens_per_word
from benchmarks.wire import Shape

_COUNTERS = ("draft_tokens_total", "accepted_tokens_total")
#: How many tokens were guessed, and how many of the guesses were right.
DRAFT_METRICS = (
    Metric("drafted / token", "", digits=2),
    Metric("accepted / drafted", "", more_is_better=True, digits=2),
)


@attrs.frozen
class Questions:
    """Clients that each ask a few questions, one after the other. Each round has its own."""

    settings: Settings
    clients: int
    requests: int
    questions: Sequence[str]

    @property
    def name(self) -> str:
        """Such as "questions, 8 clients"."""
        return f"questions, {self.clients} client{'s' if self.clients > 1 else ''}"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        count = self.clients * self.requests
        chosen = iter(Random(seed).sample(self.questions, count))
        shape = attrs.evolve(self.settings.shape, api="chat", ignore_eos=False)
        plans = [
            Plan(requests=[shape.request(next(chosen)) for _ in range(self.requests)])
            for _ in range(self.clients)
        ]
        return sample_of(self.settings.run(target, plans), planned=count)


@attrs.frozen
class Drafted:
    """Streams, and how many of the drafted tokens were accepted."""

    streams: Streams | Questions

    metrics = (*Streams.metrics, *DRAFT_METRICS)

    @property
    def name(self) -> str:
        """Such as "8 streams"."""
        return self.streams.name

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        return counting(target, lambda: self.streams.measure(target, seed))


def counting(target: Target, measure: Callable[[], Sample]) -> Sample:
    """Measure, and add the `DRAFT_METRICS` to the numbers."""
    before = counted(target)
    sample = measure()
    drafted, accepted = (b - a for a, b in zip(before, counted(target), strict=True))
    if sample.numbers.get("tokens"):
        sample.numbers["drafted / token"] = drafted / sample.numbers["tokens"]
    if drafted:
        sample.numbers["accepted / drafted"] = accepted / drafted
    return sample


def counted(target: Target) -> list[float]:
    """Read how many tokens a server has drafted and accepted so far; 0 where it does not say."""
    text = ask(target, "GET", "/metrics")
    found = [re.search(rf"^\S*num_{name} (\S+)$", text, re.MULTILINE) for name in _COUNTERS]
    return [float(match[1]) if match else 0.0 for match in found]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pair", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="the GGUF file of the model")
    add("--draft", type=Path, required=True, help="the GGUF file of its draft model")
    add("--spec-type", default="draft-simple", help="the type of drafts, such as draft-eagle3")
    add("--questions", type=Path, help="a text file, a question a line, to send in place of words")
    add("--llama-server", type=Path, default=os.environ.get("LLAMA_SERVER"), help="the program")
    add("--trioserve-args", default="", help="more flags for trioserve with the draft model")
    add("--llama-server-args", default="", help="more flags for llama-server with the draft model")
    add("--both-args", default="", help="more flags for all four, as one string")
    add("-t", "--threads", type=bounded(1, 512), default=2)
    add("-np", "--slots", type=bounded(1, 256), default=8)
    add("--clients", type=counts, default=[1, 8])
    add("--requests", type=bounded(1, 10_000), default=1, help="for each client")
    add("--max-tokens", type=bounded(1, 100_000), default=128, help="tokens of each output")
    add("--rounds", type=bounded(1, 1000), default=5, help="runs of each server")
    add("--json", type=Path, default=None, help="write all samples to this file")
    add("--quiet", action="store_true", help="do not report progress on standard error")
    return parser.parse_args(argv)


def commands_of(options: argparse.Namespace) -> list[Command]:
    """Return how the servers are started, the base of the ratios last.

    Raises:
        TargetError: llama-server is not there.
    """
    draft = shlex.quote(str(options.draft.resolve()))
    pair = f"--metrics -md {draft} --spec-type {options.spec_type}"
    commands = [
        trioserve(f"{pair} {options.trioserve_args}"),
        attrs.evolve(trioserve("--metrics"), name="trioserve, no draft"),
    ]
    if options.llama_server is not None:
        more = f"{pair} {options.llama_server_args}"
        commands += [
            attrs.evolve(llama_server(options.llama_server, "--metrics"), name="no draft"),
            llama_server(options.llama_server, more),
        ]
    return commands


def measure_all(options: argparse.Namespace, targets: Sequence[Target]) -> dict[str, object]:
    """Measure all numbers of clients, print the tables, and return the samples.

    Raises:
        TargetError: a server does not answer.
    """
    settings = Settings(
        shape=Shape(api="completion", max_tokens=options.max_tokens),
        words_per_token=1 / tokens_per_word(targets[0]),
        slots=options.slots,
    )
    warm_up(targets, Load(clients=1, requests=2, shape=settings.shape).measure)
    lines = options.questions.read_text(encoding="utf-8").splitlines() if options.questions else ()
    loads = (
        Questions(settings, clients, options.requests, lines)
        if lines
        else Streams(settings, clients, options.requests)
        for clients in options.clients
    )
    return measure_in_turn(options, targets, [Drafted(one) for one in loads])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 2 when something could not be measured."""
    options = parse(argv)
    flags = Flags(
        model=options.model.resolve(),
        threads=options.threads,
        slots=options.slots,
        more=tuple(shlex.split(options.both_args)),
    )

    def measure() -> dict[str, object]:
        with (
            tempfile.TemporaryDirectory(prefix="benchmarks-") as logs,
            all_running(commands_of(options), flags, Path(logs)) as targets,
        ):
            return measure_all(options, targets)

    return finish(options, measure)


if __name__ == "__main__":
    sys.exit(main())
