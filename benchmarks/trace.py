"""The time of a short request, from its first byte to its first token, part by part.

    python -m benchmarks.trace --model MODEL.gguf --llama-server PATH --out DIR

trioserve runs with a clock at each step of a request. `trace.svg` has a panel for each number of
clients with the median of each part; llama-server says only how long its prefill took, and the
client how long both took in all.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs

from benchmarks import report
from benchmarks.driver import Outcome, Plan
from benchmarks.report import bounded, counts, progress, warm_up
from benchmarks.scenarios import Settings, Streams, first_requests, plural
from benchmarks.servers import (
    BASE,
    OURS,
    Command,
    Flags,
    Target,
    TargetError,
    all_running,
    exit_on_sigterm,
    llama_server,
)
from benchmarks.wire import Shape, understand
from trioserve.bench import plot
from trioserve.bench.report import machine
from trioserve.bench.stats import Spread, percentile

_HEADER = "X-Trace"

#: The notes of a request, in this order, each with the part of its way since the note before.
PARTS = {
    "read": "connect and read",
    "opened": "parse, check, render, tokenize",
    "taken": "wait for the running step, or for others",
    "turn": "wait for a slot",
    "placed": "get a KV sequence, evict another",
    "begun": "schedule the step",
    "computed": "prefill",
    "sampled": "sample and detokenize",
    "flushed": "end the step",
    "delivered": "wake the event loop",
    "written": "write the event",
    "received": "reach the client",
}
PREFILL, WHOLE = PARTS["computed"], "time to the first token"

Marks = dict[str, Any]


# -- in the server


class Recorder:
    """Notes when a request gets to each of `PARTS`."""

    def __init__(self) -> None:
        self.marks: list[Marks] = []
        self._of_task: dict[int, Marks] = {}
        self._current: ContextVar[Marks] = ContextVar("marks")
        self._turn = self._read = 0.0

    def note(self, task_id: int, part: str, *, again: bool = False) -> None:
        """Note that a task has got to a part; with `again`, for the last time so far."""
        marks = self._of_task.get(task_id)
        if marks is not None and (again or part not in marks):
            marks[part] = perf_counter()

    def install(self) -> None:
        """Put the clocks into trioserve."""
        from trioserve.api.edge.tcp import HTTP1, TCPConnection
        from trioserve.engine.cache.prefix_cache import PrefixCache
        from trioserve.engine.decoder import BatchDecoder
        from trioserve.engine.engine import Engine
        from trioserve.engine.output import Outputs
        from trioserve.engine.slot import Slot
        from trioserve.server.dispatch import Dispatcher, Mailbox

        before, after = (functools.partial(_hook, before=first) for first in (True, False))
        before(HTTP1, "_handle_events", self._on_read)
        before(HTTP1, "_create_stream", self._on_request)
        after(Dispatcher, "open", lambda _, task_id, *__: self._on_open(task_id))
        before(Engine, "_obey", self._on_command)
        before(PrefixCache, "start", self._on_turn)
        after(Slot, "take", self._on_slot)
        before(BatchDecoder, "decode", functools.partial(self._on_prompts, "begun"))
        after(BatchDecoder, "decode", functools.partial(self._on_prompts, "computed"))
        after(Outputs, "accept", lambda _, request, *__: self.note(request.task.id, "sampled"))
        before(Engine, "_flush", self._on_flush)
        before(Mailbox, "put", self._on_event)
        self._before_sending(TCPConnection)

    def _on_read(self, _: object) -> None:
        self._read = perf_counter()

    def _on_request(self, _: object, request: Any) -> None:
        for name, value in request.headers:
            if name == _HEADER.lower().encode():
                marks = {"id": value.decode(), "read": self._read}
                self.marks.append(marks)
                self._current.set(marks)

    def _on_open(self, task_id: int) -> None:
        if (marks := self._current.get(None)) is not None:
            self._of_task[task_id] = marks
            self.note(task_id, "opened")

    def _on_command(self, _: object, command: Any) -> None:
        if (task := getattr(command, "task", None)) is not None:
            self.note(task.id, "taken")

    def _on_turn(self, *_: object) -> None:
        self._turn = perf_counter()

    def _on_slot(self, _: object, request: Any, *__: object) -> None:
        marks = self._of_task.get(request.task.id)
        if marks is not None and "placed" not in marks:
            marks["turn"] = self._turn
            self.note(request.task.id, "placed")

    def _on_prompts(self, part: str, _: object, plan: Any, *__: object) -> None:
        for piece in plan.others:
            if not piece.in_decode and piece.slot.request is not None:
                self.note(piece.slot.request.task.id, part, again=part == "computed")

    def _on_flush(self, engine: Any) -> None:
        for event in engine._fresh:
            if getattr(event, "tokens", ()):
                for task_id in getattr(event, "task_ids", None) or [event.task_id]:
                    self.note(task_id, "flushed")

    def _on_event(self, mailbox: Any, event: Any) -> None:
        if getattr(event, "tokens", ()):
            self.note(mailbox.task_id, "delivered")

    def _before_sending(self, owner: Any) -> None:
        inner = owner.protocol_send

        async def with_note(connection: object, event: Any) -> None:
            marks, data = self._current.get(None), getattr(event, "data", b"")
            if marks is not None and "delivered" in marks and b"data: " in data:
                marks.setdefault("written", perf_counter())
            await inner(connection, event)

        owner.protocol_send = with_note


def _hook(owner: type, name: str, call: Callable[..., object], *, before: bool) -> None:
    """Call a function before or after each call of a method, with the same arguments."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def with_note(*args: Any, **more: Any) -> Any:
        if before:
            call(*args)
        result = inner(*args, **more)
        if not before:
            call(*args)
        return result

    setattr(owner, name, with_note)


