"""Drafts of a draft model, or of n-grams: both servers with them and without.

    python -m benchmarks.gguf_maker --preset pair pair.gguf
    python -m benchmarks.gguf_maker --preset pair-draft pair-draft.gguf
    python -m benchmarks.pair --model pair.gguf --draft pair-draft.gguf --llama-server PATH
    python -m benchmarks.pair --model M.gguf --draft head.gguf --spec-type draft-eagle3 ...
    python -m benchmarks.pair --model M.gguf --spec-type ngram-mod --edit --both-args --swa-full

All four run side by side and are measured in turn. llama-server with drafts is the base of the
ratios. Where a batch costs as much as its tokens one after the other, as with many quantized
models on a CPU, no draft can pay.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import attrs

from benchmarks import report
from benchmarks.driver import Plan
from benchmarks.report import Scenario, bounded, counts, finish, measure_all, warm_up
from benchmarks.scenarios import Settings, Streams, first_requests, plural
from benchmarks.servers import (
    BASE,
    OURS,
    Command,
    Flags,
    Target,
    all_running,
    ask,
    llama_server,
    trioserve,
)
from benchmarks.stats import STREAM_METRICS, Metric, Sample, sample_of
from benchmarks.wire import Shape, understand_all

_COUNTERS = ("draft_tokens_total", "accepted_tokens_total")


@attrs.frozen
class Questions:
    """Clients that each ask a few questions, one after the other. Each round has its own."""

    settings: Settings
    clients: int
    requests: int
    questions: Sequence[str]

    metrics = STREAM_METRICS

    @property
    def name(self) -> str:
        """Such as "questions, 8 clients"."""
        return f"questions, {plural(self.clients, 'client')}"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        count = self.clients * self.requests
        chosen = iter(random.Random(seed).sample(self.questions, count))
        settings = self.settings.having(api="chat", ignore_eos=False)
        plans = [
            Plan(requests=[settings.shape.request(next(chosen)) for _ in range(self.requests)])
            for _ in range(self.clients)
        ]
        return sample_of(settings.run(target, plans), planned=count)


@attrs.frozen
class Edit:
    """Streams that each repeat a piece of code with one name changed.

    Each prompt is sent once before the measurement. `decode tokens/s` leaves out the time to the
    first token; it is the sum over all streams.
    """

    settings: Settings
    clients: int
    lines: int = 30

    metrics = (
        Metric("decode tokens/s", "", more_is_better=True),
        Metric("tokens/s", "", more_is_better=True),
        Metric("ttft p50", "ms"),
    )

    @property
    def name(self) -> str:
        """Such as "edit, 8 streams"."""
        return f"edit, {plural(self.clients, 'stream')}"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        prompts = [edit_prompt(f"{seed} {client}", self.lines) for client in range(self.clients)]
        for settings in (self.settings.having(max_tokens=1), self.settings):
            plans = [Plan(requests=[settings.shape.request(prompt)]) for prompt in prompts]
            result = settings.run(target, plans)
        expected = self.settings.shape.max_tokens
        sample = sample_of(result, planned=self.clients, expected_tokens=expected)
        good = [stream for stream in understand_all(result.outcomes) if not stream.error]
        sample.numbers["decode tokens/s"] = sum(
            (stream.tokens - 1) / max(stream.at[-1] - stream.at[0], 1e-9) for stream in good
        )
        return sample


def edit_prompt(seed: str, lines: int) -> str:
    """Ask for a piece of one of the modules here with a name changed, another for each seed."""
    rng = random.Random(seed)
    files = sorted(Path(__file__).parent.glob("*.py"))
    texts = [[line for line in path.read_text().splitlines() if line.strip()] for path in files]
    text = rng.choice([text for text in texts if len(text) > lines])
    start = rng.randrange(len(text) - lines)
    code = "\n".join(text[start : start + lines])
    name = Counter(re.findall(r"[a-z_]{4,}", code)).most_common(1)[0][0]
    new = f"{name}_{rng.randrange(10, 100)}"
    return (
        f"A piece of a program:\n\n```python\n{code}\n```\n\n"
        f"The same piece, where `{name}` is called `{new}`:\n\n```python\n"
    )


@attrs.frozen
class Drafted:
    """A scenario, and how many of the drafted tokens were accepted."""

    scenario: Scenario

    @property
    def name(self) -> str:
        """That of the scenario."""
        return self.scenario.name

    @property
    def metrics(self) -> Sequence[Metric]:
        """Those of the scenario, and two more."""
        return (
            *self.scenario.metrics,
            Metric("drafted / token", "", digits=2),
            Metric("accepted / drafted", "", more_is_better=True, digits=2),
        )

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        before = self._counted(target)
        sample = self.scenario.measure(target, seed)
        after = self._counted(target)
        drafted, accepted = (end - start for start, end in zip(before, after, strict=True))
        if sample.numbers.get("tokens"):
            sample.numbers["drafted / token"] = drafted / sample.numbers["tokens"]
        if drafted:
            sample.numbers["accepted / drafted"] = accepted / drafted
        return sample

    def _counted(self, target: Target) -> list[float]:
        text = ask(target, "GET", "/metrics")
        found = [re.search(rf"^\S*num_{name} (\S+)$", text, re.MULTILINE) for name in _COUNTERS]
        return [float(match[1]) if match else 0.0 for match in found]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = report.arguments("pair", __doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="the GGUF file of the model")
    add("--draft", type=Path, help="the GGUF file of its draft model; none for n-grams")
    add("--spec-type", default="draft-simple", help="the type of drafts, such as draft-eagle3")
    add("--edit", action="store_true", help="repeat code with a name changed")
    add("--questions", type=Path, help="a text file, a question a line, to send in place of words")
    add("--llama-server", type=Path, default=os.environ.get("LLAMA_SERVER"), help="the program")
    add("--trioserve-args", default="", help="more flags for trioserve with drafts")
    add("--llama-server-args", default="", help="more flags for llama-server with drafts")
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
    draft = f" -md {shlex.quote(str(options.draft.resolve()))}" if options.draft else ""
    drafts = f"--metrics --spec-type {options.spec_type}{draft}"
    commands = [
        trioserve(f"{drafts} {options.trioserve_args}"),
        trioserve("--metrics", f"{OURS}, no draft"),
    ]
    if options.llama_server is not None:
        commands += [
            llama_server(options.llama_server, "--metrics", f"{BASE}, no draft"),
            llama_server(options.llama_server, f"{drafts} {options.llama_server_args}"),
        ]
    return commands


def scenarios_of(options: argparse.Namespace, target: Target) -> list[Scenario]:
    """Make a scenario for each number of clients.

    Raises:
        TargetError: the server does not answer.
    """
    shape = Shape(api="completion", max_tokens=options.max_tokens)
    settings = Settings(shape=shape, slots=options.slots).fit(target)

    def scenario(clients: int) -> Scenario:
        if options.edit:
            return Edit(settings, clients)
        if options.questions:
            lines = options.questions.read_text(encoding="utf-8").splitlines()
            return Questions(settings, clients, options.requests, lines)
        return Streams(settings, clients, options.requests)

    return [Drafted(scenario(clients)) for clients in options.clients]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 2 when something could not be measured."""
    options = parse(argv)
    more = tuple(shlex.split(options.both_args))
    flags = Flags(
        model=options.model.resolve(), threads=options.threads, slots=options.slots, more=more
    )

    def measure() -> dict[str, object]:
        with (
            tempfile.TemporaryDirectory(prefix="benchmarks-") as logs,
            all_running(commands_of(options), flags, Path(logs)) as targets,
        ):
            warm_up(targets, first_requests(Settings(shape=Shape(api="completion"))))
            return measure_all(options, targets, scenarios_of(options, targets[0]))

    return finish(options, measure)


if __name__ == "__main__":
    sys.exit(main())
