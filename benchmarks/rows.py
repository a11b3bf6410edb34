"""The table that trioserve is measured by: rows of scenarios, with their targets beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from benchmarks.batch import Batch
from benchmarks.cancel import Cancel
from benchmarks.chats import Chats
from benchmarks.many import FEW, MANY, ManyClients
from benchmarks.report import Scenario
from benchmarks.scenarios import (
    Beside,
    Embeddings,
    Idle,
    LongPrompt,
    Settings,
    SharedPrefix,
    Start,
    Streams,
    Structured,
    Turns,
)
from benchmarks.servers import BASE, OURS
from benchmarks.stats import Sample, column, failures, ratio
from trioserve.bench.stats import Spread, spread

MET, MISSED, MISSING = "met", "missed", "not measured"


@attrs.frozen(kw_only=True)
class Check:
    """One target: a number of a scenario, and its bound.

    `ratio`: the number is that of trioserve divided by that of llama-server.
    """

    text: str
    metric: str
    bound: float
    least: bool = False  # the bound is the least that is allowed, not the most
    ratio: bool = True
    unit: str = ""
    digits: int = 2

    def target(self, base: str = BASE) -> str:
        """Return the bound in words."""
        of = f" of {base}" if self.ratio else ""
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
class Verdict:
    """The outcome of a check. `base` is the number of llama-server, unless it is a ratio."""

    check: Check
    value: Spread | None
    base: Spread | None
    rounds: int
    outcome: str  # MET, MISSED or MISSING


def judge(
    check: Check, samples: Mapping[str, Sequence[Sample]], ours: str = OURS, base: str = BASE
) -> Verdict:
    """Compare the measured numbers with the target. A run with failed requests has met none."""
    own, other = samples.get(ours, ()), samples.get(base, ())
    theirs = None
    if check.ratio:
        value = ratio(own, other, check.metric)
    else:
        value = spread(column(own, check.metric))
        theirs = spread(column(other, check.metric))
    outcome = MISSING
    if value is not None:
        good = value.median >= check.bound if check.least else value.median <= check.bound
        outcome = MET if good and not failures({ours: own}) else MISSED
    return Verdict(check=check, value=value, base=theirs, rounds=len(own), outcome=outcome)


@attrs.frozen
class Case:
    """A scenario, made from the settings, with its targets, and changes of the requests' shape."""

    make: Callable[[Settings], Scenario]
    checks: Sequence[Check]
    shape: Mapping[str, Any] = attrs.field(factory=dict)

    def scenario(self, settings: Settings) -> Scenario:
        """Make the scenario."""
        return self.make(settings.having(**self.shape))


@attrs.frozen(kw_only=True)
class Row:
    """A row of the table: scenarios that run one after the other, and targets for each."""

    key: str
    cases: Sequence[Case]
    in_table: bool = True  # of `--rows table`
    every_model: bool = False  # run with each model; else with the last one only
    bundled: bool = False  # run with the bundled model: the loop is measured, not the model
    generates: bool = True  # text; else it makes embeddings
    fresh: bool = False  # its scenarios start the servers
    ours: str = OURS
    base: str = BASE  # of ratios
    both_args: str = ""
    trioserve_args: str = ""


ROUTER, DIRECT = "router", "direct"


@attrs.frozen(kw_only=True)
class Sizes:
    """The size of each row's work."""

    requests: int = 2
    max_tokens: int = 64
    long_output: int = 400
    dialog_turns: int = 5
    prompts: tuple[int, int] = (900, 300)  # words
    texts: int = 64
    long_prompt: int = 3000
    long_tokens: int = 400
    shared_tokens: int = 1000
    cancels: int = 24
    cancel_tokens: int = 6000
    busy_tokens: int = 256
    batch_chats: int = 200
    batch_tokens: int = 400  # of the stream beside it
    idle_seconds: float = 10.0
    clients: tuple[int, ...] = (64, 256, 1024)
    chats: int = 16
    chat_turns: int = 6