def serve(path: Path, argv: Sequence[str]) -> int:
    """Run trioserve with a `Recorder`; its marks are written to a file at the end."""
    from trioserve.cli.main import main as trioserve

    recorder = Recorder()
    recorder.install()
    try:
        return trioserve(argv)
    finally:
        path.write_text(json.dumps(recorder.marks), encoding="utf-8")


# -- beside it


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = report.arguments("trace", __doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="the GGUF file that both serve")
    add("--llama-server", type=Path, default=os.environ.get("LLAMA_SERVER") or None)
    add("--clients", type=counts, default=[1, 8, 16], help="with commas")
    add("--requests", type=bounded(1, 10_000), default=4, help="for each client, one by one")
    add("--prompt-tokens", type=bounded(1, 100_000), default=19)
    add("--rounds", type=bounded(1, 1000), default=5, help="runs of each server")
    add("-np", "--slots", type=bounded(1, 256), default=8)
    add("--out", type=Path, required=True, help="folder for trace.json, trace.svg and logs")
    add("--quiet", action="store_true", help="do not report progress on standard error")
    return parser.parse_args(argv)


@attrs.frozen
class Seen:
    """A request as its client saw it: when it was sent, and when its first token came."""

    id: str
    sent: float
    received: float
    prefill: float  # seconds, as the server reports them


def measure_one(
    settings: Settings, target: Target, n_clients: int, seed: str, options: argparse.Namespace
) -> list[Seen]:
    """Run a round against one server.

    Raises:
        TargetError: a request failed.
    """
    streams = Streams(settings, n_clients, options.requests, options.prompt_tokens)
    names = {}
    plans = []
    for client, plan in enumerate(streams.plans(seed)):
        requests = []
        for number, request in enumerate(plan.requests):
            names[client, number] = name = f"{seed} {client} {number}"
            requests.append(attrs.evolve(request, headers=(*request.headers, (_HEADER, name))))
        plans.append(Plan(requests=requests))
    result = settings.run(target, plans)
    seen, numbers = [], [itertools.count() for _ in range(n_clients)]
    for outcome in sorted(result.outcomes, key=lambda one: one.sent):
        stream = understand(outcome)
        if stream.error:
            raise TargetError(f"{target.name}: {stream.error}")
        name = names[outcome.client, next(numbers[outcome.client])]
        seen.append(Seen(name, outcome.sent, outcome.sent + stream.ttft, _prefill_of(outcome)))
    return seen


def _prefill_of(outcome: Outcome) -> float:
    """Read how long the prefill took, from the last event that says it."""
    for line in reversed(outcome.body.decode(errors="replace").splitlines()):
        if line.startswith("data: {") and "prompt_ms" in line:
            return float(json.loads(line[6:])["timings"]["prompt_ms"]) / 1e3
    return 0.0


