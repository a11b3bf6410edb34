"""Drafts from n-grams, and tokens that a schema forces: with them and without, beside llama-server.

    python -m benchmarks.drafts --model M.gguf --llama-server PATH --out DIR

For each model all servers run side by side and are measured in turn. Three kinds of rows:

- edit: code is in the prompt, and is asked for again with one name changed. What the model really
  says decides: `accepted / drafted` tells how well it copies.
- json: objects whose long keys are fixed by a JSON Schema. Their tokens are forced: trioserve with
  that switched off is the base of the ratios.
- fresh: text that hardly repeats, drawn at a high temperature, where drafts can only lose.

In the rows of edit and fresh, trioserve without drafts is the base. ``--swa-full`` is among the
flags by default: without it, models with sliding windows such as Gemma 3 have no drafts.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks import report
from benchmarks.harness import Command, Flags, all_running, llama_server, trioserve
from benchmarks.load import Load, bounded, counts, interleave, progress, warm_up
from benchmarks.pair import DRAFT_METRICS, counting
from benchmarks.plan import Plan
from benchmarks.scenarios import Scenario, Settings, Streams
from benchmarks.stats import Metric, Sample, column, ratio, sample_of, worst_failures
from benchmarks.targets import Target, TargetError, ask, tokens_per_word
from benchmarks.wire import Shape, Stream, understand_all
from trioserve.bench.stats import Spread, spread

ROWS = ("edit", "json", "fresh")
TYPES = ("ngram-simple", "ngram-mod")

PLAIN = "trioserve"
UNFORCED = "trioserve, nothing forced"
PEER = "llama-server"

#: Runs trioserve so that a grammar's tokens are sampled one by one, as all others.
_UNFORCED = """
import sys
from trioserve.cli.main import main
from trioserve.engine import output
output.MAX_AHEAD = 0
sys.exit(main())
"""

_DECODE = Metric("decode tokens/s", "", more_is_better=True)
_TOKENS = Metric("tokens/s", "", more_is_better=True)

_RECORD = {
    "identification_number": {"type": "integer", "minimum": 0, "maximum": 9999},
    "shipment_status": {"enum": ["pending", "delivered", "returned"]},
    "customer_display_name": {"type": "string", "maxLength": 12},
    "requires_signature_on_delivery": {"type": "boolean"},
    "insurance_was_requested_by_customer": {"type": "boolean"},
    "estimated_delivery_in_business_days": {"type": "integer", "minimum": 0, "maximum": 99},
}
#: Enough items that no output of a benchmark reaches the end.
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": _RECORD,
        "required": list(_RECORD),
        "additionalProperties": False,
    },
    "minItems": 200,
    "maxItems": 200,
}


# -- rows


@attrs.frozen
class Edit:
    """Streams that each repeat a piece of code with one name changed.

    Each prompt is sent once before the measurement. `decode tokens/s` leaves out the time to the
    first token; it is the sum over all streams.
    """

    settings: Settings
    clients: int
    lines: int = 30

    metrics = (_DECODE, _TOKENS, *DRAFT_METRICS, Metric("ttft p50", "ms"))

    @property
    def name(self) -> str:
        """Such as "edit, 8 streams"."""
        return f"edit, {streams(self.clients)}"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        prompts = [edit_prompt(f"{seed} {client}", self.lines) for client in range(self.clients)]
        self.settings.run(target, self._plans(prompts, max_tokens=1))
        return counting(target, lambda: self._measure(target, prompts))

    def _measure(self, target: Target, prompts: Sequence[str]) -> Sample:
        n_tokens = self.settings.shape.max_tokens
        result = self.settings.run(target, self._plans(prompts, n_tokens))
        sample = sample_of(result, planned=self.clients, expected_tokens=n_tokens)
        good = [each for each in understand_all(result.outcomes) if not each.error]
        sample.numbers[_DECODE.name] = sum(map(decode_rate, good))
        return sample

    def _plans(self, prompts: Sequence[str], max_tokens: int) -> list[Plan]:
        shape = self.settings.with_tokens(max_tokens)
        return [Plan(requests=[shape.request(prompt)]) for prompt in prompts]


@attrs.frozen
class Json:
    """Streams whose output follows `SCHEMA`, after the same number of free tokens."""

    settings: Settings
    clients: int

    metrics = (
        _TOKENS,
        Metric("schema / free", "", more_is_better=True, digits=2),
        Metric("tokens / decode", "", more_is_better=True, digits=2),
    )

    @property
    def name(self) -> str:
        """Such as "json, 8 streams"."""
        return f"json, {streams(self.clients)}"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        free = attrs.evolve(self.settings.shape, api="completion")
        shape = attrs.evolve(free, ignore_eos=False, more={"json_schema": SCHEMA})
        without = Load(clients=self.clients, shape=free).measure(target, f"{seed} free")
        before = decodes(target)
        sample = Load(clients=self.clients, shape=shape).measure(target, f"{seed} schema")
        n_decodes = decodes(target) - before
        if n_decodes and sample.numbers:
            sample.numbers["tokens / decode"] = sample.numbers["tokens"] / n_decodes
        if sample.numbers and without.numbers:
            rates = sample.numbers["tokens/s"], without.numbers["tokens/s"]
            sample.numbers["schema / free"] = rates[0] / rates[1]
        return attrs.evolve(
            sample,
            requests=sample.requests + without.requests,
            failed=sample.failed + without.failed,
            errors=(*without.errors, *sample.errors),
        )


@attrs.frozen
class Fresh:
    """Streams of text that hardly repeats: it is drawn from 40 tokens at a high temperature."""

    settings: Settings
    clients: int

    metrics = (_TOKENS, Metric("itl p50", "ms", digits=2), *DRAFT_METRICS)

    @property
    def name(self) -> str:
        """Such as "fresh, 8 streams"."""
        return f"fresh, {streams(self.clients)}"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        more = {"seed": 1, "top_p": 1.0, "min_p": 0.0}
        shape = attrs.evolve(self.settings.shape, api="completion", temperature=1.5, more=more)
        load = Streams(attrs.evolve(self.settings, shape=shape), self.clients, 1)
        return counting(target, lambda: load.measure(target, seed))


def streams(count: int) -> str:
    """Say how many."""
    return f"{count} stream{'s' if count > 1 else ''}"


def decodes(target: Target) -> float:
    """Read how many batches a server has computed so far; 0 where it does not say."""
    found = re.search(r"^\S*n_decode_total (\S+)$", ask(target, "GET", "/metrics"), re.MULTILINE)
    return float(found[1]) if found else 0.0


def decode_rate(stream: Stream) -> float:
    """Return the tokens per second of one stream after the first of them."""
    return (stream.tokens - 1) / max(stream.at[-1] - stream.at[0], 1e-9)


def edit_prompt(seed: str, lines: int) -> str:
    """Ask for a piece of one of the modules here with a name changed, another for each seed."""
    rng = random.Random(seed)
    files = sorted(Path(__file__).parent.glob("*.py"))
    text = rng.choice([text for each in files if len(text := _lines(each)) > lines])
    start = rng.randrange(len(text) - lines)
    code = "\n".join(text[start : start + lines])
    name = Counter(re.findall(r"[a-z_]{4,}", code)).most_common(1)[0][0]
    new = f"{name}_{rng.randrange(10, 100)}"
    return (
        f"A piece of a program:\n\n```python\n{code}\n```\n\n"
        f"The same piece, where `{name}` is called `{new}`:\n\n```python\n"
    )


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


# -- the command


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drafts", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--model", type=Path, action="append", required=True, help="a GGUF file; may be repeated")
    add("--llama-server", type=Path, default=os.environ.get("LLAMA_SERVER"), help="the program")
    add("--rows", type=rows, default=list(ROWS), help=f"some of {','.join(ROWS)}")
    add("--clients", type=counts, default=[1, 8], help="of edit and json; fresh has the most")
    add("--max-tokens", type=bounded(2, 100_000), default=256, help="tokens of each output")
    add(
        "--both-args",
        default="-c 16384 --swa-full",
        help="more flags for all servers, as one string",
    )
    add("-t", "--threads", type=bounded(1, 512), default=2)
    add("-np", "--slots", type=bounded(1, 256), default=8)
    add("--rounds", type=bounded(1, 1000), default=5, help="runs of each server")
    add("--out", type=Path, required=True, help="the folder that gets drafts.txt and drafts.json")
    add("--quiet", action="store_true", help="do not report progress on standard error")
    return parser.parse_args(argv)


def rows(text: str) -> list[str]:
    """Read names of rows, separated by commas."""
    names = text.split(",")
    if unknown := set(names) - set(ROWS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not of {', '.join(ROWS)}")
    return names


def commands_of(options: argparse.Namespace) -> list[Command]:
    """Return how the servers are started that the rows need.

    Raises:
        TargetError: llama-server is not there.
    """
    peer = [] if options.llama_server is None else [PEER]
    wanted = ["none", *(TYPES if {"edit", "fresh"} & set(options.rows) else ())]
    commands = []
    for name in [*peer, PLAIN]:
        for kind in reversed(wanted):
            more = f"--metrics --spec-type {kind}"
            one = trioserve(more) if name == PLAIN else llama_server(options.llama_server, more)
            commands.append(attrs.evolve(one, name=_name(name, kind)))
    if "json" in options.rows:
        program = (sys.executable, "-c", _UNFORCED)
        commands.append(Command(UNFORCED, program, ("--metrics",)))
    return commands


def _name(server: str, kind: str) -> str:
    return server if kind == "none" else f"{server}, {kind}"


def scenarios(options: argparse.Namespace, settings: Settings) -> Iterator[tuple[str, Scenario]]:
    """Give each row with the name of its kind."""
    for clients in options.clients:
        if "edit" in options.rows:
            yield "edit", Edit(settings, clients)
        if "json" in options.rows:
            yield "json", Json(settings, clients)
    if "fresh" in options.rows:
        yield "fresh", Fresh(settings, max(options.clients))


def targets_of(kind: str, targets: Sequence[Target]) -> list[Target]:
    """Return the servers that a kind of row measures, the base of its ratios last."""
    names = {each.name: each for each in targets}
    if kind == "json":
        return [names[each] for each in (PEER, PLAIN, UNFORCED) if each in names]
    return [each for each in targets if each.name != UNFORCED]


def table(row: Scenario, samples: Mapping[str, Sequence[Sample]]) -> str:
    """Return a line for each server: what was measured, and the first metric over two others.

    These are the last server, and llama-server with the same drafts.
    """
    *_, base = samples
    units = [f" ({each.unit})" if each.unit else "" for each in row.metrics]
    names = [each.name + unit for each, unit in zip(row.metrics, units, strict=True)]
    lines = [[row.name, *names, f"/ {base}", f"/ {PEER}, same", "failed"]]
    for name, runs in samples.items():
        values = [spread(column(runs, each.name)) for each in row.metrics]
        written = [_cell(value, row.metrics[i].digits) for i, value in enumerate(values)]
        peer = samples.get(name.replace(PLAIN, PEER)) if name != UNFORCED else None
        for other in (samples[base], peer or ()):
            over = None if other is runs else ratio(runs, other, row.metrics[0].name)
            written.append(_cell(over, 3))
        failed = sum(each.failed for each in runs)
        lines.append([name, *written, f"{failed} of {sum(each.requests for each in runs)}"])
    return report.align(lines)


def _cell(value: Spread | None, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value.median:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def measure_model(options: argparse.Namespace, model: Path) -> Iterator[tuple[str, str, Any]]:
    """Measure all rows with one model; give the name, the tables and the samples of each.

    Raises:
        TargetError: a server could not be started, or a request failed.
    """
    more = tuple(shlex.split(options.both_args))
    flags = Flags(model=model.resolve(), threads=options.threads, slots=options.slots, more=more)
    note = progress(options.quiet)
    with (
        tempfile.TemporaryDirectory(prefix="benchmarks-") as logs,
        all_running(commands_of(options), flags, Path(logs)) as targets,
    ):
        settings = Settings(
            shape=Shape(max_tokens=options.max_tokens),
            words_per_token=1 / tokens_per_word(targets[0]),
            slots=options.slots,
        )
        warm_up(targets, Load(clients=1, shape=settings.with_tokens(32)).measure)
        for kind, row in scenarios(options, settings):
            label = f"{model.stem}: {row.name}"
            samples = interleave(
                targets_of(kind, targets), options.rounds, row.measure, label, note
            )
            yield label, f"## {label}\n\n{table(row, samples)}", samples
            if worst_failures(samples):
                raise TargetError(f"{label}: requests failed")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 2 when something could not be measured.

    What was measured is written after each row.
    """
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    shown = report.plain(options) | {"model": [str(each) for each in options.model]}
    text, results = "", {}
    try:
        for model in options.model:
            for label, written, samples in measure_model(options, model):
                print(written, flush=True)
                text += written + "\n"
                results[label] = samples
                (options.out / "drafts.txt").write_text(text, encoding="utf-8")
                content = {"options": shown, "results": results}
                report.write_json(options.out / "drafts.json", content)
    except TargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
