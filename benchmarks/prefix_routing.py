"""How well requests find the replica that has their beginning cached: a simulation.

    python -m benchmarks.prefix_routing --out DIR

Conversations begin with one of many system prompts, some much more common than others (Zipf), and
each turn has all that was said before. Turns come at random times (Poisson) to one of several
ingresses, whose router of requests chooses a replica. A router knows when its own requests end; of
those of other ingresses it knows what a replica said when it was last sent something. A replica has
slots, a queue, and a bounded cache. Nothing runs but the routers: seconds are simulated, except the
time of a decision.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import sys
import time
import tracemalloc
from bisect import bisect
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs

from trioserve.bench import plot
from trioserve.bench.stats import percentile, spread
from trioserve.ray.prefix_affinity import PrefixAffinity, waiting

Blocks = Sequence[tuple[int, int]]
Load = Callable[[str], float]


@attrs.frozen(kw_only=True)
class Traffic:
    """What comes, and how fast a replica is. Lengths are in characters, times in seconds."""

    replicas: int = 1000
    prompts: int = 100_000
    rate: float = 2000.0  # requests a second
    ingresses: int = 4
    seconds: float = 90.0
    warm_up: float = 45.0
    churn: float | None = None  # when a tenth of the replicas leave, and as many join
    slots: int = 8
    cache: int = 600_000  # of a replica
    prefill: float = 8000.0  # characters a second
    decode: float = 160.0
    follows: float = 0.6  # the share of turns that another one follows
    think: float = 8.0  # before it does
    longest: int = 60_000  # conversation


# -- routers


class Router(Protocol):
    """What one ingress has."""

    def update(self, replicas: Sequence[str]) -> None:
        """Take these replicas from now on."""

    def choose(self, blocks: Blocks, load: Load) -> str:
        """Choose one of them."""


class RandomRouter:
    """Sends each request anywhere."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.replicas: Sequence[str] = ()

    def update(self, replicas: Sequence[str]) -> None:
        self.replicas = replicas

    def choose(self, blocks: Blocks, load: Load) -> str:
        return self.rng.choice(self.replicas)


class RoundRobin(RandomRouter):
    """Sends each request to the next one."""

    _at = 0

    def choose(self, blocks: Blocks, load: Load) -> str:
        self._at += 1
        return self.replicas[self._at % len(self.replicas)]


class PowerOfTwo(RandomRouter):
    """Sends each request to the less full of two, as Serve does."""

    def choose(self, blocks: Blocks, load: Load) -> str:
        return min(self.rng.sample(self.replicas, 2), key=load)


class Prefixes:
    """trioserve's router of requests."""

    def __init__(self, seed: int) -> None:
        self.homes = PrefixAffinity(random.Random(seed))

    def update(self, replicas: Sequence[str]) -> None:
        self.homes.update(replicas)

    def choose(self, blocks: Blocks, load: Load) -> str:
        return self.homes.rank(blocks, load)[0]


class Learning(RandomRouter):
    """Remembers where it sent each beginning, and weighs that against waiting in the same way."""

    MOST, OWNERS = 1_000_000, 4

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.owners: OrderedDict[int, list[str]] = OrderedDict()
        self.known: frozenset[str] = frozenset()

    def update(self, replicas: Sequence[str]) -> None:
        super().update(replicas)
        self.known = frozenset(replicas)

    def choose(self, blocks: Blocks, load: Load) -> str:
        length = blocks[-1][1]
        missing = dict.fromkeys(self.rng.sample(self.replicas, 2), length)
        for block, end in blocks:
            owners = self.owners.get(block, ())
            missing.update((one, length - end) for one in owners if one in self.known)
        chosen = min(missing, key=lambda one: missing[one] + waiting(load(one)))
        for block, _ in blocks:
            others = [one for one in self.owners.pop(block, ()) if one != chosen]
            self.owners[block] = [*others, chosen][-self.OWNERS :]
        while len(self.owners) > self.MOST:
            self.owners.popitem(last=False)
        return chosen