def parts_of(marks: Sequence[Marks], seen: Sequence[Seen]) -> dict[str, list[float]]:
    """Return the milliseconds of each part, and of all, for the requests that were traced."""
    by_id = {one["id"]: one for one in marks}
    found: dict[str, list[float]] = {}
    for one in seen:
        mine = {**by_id.get(one.id, {}), "received": one.received}
        if any(part not in mine for part in PARTS):
            continue  # its output began with what is no text
        before = one.sent
        for part, title in PARTS.items():
            found.setdefault(title, []).append((mine[part] - before) * 1e3)
            before = mine[part]
        found.setdefault(WHOLE, []).append((one.received - one.sent) * 1e3)
    return found


def measure(options: argparse.Namespace) -> dict[int, dict[str, dict[str, list[float]]]]:
    """Measure both in turn; returns the samples by clients, server and part.

    Raises:
        TargetError: a server cannot be started, or a request failed.
    """
    marks = options.out / "marks.json"
    program = (sys.executable, "-m", "benchmarks.trace", "--serve", str(marks))
    commands = [Command(OURS, program)]
    if options.llama_server is not None:
        commands.append(llama_server(options.llama_server))
    flags, note = Flags(model=options.model.resolve(), slots=options.slots), progress(options.quiet)
    seen: dict[int, dict[str, list[Seen]]] = {}
    with all_running(commands, flags, options.out / "logs") as targets:
        settings = Settings(shape=Shape(api="completion")).fit(targets[0])
        warm_up(targets, first_requests(settings))
        for number, n_clients in itertools.product(range(options.rounds), options.clients):
            for target in targets if number % 2 == 0 else reversed(targets):
                seed = f"trace {n_clients} {number}"
                its = measure_one(settings, target, n_clients, seed, options)
                seen.setdefault(n_clients, {}).setdefault(target.name, []).extend(its)
                note(f"{n_clients} clients, round {number + 1}: {target.name}")
    noted = json.loads(marks.read_text(encoding="utf-8"))
    found: dict[int, dict[str, dict[str, list[float]]]] = {}
    for n_clients, by_server in seen.items():
        ours = parts_of(noted, by_server.pop(OURS))
        if not ours:
            raise TargetError("no request was traced")
        found[n_clients] = {OURS: ours}
        for name, its in by_server.items():
            whole = [(one.received - one.sent) * 1e3 for one in its]
            prefill = [one.prefill * 1e3 for one in its]
            found[n_clients][name] = {PREFILL: prefill, WHOLE: whole}
    return found


def panels(found: Mapping[int, Mapping[str, Mapping[str, Sequence[float]]]]) -> list[plot.Panel]:
    """Make a panel for each number of clients, with the parts in their order."""
    return [
        plot.Panel(
            title=f"{plural(n_clients, 'client')} at once, ms",
            more_is_better=False,
            rows=[_row(title, by_server) for title in (*PARTS.values(), WHOLE)],
        )
        for n_clients, by_server in found.items()
    ]


def _row(title: str, by_server: Mapping[str, Mapping[str, Sequence[float]]]) -> plot.Row:
    values = {
        server: Spread(*(percentile(parts[title], share) for share in (0.5, 0.25, 0.75)))
        for server, parts in by_server.items()
        if parts.get(title)
    }
    return plot.Row(label=title, values=values)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 2 when something could not be measured."""
    options = parse(argv)
    exit_on_sigterm()
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        found = measure(options)
    except TargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report.write_json(options.out / "trace.json", options, {"milliseconds": found})
    caption = (
        f"{options.rounds} rounds of {options.requests} requests for each client, "
        f"{options.prompt_tokens} + 64 tokens, none sent twice, the servers in "
        f"turn; model {options.model.stem}, both with -np {options.slots} and nothing else, on "
        f"{machine()['cores']} cores. Medians; thin lines reach from the first to the third "
        "quartile. The clocks themselves take a few microseconds for each part."
    )
    title = "Where the time to the first token goes"
    servers = [OURS, *([BASE] if options.llama_server is not None else [])]
    picture = plot.bars(title, servers, panels(found), caption)
    (options.out / "trace.svg").write_text(picture, encoding="utf-8")
    for n_clients, by_server in found.items():
        rows = [[f"{n_clients} clients, ms", *by_server, f"p90 {OURS}"]]
        for part in (*PARTS.values(), WHOLE):
            row = [part]
            for server in by_server:
                its = by_server[server].get(part)
                row.append("-" if its is None else f"{percentile(its, 0.5):.2f}")
            rows.append([*row, f"{percentile(by_server[OURS][part], 0.9):.2f}"])
        print(report.align(rows))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        sys.exit(serve(Path(sys.argv[2]), sys.argv[3:]))
    sys.exit(main())