#: So small that every row runs in a few seconds: whether all works, not how well.
QUICK = Sizes(
    requests=1,
    max_tokens=16,
    long_output=32,
    dialog_turns=2,
    prompts=(90, 30),
    texts=16,
    long_prompt=600,
    long_tokens=150,
    shared_tokens=200,
    cancels=4,
    cancel_tokens=600,
    busy_tokens=32,
    batch_chats=80,
    batch_tokens=16,
    idle_seconds=1.0,
    clients=(32,),
    chats=4,
    chat_turns=3,
)


def _least(text: str, metric: str, bound: float, **more: Any) -> Check:
    return Check(text=text, metric=metric, bound=bound, least=True, **more)


def _most(text: str, metric: str, bound: float, **more: Any) -> Check:
    return Check(text=text, metric=metric, bound=bound, **more)


_FASTER = _least("throughput", "tokens/s", 1.05)
_SOONER = _most("TTFT p50", "ttft p50", 1.0)
_WALL = _most("wall", "wall s", 0.95)
_STREAM = (_FASTER, _SOONER)
_TURNS = (
    _most("wall", "wall s", 0.9),
    _most("TTFT p50 of later turns", "later ttft p50", 1.0),
)
_TEXTS = (_least("texts per second", "texts/s", 1.05),)
_BESIDE_PROMPT = (
    _most("gaps p99 meanwhile / median before", "p99 meanwhile / p50 before", 5, ratio=False),
    _most("TTFT of the long prompt", "long prompt ttft", 1.25),
)
_SHARED = (
    _most("TTFT p99 / one prefill", "ttft p99 / one prefill", 1.3, ratio=False),
    _most("wall", "wall s", 0.25),
)
_CANCEL = (_most("slot free, the greatest", "slot free max", 50, unit="ms", ratio=False),)
_BUSY = (
    _least("throughput beside a busy process / quiet", "busy / quiet", 0.75, ratio=False),
    _FASTER,
)
_START = (
    _most("ready", "ready", 1.2),
    _most("PSS after one answer", "PSS", 1.0),
)
_IDLE = (
    _most("CPU time", "cpu", 20, unit="ms", ratio=False, digits=1),
    _most("sleeps of threads", "sleeps", 100, ratio=False, digits=0),
    _most("system calls", "system calls", 500, ratio=False, digits=0),
)
_BATCH = (
    _least("tokens/s of a batch / of clients", "batch / clients", 1.2, ratio=False),
    _least(
        "tokens/s of a stream beside a batch / alone",
        "stream beside a batch / alone",
        0.75,
        ratio=False,
    ),
)
_THROUGH_ROUTER = (
    _least("throughput", "tokens/s", 0.98),
    _most("TTFT p50", "ttft p50", 1.2),
)
_MANY = (
    _most("memory of a waiting connection", "memory/connection", 100, unit="KB", ratio=False),
    _most("memory of a request", "memory/request", 200, unit="KB", ratio=False),
    _least("share of the key with few clients", "share of the few", 0.25, ratio=False),
    _most("CPU of the loop", "loop cpu", 30, unit="s", ratio=False),
    _least("requests a second of a loop's core", "requests/s of a loop's core", 300, ratio=False),
)
_MANY_STREAMS = (
    _least("throughput", "tokens/s", 1.0),
    _SOONER,
    _most("TTFT p99", "ttft p99", 1.0),
    *_MANY,
)
_MANY_ANSWERS = (
    _least("requests per second", "requests/s", 1.0),
    _most("latency p50", "latency p50", 1.0),
    _most("latency p99", "latency p99", 1.0),
    *_MANY,
)
_SCHEMA = (
    _least("throughput with / without", "schema / plain", 0.9, ratio=False),
    _least("throughput", "tokens/s", 1.5),
)
_CHATS = (_most("prefilled / new tokens", "prefilled / new", 1.05, ratio=False, digits=3),)