ROUTERS: Mapping[str, Callable[[int], Router]] = {
    "trioserve": Prefixes,
    "learning": Learning,
    "power of two": PowerOfTwo,
    "round robin": RoundRobin,
    "random": RandomRouter,
}


# -- what is simulated


@attrs.define(eq=False)
class Turn:
    """A request: its blocks, and how long its prompt and its output are."""

    prompt: int
    prompt_length: int
    conversation: int
    length: int
    output: int
    blocks: list[tuple[int, int]]
    came: float = 0.0
    ingress: int = 0


@attrs.define(eq=False)
class Replica:
    """Slots, a queue, and what is cached of prompts and of conversations."""

    name: str
    room: int
    busy: int = 0
    queue: deque[Turn] = attrs.Factory(deque)
    kept: OrderedDict[tuple[str, int], int] = attrs.Factory(OrderedDict)
    used: int = 0

    def cached(self, turn: Turn) -> int:
        """Return how much of a prompt is cached."""
        found = 0
        for key in (("prompt", turn.prompt), ("conversation", turn.conversation)):
            if key not in self.kept:
                break
            self.kept.move_to_end(key)
            found += self.kept[key]
        return min(found, turn.length)

    def keep(self, turn: Turn, length: int) -> None:
        """Have so much of a conversation in the cache."""
        own = length - turn.prompt_length
        for key, size in (
            (("prompt", turn.prompt), turn.prompt_length),
            (("conversation", turn.conversation), own),
        ):
            self.used += size - self.kept.pop(key, 0)
            self.kept[key] = size
        while self.used > self.room:
            self.used -= self.kept.popitem(last=False)[1]


@attrs.frozen(kw_only=True)
class Served:
    """What became of a turn."""

    came: float
    ttft: float
    cached: int
    known: int  # what would be cached if all replicas had one cache, without an end
    length: int
    replica: str


