"""The table that trioserve is measured by: each row a scenario, with its targets beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

from benchmarks.busy import Beside
from benchmarks.cancel import PHASES, Cancel
from benchmarks.chats import Chats
from benchmarks.everyday import Editor, Embeddings, Turns
from benchmarks.scenarios import (
    Connections,
    LongPrompt,
    Scenario,
    Settings,
    SharedPrefix,
    Streams,
)
from benchmarks.stats import Sample, column, ratio, worst_failures
from benchmarks.structured import Structured
from trioserve.bench.stats import Spread, spread

OURS, BASE = "trioserve", "llama-server"
MET, MISSED, MISSING = "met", "missed", "not measured"
UNSUPPORTED = "not supported yet"


@attrs.frozen(kw_only=True)
class Check:
    """One target: a number, and its bound.

    `ratio`: the number is that of trioserve divided by that of llama-server. An empty `metric`
    stands for the requests that failed.
    """

    text: str
    metric: str = ""
    bound: float
    least: bool = False  # the bound is the least that is allowed, not the most
    ratio: bool = False
    unit: str = ""
    digits: int = 2

    @property
    def target(self) -> str:
        """The bound in words."""
        of = f" of {BASE}" if self.ratio else ""
        return f"{'at least' if self.least else 'at most'} {self.bound:g}{_space(self.unit)}{of}"

    def show(self, value: Spread | None) -> str:
        """Return a value with its spread."""
        if value is None:
            return "-"
        low, high = f"{value.low:.{self.digits}f}", f"{value.high:.{self.digits}f}"
        return f"{value.median:.{self.digits}f}{_space(self.unit)} [{low}, {high}]"


def _space(unit: str) -> str:
    return f" {unit}" if unit else ""


@attrs.frozen(kw_only=True)
class Row:
    """A row of the table: scenarios that run one after the other, and targets for each.

    `every_model`: it is run with each model, else with the last one only.
    """

    key: str
    scenarios: Callable[[Settings], Sequence[tuple[Scenario, Sequence[Check]]]]
    every_model: bool = False
    in_table: bool = False  # of the table of `--rows table`
    generates: bool = True  # text; else it makes embeddings
    trioserve_args: str = ""
    both_args: str = ""


@attrs.frozen(kw_only=True)
class Verdict:
    """What came of a check. `base` is the same number of llama-server, where it is no ratio."""

    check: Check
    value: Spread | None
    base: Spread | None
    rounds: int
    outcome: str  # MET, MISSED, MISSING or UNSUPPORTED


def judge(check: Check, samples: Mapping[str, Sequence[Sample]]) -> Verdict:
    """Compare what was measured with the target.

    A run in which requests failed has met no target, whatever its numbers.
    """
    ours, base = samples.get(OURS, ()), samples.get(BASE, ())
    if not check.metric:
        value = spread([float(sample.failed) for sample in ours])
        other = spread([float(sample.failed) for sample in base])
    elif check.ratio:
        value, other = ratio(ours, base, check.metric), None
    else:
        value = spread(column(ours, check.metric))
        other = spread(column(base, check.metric))
    outcome = MISSING
    if value is not None:
        good = value.median >= check.bound if check.least else value.median <= check.bound
        outcome = MET if good and not worst_failures({OURS: ours}) else MISSED
    elif any(note.startswith(UNSUPPORTED) for sample in ours for note in sample.notes):
        outcome = UNSUPPORTED
    return Verdict(check=check, value=value, base=other, rounds=len(ours), outcome=outcome)


@attrs.frozen(kw_only=True)
class Sizes:
    """How much each row does."""

    requests: int = 2
    max_tokens: int = 64
    queued: int = 50
    shared_clients: int = 8
    shared_tokens: int = 1000
    chats: int = 16
    turns: int = 6
    long_prompt: int = 3000
    long_tokens: int = 400
    cancels: int = 20
    cancel_seconds: float = 20.0
    busy_tokens: int = 256
    connections: int = 1000
    connection_tokens: int = 320
    short_tokens: int = 19
    long_output: int = 400
    dialog_turns: int = 5
    burst_tokens: int = 300
    edits: int = 10
    texts: int = 64


#: So small that every row runs in a few seconds: whether all works, not how well.
QUICK = Sizes(
    requests=1,
    max_tokens=16,
    queued=20,
    shared_clients=4,
    shared_tokens=200,
    chats=4,
    turns=3,
    long_prompt=600,
    long_tokens=150,
    cancels=4,
    cancel_seconds=5.0,
    busy_tokens=32,
    connections=100,
    connection_tokens=100,
    long_output=32,
    dialog_turns=2,
    burst_tokens=60,
    edits=3,
    texts=16,
)


def rows(sizes: Sizes) -> list[Row]:
    """Return the table."""
    faster = Check(text="throughput", metric="tokens/s", bound=1.05, least=True, ratio=True)
    sooner = Check(text="TTFT p50", metric="ttft p50", bound=1.0, ratio=True)

    def single(settings: Settings) -> Sequence[tuple[Scenario, Sequence[Check]]]:
        return [(Streams(settings, 1, 2 * sizes.requests), [faster, sooner])]

    def many(settings: Settings) -> Sequence[tuple[Scenario, Sequence[Check]]]:
        return [
            (Streams(settings, 8, sizes.requests), [faster, sooner]),
            (Streams(settings, 16, 1), [faster]),
        ]

    def queue(settings: Settings) -> Sequence[tuple[Scenario, Sequence[Check]]]:
        checks = [
            faster,
            Check(text="requests that failed", bound=0, digits=0),
            Check(text="latency p99", metric="latency p99", bound=1.0, ratio=True),
        ]
        return [(Streams(settings, sizes.queued, 1), checks)]

    def shared(settings: Settings) -> Sequence[tuple[Scenario, Sequence[Check]]]:
        checks = [
            Check(text="TTFT p99 / one prefill", metric="ttft p99 / one prefill", bound=1.3),
            Check(text="total wall", metric="wall s", bound=0.25, ratio=True),
        ]
        scenario = SharedPrefix(settings, sizes.shared_clients, sizes.shared_tokens)
        return [(scenario, checks)]

    def chats(settings: Settings) -> Sequence[tuple[Scenario, Sequence[Check]]]:
        text = "prefilled / new tokens"
        checks = [Check(text=text, metric="prefilled / new", bound=1.05, digits=3)]
        return [(Chats(settings, sizes.chats, sizes.turns), checks)]

    def long_prompt(settings: Settings) -> Sequence[tuple[Scenario, Sequence[Check]]]:
        checks = [
            Check(
                text="ITL p99 meanwhile / median before",
                metric="p99 meanwhile / p50 before",
                bound=5,
            ),
            Check(
                text="TTFT of the long prompt", metric="long prompt ttft", bound=1.25, ratio=True
            ),
        ]
        scenario = LongPrompt(
            settings, prompt_tokens=sizes.long_prompt, max_tokens=sizes.long_tokens
        )
        return [(scenario, checks)]

    def cancel(settings: Settings) -> Sequence[tuple[Scenario, Sequence[Check]]]:
        check = Check(text="slot free p99", metric="slot free p99", bound=50, unit="ms")
        count, limit = sizes.cancels, sizes.cancel_seconds
        return [(Cancel(settings, phase, count, max_seconds=limit), [check]) for phase in PHASES]

    def schema(settings: Settings) -> Sequence[tuple[Scenario, Sequence[Check]]]:
        text = "throughput with / without"
        checks = [
            Check(text=text, metric="schema / plain", bound=0.9, least=True),
            Check(text="throughput", metric="tokens/s", bound=1.5, least=True, ratio=True),
        ]
        return [(Structured(settings, count), checks) for count in (1, 8)]

    def beside(settings: Settings) -> Sequence[tuple[Scenario, Sequence[Check]]]:
        text = "throughput beside a busy process / quiet"
        check = Check(text=text, metric="busy / quiet", bound=0.6, least=True)
        return [(Beside(settings, max_tokens=sizes.busy_tokens), [check])]

    def connections(settings: Settings) -> Sequence[tuple[Scenario, Sequence[Check]]]:
        checks = [
            Check(text="memory a connection", metric="memory/connection", bound=100, unit="KB"),
            Check(text="/health p99", metric="health p99", bound=50, unit="ms"),
        ]
        return [
            (
                Connections(
                    settings, sizes.connections, waiting, max_tokens=sizes.connection_tokens
                ),
                checks,
            )
            for waiting in (False, True)
        ]

    def short(settings: Settings) -> Sequence[tuple[Scenario, Sequence[Check]]]:
        settings = attrs.evolve(settings, shape=attrs.evolve(settings.shape, api="completion"))
        longer = attrs.evolve(settings, shape=settings.with_tokens(sizes.long_output))
        n = sizes.short_tokens
        return [
            (Streams(settings, 1, 2 * sizes.requests, n), [faster, sooner]),
            (Streams(settings, 4, sizes.requests, n), [faster, sooner]),
            (Streams(settings, 8, sizes.requests, n), [faster, sooner]),
            (Streams(settings, 8, 1, n), [faster]),
            (Streams(longer, 8, 1, n), [faster]),
        ]

    def turns(settings: Settings) -> Sequence[tuple[Scenario, Sequence[Check]]]:
        checks = [
            Check(text="wall", metric="wall s", bound=0.95, ratio=True),
            Check(text="TTFT p50 of later turns", metric="later ttft p50", bound=1.0, ratio=True),
        ]
        return [(Turns(settings, count, sizes.dialog_turns), checks) for count in (1, 4, 8)]

    def burst(settings: Settings) -> Sequence[tuple[Scenario, Sequence[Check]]]:
        checks = [sooner, Check(text="wall", metric="wall s", bound=1.0, ratio=True)]
        settings = attrs.evolve(settings, shape=settings.with_tokens(32))
        return [(Streams(settings, 4, 1, sizes.burst_tokens), checks)]

    def editor(settings: Settings) -> Sequence[tuple[Scenario, Sequence[Check]]]:
        checks = [sooner, Check(text="wall", metric="wall s", bound=0.95, ratio=True)]
        return [(Editor(settings, count, sizes.edits), checks) for count in (1, 8)]

    def embeddings(settings: Settings) -> Sequence[tuple[Scenario, Sequence[Check]]]:
        text = "texts per second"
        check = Check(text=text, metric="texts/s", bound=1.05, least=True, ratio=True)
        return [(Embeddings(settings, count, sizes.texts), [check]) for count in (1, 8)]

    # Idle connections must still be there when they are counted.
    stay = "--keep-alive-timeout 600"
    return [
        Row(key="single", scenarios=single, every_model=True, in_table=True),
        Row(key="streams", scenarios=many, every_model=True, in_table=True),
        Row(key="short", scenarios=short, every_model=True, in_table=True),
        Row(key="turns", scenarios=turns, every_model=True, in_table=True),
        Row(key="burst", scenarios=burst, every_model=True, in_table=True),
        Row(key="editor", scenarios=editor, every_model=True),
        Row(
            key="embeddings",
            scenarios=embeddings,
            in_table=True,
            generates=False,
            both_args="--embeddings --pooling mean",
        ),
        Row(key="queue", scenarios=queue, every_model=True),
        Row(key="structured", scenarios=schema, every_model=True, in_table=True),
        Row(key="busy", scenarios=beside, in_table=True),
        Row(key="long-prompt", scenarios=long_prompt, in_table=True),
        Row(key="shared-prefix", scenarios=shared),
        Row(key="cancel", scenarios=cancel, in_table=True),
        Row(
            key="connections",
            scenarios=connections,
            trioserve_args=stay,
            both_args="--cache-ram 0",  # prompts that are kept are no memory of connections
        ),
        Row(key="chats", scenarios=chats),
    ]