def rows(sizes: Sizes) -> list[Row]:
    """Return the table."""
    n, (longest, shorter) = sizes.requests, sizes.prompts
    native = {"api": "completion"}
    chats = [partial(Turns, clients=count, turns=sizes.dialog_turns) for count in (1, 4, 8)]
    prompts = [
        partial(
            Streams,
            clients=count,
            prompt_words=length,
            title=f"{count} at once, prompt of {length} words",
        )
        for count, length in ((1, longest), (1, shorter), (4, shorter))
    ]
    long_prompt = partial(LongPrompt, prompt_tokens=sizes.long_prompt, max_tokens=sizes.long_tokens)
    cancel = partial(
        Cancel,
        phase="prefill",
        count=sizes.cancels,
        prompt_tokens=sizes.cancel_tokens,
        max_seconds=120.0,
    )
    return [
        Row(
            key="single",
            cases=[Case(partial(Streams, clients=1, requests=2 * n), _STREAM)],
            every_model=True,
        ),
        Row(
            key="eight",
            cases=[
                Case(
                    partial(
                        Streams, clients=8, requests=n, prompt_tokens=19, title="8 short requests"
                    ),
                    _STREAM,
                    native,
                ),
                Case(
                    partial(Streams, clients=8, prompt_tokens=19),
                    _STREAM,
                    native | {"max_tokens": sizes.long_output},
                ),
                Case(partial(Streams, clients=8, requests=n, title="8 chats"), _STREAM),
            ],
            every_model=True,
        ),
        Row(key="turns", cases=[Case(chat, _TURNS) for chat in chats], every_model=True),
        Row(
            key="prompts",
            cases=[Case(prompt, (_WALL, _SOONER), {"max_tokens": 32}) for prompt in prompts],
            every_model=True,
        ),
        Row(
            key="embeddings",
            cases=[
                Case(partial(Embeddings, clients=count, texts=sizes.texts), _TEXTS)
                for count in (1, 8)
            ],
            generates=False,
            both_args="--embeddings --pooling mean",
        ),
        Row(key="long-prompt", cases=[Case(long_prompt, _BESIDE_PROMPT)]),
        Row(
            key="shared-prefix",
            cases=[Case(partial(SharedPrefix, shared_tokens=sizes.shared_tokens), _SHARED)],
        ),
        Row(key="cancel", cases=[Case(cancel, _CANCEL)]),
        Row(key="busy", cases=[Case(partial(Beside, max_tokens=sizes.busy_tokens), _BUSY)]),
        Row(key="start", cases=[Case(Start, _START)], every_model=True, fresh=True),
        Row(key="idle", cases=[Case(partial(Idle, seconds=sizes.idle_seconds), _IDLE)]),
        Row(
            key="batch",
            cases=[
                Case(
                    partial(Batch, chats=sizes.batch_chats, stream_tokens=sizes.batch_tokens),
                    _BATCH,
                )
            ],
        ),
        Row(
            key="router",
            cases=[
                Case(partial(Streams, clients=1, requests=2 * n), _THROUGH_ROUTER),
                Case(partial(Streams, clients=8, requests=n), _THROUGH_ROUTER),
            ],
            ours=ROUTER,
            base=DIRECT,
        ),
        Row(
            key="many",
            cases=[
                Case(partial(ManyClients, clients=count, streams=streams), checks)
                for count in sizes.clients
                for streams, checks in ((True, _MANY_STREAMS), (False, _MANY_ANSWERS))
            ],
            fresh=True,
            bundled=True,
            both_args=f"-np 16 --api-key {MANY},{FEW}",
            trioserve_args="--max-queue 2048",  # half of it for a key, which llama-server lacks
        ),
        Row(
            key="sixteen",
            cases=[Case(partial(Streams, clients=16), [_FASTER])],
            every_model=True,
            in_table=False,
        ),
        Row(
            key="structured",
            cases=[Case(partial(Structured, clients=count), _SCHEMA) for count in (1, 8)],
            every_model=True,
            in_table=False,
        ),
        Row(
            key="chats",
            cases=[Case(partial(Chats, chats=sizes.chats, turns=sizes.chat_turns), _CHATS)],
            in_table=False,
        ),
    ]