class Simulation:
    """Traffic through routers of one kind."""

    def __init__(self, traffic: Traffic, make: Callable[[int], Router], seed: int) -> None:
        self.traffic = traffic
        self.served: list[Served] = []
        self.deciding, self.decisions = 0.0, 0
        self._rng = random.Random(seed)
        lengths = random.Random(0)
        self._lengths = [
            int(min(32_000, max(600, lengths.lognormvariate(math.log(6000), 0.8))))
            for _ in range(traffic.prompts)
        ]
        self._shares = list(itertools.accumulate(1 / (i + 1) for i in range(traffic.prompts)))
        names = [f"replica-{i}" for i in range(traffic.replicas)]
        self.replicas = {name: Replica(name, traffic.cache) for name in names}
        self.routers = [make(1000 * seed + i) for i in range(traffic.ingresses)]
        self._queues: list[Counter[str]] = [Counter() for _ in self.routers]
        for router in self.routers:
            router.update(names)
        self._everything = Replica("all", sys.maxsize)
        self._numbers = itertools.count()
        self._later: list[tuple[float, int, Callable[[float], None]]] = []

    def run(self) -> None:
        """Let the time pass."""
        self._at(0.0, self._begin)
        if self.traffic.churn is not None:
            self._at(self.traffic.churn, self._change_replicas)
        while self._later[0][0] <= self.traffic.seconds:
            now, _, act = heapq.heappop(self._later)
            act(now)

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._later, (when, next(self._numbers), act))

    def _begin(self, now: float) -> None:
        """Have a conversation begin, and the next one later."""
        begun = self.traffic.rate * (1 - self.traffic.follows)
        self._at(now + self._rng.expovariate(begun), self._begin)
        prompt = bisect(self._shares, self._rng.random() * self._shares[-1])
        length, conversation = self._lengths[prompt], next(self._numbers)
        # Two hundred families of prompts have their first 512 characters in common.
        blocks = [(_block(prompt % 200 - 200, at), at) for at in (256, 512)]
        at = 1024
        while at < length:
            blocks.append((_block(prompt, at), at))
            at *= 2
        whole = length + 20 + int(self._rng.expovariate(1 / 600))
        blocks += [(_block(prompt, length), length), (_block(-1000 - conversation, 0), whole)]
        self._arrive(Turn(prompt, length, conversation, whole, self._output(), blocks), now)

    def _follow(self, before: Turn, length: int, now: float) -> None:
        """Add the next turn of a conversation."""
        own = -1000 - before.conversation
        whole = length + 20 + int(self._rng.expovariate(1 / 300))
        blocks = [*before.blocks, (_block(own, length), length), (_block(own, whole), whole)]
        turn = attrs.evolve(before, length=whole, output=self._output(), blocks=blocks)
        self._arrive(turn, now)

    def _output(self) -> int:
        return 20 + int(self._rng.expovariate(1 / 400))

    def _arrive(self, turn: Turn, now: float) -> None:
        turn.came, turn.ingress = now, self._rng.randrange(len(self.routers))
        queue, slots = self._queues[turn.ingress], self.traffic.slots
        began = time.thread_time()
        name = self.routers[turn.ingress].choose(
            turn.blocks, lambda name: (queue[name] + 1) / slots
        )
        self.deciding += time.thread_time() - began
        self.decisions += 1
        replica = self.replicas[name]
        replica.queue.append(turn)
        if replica.busy < slots:
            self._start(replica, now)
        queue[name] = replica.busy + len(replica.queue)  # Serve's replicas answer with this

    def _start(self, replica: Replica, now: float) -> None:
        turn = replica.queue.popleft()
        replica.busy += 1
        cached = replica.cached(turn)
        prefill = (turn.length - cached) / self.traffic.prefill
        known = self._everything.cached(turn)
        replica.keep(turn, turn.length)
        self._everything.keep(turn, turn.length)
        self.served.append(
            Served(
                came=turn.came,
                ttft=now - turn.came + prefill,
                cached=cached,
                known=known,
                length=turn.length,
                replica=replica.name,
            )
        )
        ends = now + prefill + turn.output / self.traffic.decode
        self._at(ends, lambda then: self._end(replica, turn, then))

    def _end(self, replica: Replica, turn: Turn, now: float) -> None:
        replica.busy -= 1
        queue = self._queues[turn.ingress]
        queue[replica.name] = max(0, queue[replica.name] - 1)
        length = turn.length + turn.output
        replica.keep(turn, length)
        self._everything.keep(turn, length)
        if replica.queue:
            self._start(replica, now)
        if self._rng.random() < self.traffic.follows and length < self.traffic.longest:
            pause = self._rng.expovariate(1 / self.traffic.think)
            self._at(now + pause, lambda then: self._follow(turn, length, then))

    def _change_replicas(self, now: float) -> None:
        """Have a tenth of the replicas finish what they have and leave, and as many join."""
        for name in self._rng.sample(list(self.replicas), len(self.replicas) // 10):
            del self.replicas[name]
            new = f"replica-{next(self._numbers)}-new"
            self.replicas[new] = Replica(new, self.traffic.cache)
        for router in self.routers:
            router.update(list(self.replicas))


def _block(one: int, other: int) -> int:
    return hash((one, other)) * 0x9E3779B97F4A7C15 % (1 << 64)


# -- what is measured


def numbers_of(simulation: Simulation) -> dict[str, float]:
    """Return the numbers of a run, after its warm-up."""
    served = [one for one in simulation.served if one.came >= simulation.traffic.warm_up]
    per_replica = Counter(one.replica for one in served)
    busiest = max(per_replica.values()) * simulation.traffic.replicas / len(served)
    return {
        "cached share": share(served),
        "of what could be": sum(one.cached for one in served) / sum(one.known for one in served),
        "ttft p50 s": percentile((one.ttft for one in served), 0.5),
        "ttft p99 s": percentile((one.ttft for one in served), 0.99),
        "busiest / mean": busiest,
        "us a decision": simulation.deciding / simulation.decisions * 1e6,
    }


def share(served: Sequence[Served]) -> float:
    """Return the share of the prompts' text that was cached."""
    return sum(one.cached for one in served) / max(1, sum(one.length for one in served))


def recovery(simulation: Simulation, step: float = 5.0) -> list[tuple[float, float]]:
    """Return the cached share in the seconds before and after replicas came and went."""
    churn = simulation.traffic.churn or 0.0
    return [
        (at, share([one for one in simulation.served if at <= one.came - churn < at + step]))
        for at in (step * i for i in range(-2, int((simulation.traffic.seconds - churn) / step)))
    ]


def memory_of(make: Callable[[int], Router], traffic: Traffic) -> float:
    """Return the MB that one router holds after the traffic."""
    few = attrs.evolve(traffic, ingresses=1, churn=None)
    tracemalloc.start()
    router = make(1)
    router.update([f"replica-{i}" for i in range(few.replicas)])
    rng = random.Random(1)
    for i in range(int(traffic.rate * traffic.seconds / traffic.ingresses)):
        prompt = min(int(rng.paretovariate(1.0)), traffic.prompts)
        blocks = [(_block(prompt, at), 256 << at) for at in range(6)]
        router.choose([*blocks, (_block(-1000 - i, 0), 20_000)], lambda _: 0.0)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held / 1e6


# -- the command


def table(traffic: Traffic, seed: int = 1) -> str:
    """Measure every router on the same traffic, and return the figures as a table of Markdown."""
    lines: list[str] = []
    for name, make in ROUTERS.items():
        simulation = Simulation(traffic, make, seed)
        simulation.run()
        numbers = {**numbers_of(simulation), "MB": memory_of(make, traffic)}
        if not lines:
            lines = [f"| router | {' | '.join(numbers)} |", "|---|" + "---|" * len(numbers)]
        lines.append(f"| {name} | {' | '.join(f'{number:.3g}' for number in numbers.values())} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def curves(traffic: Traffic, ingresses: Sequence[int], seeds: Sequence[int]) -> str:
    """Draw the cached share over the number of ingresses, each with its own router."""
    names = ("trioserve", "learning")
    measures = {"cached share": ("Share of prompts' text that was cached", True)}
    measures["ttft p99 s"] = ("Time to the first token, p99, simulated s", False)
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for name, number, seed in itertools.product(names, ingresses, seeds):
        simulation = Simulation(attrs.evolve(traffic, ingresses=number), ROUTERS[name], seed)
        simulation.run()
        found.setdefault((name, number), []).append(numbers_of(simulation))
    charts = []
    for measure, (title, more) in measures.items():
        lines = {
            name: [
                (float(number), value)
                for number in ingresses
                if (value := spread([one[measure] for one in found[name, number]])) is not None
            ]
            for name in names
        }
        charts.append(
            plot.Chart(title=title, x_title="ingresses", more_is_better=more, lines=lines)
        )
    caption = (
        f"Simulated: {traffic.replicas} replicas of {traffic.slots} slots, {traffic.prompts:,} "
        f"system prompts, {traffic.rate:g} requests a second, {traffic.seconds:g} s; the "
        f"first {traffic.warm_up:g} do not count. Bands reach from the least to the greatest of "
        f"{len(seeds)} runs."
    )
    return plot.curves("Routers of requests that do not talk to each other", names, charts, caption)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prefix_routing", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--out", type=Path, help="a folder for a picture, which takes longer")
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=90.0, help="that are simulated")
    parser.add_argument("--ingresses", type=int, default=4)
    options = parser.parse_args(argv)
    traffic = Traffic(
        replicas=options.replicas,
        prompts=100 * options.replicas,
        rate=2.0 * options.replicas,
        ingresses=options.ingresses,
        seconds=options.seconds,
        warm_up=options.seconds / 2,
    )
    print(table(traffic))
    changed = Simulation(attrs.evolve(traffic, churn=options.seconds / 2), Prefixes, 1)
    changed.run()
    print("\nThe cached share while a tenth of the replicas leave at 0 s, and as many join:")
    print(", ".join(f"{at:+.0f} s: {part:.3f}" for at, part in recovery(changed)))
    if options.out is not None:
        few = max(20, options.replicas // 10)
        few_traffic = attrs.evolve(traffic, replicas=few, prompts=100 * few, rate=2.0 * few)
        drawn = curves(few_traffic, (1, 2, 4, 8), (1, 2, 3))
        (options.out / "prefix-routing.svg").write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
