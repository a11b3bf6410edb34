"""``trioserve tune``: finds the flags that are the fastest on this machine."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import attrs
import trio

from trioserve.bench import report, speed
from trioserve.bench.client import Server
from trioserve.bench.search import N_ROUNDS, Factor, Flags, Found, Search, Speeds, Trial
from trioserve.cli.local_server import Props, client_of, models_at, only, started
from trioserve.cli.options import Arguments
from trioserve.cli.output import table, write_file
from trioserve.cli.progress import ProgressReport
from trioserve.cli.signals import run_until_signal
from trioserve.config import Config
from trioserve.config.parse import parse
from trioserve.models import auto_drafts

#: Servers that run at the same time; only one of them is measured.
_MAX_SERVERS = 4

#: The share of the time that is for the search; the rest is for the last comparison.
_SEARCH = 0.85

#: Lengths that measurements may have, in tokens.
_OUTPUTS = (32, 512)
_PROMPTS = (256, 2048)

#: The trials, by their field in the configuration.
_NAMES = {
    "threads": "threads",
    "kv_unified": "layout",
    "flash_attn": "flash attention",
    "ubatch_size": "batch sizes",
    "spec_type": "drafts",
}

#: Kinds of drafts for any model.
_NGRAMS = ("ngram-simple", "ngram-mod")

_HEAD = ("FACTOR", "FLAGS", "SPEED", "NOISE", "RESULT")


def run(given: Arguments) -> int:
    """Run the command; see `trioserve.cli.commands`."""
    path, config = given["json"], given.parsed().config
    tuning = Tuning(config, given.flags, given.environ, given["seconds"])
    try:
        return run_until_signal(tuning.run)
    finally:  # an early end loses nothing
        if path is not None and tuning.trials:
            write_file(path, json.dumps(tuning.plain(), indent=1) + "\n")


def drafts_of(config: Config) -> list[str]:
    """Find the kinds of drafts to try: n-grams, beside a draft model that is named, and a head."""
    if config.has_draft_model:
        return [*_NGRAMS]
    chosen = auto_drafts.choose(attrs.evolve(config, spec_type=("auto",)))
    head = None if chosen is None else chosen.config.head_type
    return [*_NGRAMS] if head is None else [*_NGRAMS, head, "auto"]


def factors_of(
    config: Config, n_cores: int, n_threads: int, drafts: Sequence[str] = _NGRAMS
) -> list[Factor]:
    """The trials; flags that are given stay as they are.

    Args:
        config: of the flags.
        n_cores: logical CPUs that this process may use.
        n_threads: the default number of threads.
        drafts: the kinds that the model can have.
    """
    default = Config()
    counts = sorted({max(1, n_threads // 2), max(1, n_threads - 1), n_cores} - {n_threads})
    options: dict[str, list[Flags]] = {
        "threads": [("-t", str(count)) for count in counts],
        "kv_unified": [("-kvu",), ("-no-kvu",)],
        "flash_attn": [("-fa", "on"), ("-fa", "off")],
        "ubatch_size": [("-ub", "128"), ("-ub", "1024"), ("-b", "512")],
        "spec_type": [("--spec-type", kind) for kind in drafts],
    }
    if config.batch_size != default.batch_size:
        del options["ubatch_size"]
    return [
        Factor(_NAMES[field], tuple(tried))
        for field, tried in options.items()
        if tried and getattr(config, field) == getattr(default, field)
    ]


@attrs.define(eq=False)
class _Running:
    """A server that runs until `stop` is set."""

    server: Server
    stop: trio.Event = attrs.field(factory=trio.Event)
    ended: trio.Event = attrs.field(factory=trio.Event)


class Servers:
    """Servers with different flags; up to `limit` of them run at the same time, in a nursery."""

    def __init__(
        self, nursery: trio.Nursery, start: Callable[[Flags], AbstractAsyncContextManager[Server]]
    ) -> None:
        self.limit = 1
        self._nursery, self._start = nursery, start
        self._running: dict[Flags, _Running] = {}  # the one that was used last is the last

    async def get(self, flags: Flags) -> Server:
        """Give a server with these flags. To start one, it stops the least recently used.

        Raises:
            ModelLoadError: it does not start.
        """
        running = self._running.pop(flags, None)
        if running is None:
            while len(self._running) >= self.limit:
                oldest = self._running.pop(next(iter(self._running)))
                oldest.stop.set()
                await oldest.ended.wait()
            running = await self._nursery.start(self._run, flags)
        self._running[flags] = running
        return running.server

    async def _run(self, flags: Flags, task_status: trio.TaskStatus[_Running]) -> None:
        async with self._start(flags) as server:
            running = _Running(server)
            task_status.started(running)
            await running.stop.wait()
        running.ended.set()


@attrs.define(eq=False)
class Tuning:
    """One run of the command."""

    config: Config
    flags: Sequence[str]
    environ: Mapping[str, str]
    seconds: float
    trials: list[Trial] = attrs.field(factory=list)
    found: Found | None = None
    _n_measured: int = 0
    _n_prompt: int = 0
    _n_gen: int = _OUTPUTS[0]
    _began: float = 0.0
    _progress: ProgressReport = attrs.field(factory=lambda: ProgressReport(sys.stderr))
    _seed: str = attrs.field(factory=partial(secrets.token_hex, 4))

    async def run(self) -> None:
        self._began = trio.current_time()
        async with trio.open_nursery() as nursery:
            servers = Servers(nursery, self._started)
            factors = await self._calibrate(servers)
            print(_line(_HEAD), end="", flush=True)
            search = Search(partial(self._measure, servers), self._tell, _SEARCH * self.seconds)
            with self._progress:
                self.found = await search.run(factors)
            nursery.cancel_scope.cancel()
        print(verdict(self.found, self.trials), end="")

    @asynccontextmanager
    async def _started(self, more: Flags) -> AsyncIterator[Server]:
        flags = [*self.flags, *more]
        config = parse(flags, self.environ).config
        async with started(flags, config, self.environ) as address:
            model = only(await models_at(address))
            async with client_of(address) as client:
                server = await Server(
                    name=" ".join(more), client=client, model=model, seed=self._seed
                ).calibrated()
                # A new server is slower until it knows the machine.
                warm_up = speed.Workload(n_gen=self._n_gen, clients=self.config.parallel)
                await speed.measure(server, warm_up, "warm-up")
                yield server

    async def _calibrate(self, servers: Servers) -> list[Factor]:
        """Choose what is tried, how long texts are in the time, and how many servers may run."""
        from trioserve.llama.context import threads
        from trioserve.llama.layout import on_gpu
        from trioserve.llama.machine import allowed_cpus, free_memory

        before = free_memory()
        server = await servers.get(())  # downloads the model if it is not there
        drafts = await trio.to_thread.run_sync(drafts_of, self.config)
        factors = factors_of(self.config, len(allowed_cpus()), threads(-1), drafts)
        n_runs = sum(2 * len(one.options) + 2 + 2 * N_ROUNDS for one in factors) + 2 * N_ROUNDS
        seconds = self.seconds / (6 * n_runs)
        speeds = [
            (await speed.measure(server, test, "calibration")).tokens_per_s
            for test in (speed.Workload(n_prompt=_PROMPTS[0]), speed.Workload(n_gen=_OUTPUTS[0]))
        ]
        n_ctx = (await server.client.ask("/props", form=Props)).default_generation_settings.n_ctx
        room = n_ctx // self.config.parallel // 4  # a split cache has a part for each slot
        self._n_prompt, self._n_gen = (
            int(min(max(rate * seconds, least), most, room))
            for rate, (least, most) in zip(speeds, (_PROMPTS, _OUTPUTS), strict=True)
        )
        after = free_memory()
        if before is not None and after is not None and not on_gpu(self.config):
            one = max(before - after, 2**28) * 1.25  # they keep more as they are used
            servers.limit = int(min(max(1 + after // one, 1), _MAX_SERVERS))
        return factors

    async def _measure(self, servers: Servers, flags: Flags) -> Speeds:
        server = await servers.get(flags)
        self._n_measured += 1
        past = min(trio.current_time() - self._began, self.seconds)
        self._progress.tell(f"Measurement {self._n_measured}", past, self.seconds)
        seed, many = f"{self._n_measured}", self.config.parallel
        tests = {"prompt": speed.Workload(n_prompt=self._n_prompt)}
        tests["1 stream"] = speed.Workload(n_gen=self._n_gen)
        if many > 1:
            tests[f"{many} streams"] = speed.Workload(n_gen=self._n_gen, clients=many)
        speeds = {
            name: (await speed.measure(server, test, f"{seed} {name}")).tokens_per_s
            for name, test in tests.items()
        }
        speeds["repeated text"] = await speed.measure_repetition(server, self._n_gen, seed)
        return speeds

    def _tell(self, trial: Trial) -> None:
        self.trials.append(trial)
        self._progress.clear()
        print(_line(row_of(trial)), end="", flush=True)

    def plain(self) -> dict[str, object]:
        """Everything, for a JSON file; `found` is null after an early end."""
        return {
            "machine": report.machine(),
            "lengths": {"prompt": self._n_prompt, "output": self._n_gen},
            "trials": [attrs.asdict(trial) for trial in self.trials],
            "found": None if self.found is None else attrs.asdict(self.found),
        }


def row_of(trial: Trial) -> tuple[str, ...]:
    """A line of the table."""
    noise = f"{trial.noise:.0%}" if trial.kinds else ""
    gain = report.spread_text(trial.gain, 2)
    return trial.factor, " ".join(trial.flags), gain, noise, trial.outcome


def _line(cells: Sequence[str]) -> str:
    widths = (16, 26, 18, 5, 0)
    shown = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return f"{'  '.join(shown).rstrip()}\n"


def verdict(found: Found, trials: Sequence[Trial]) -> str:
    """Name the best flags, or the noise that hides a difference."""
    lines = []
    if not found.is_complete:
        lines.append("The time was up before all factors were tried; --seconds gives more.")
    noise = max((trial.noise for trial in trials), default=0.0)
    final = found.final
    if final is None or not found.flags:
        lines.append(f"No flags are faster than the defaults beyond the noise of {noise:.0%}.")
    else:
        times = report.spread_text(final.gain, 2)
        lines.append(
            f"The best flags are {' '.join(found.flags)}: {times} times the defaults' speed"
        )
        lines.append(table([(f"  {kind}", f"{gain:.2f}") for kind, gain in final.kinds.items()]))
    return "\n" + "\n".join(lines).rstrip("\n") + "\n"
