"""Where a prompt's beginning is at home: which replicas have it in their KV cache, or will have.

Nothing is learned of replicas, and nothing is exchanged between routers. A beginning's hash says
which replica is its home, by consistent hashing, so that all routers agree, also those that have
just started. A beginning that is common has as many homes as it needs, and each conversation that
begins with it has one of these. So a conversation comes back to the replica that has all of it.

A request leaves its home when that is clearly fuller than another: when the time that it would wait
there is worth more than the text that another replica has to prefill.
"""

from __future__ import annotations

import math
import random
import struct
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

#: Costs, as characters of prompt that could be prefilled instead: of a replica whose slots are all
#: taken, beside one that is idle; and of waiting there until every slot has become free once.
FULL, TURN = 4_000, 12_000
#: A beginning has so many times the homes that its share of the requests would need.
ROOM = 4
#: Requests whose beginnings are counted fully; those before them count half, then a quarter.
WINDOW = 16_384

_TRIED = 4  # homes, beside two other replicas
_PLACES = 32  # of each replica on the ring
_FIRST = 32


class Homes:
    """The homes of beginnings among replicas that come and go.

    Args:
        rng: chooses the replicas that are tried beside the homes.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._replicas: list[str] = []
        self._places: dict[str, tuple[int, ...]] = {}  # of each replica on the ring
        self._ring: list[int] = []
        self._owners: list[str] = []  # of each place on the ring
        self._counts: dict[int, float] = {}  # of beginnings, as far as they are common
        self._total = 0.0
        self._recent = 0

    def update(self, replicas: Iterable[str]) -> None:
        """Take these replicas from now on. Those that stay keep almost all that they have."""
        self._replicas = sorted(replicas)
        self._places = {name: self._places.get(name) or _places(name) for name in self._replicas}
        ring = sorted((at, name) for name, places in self._places.items() for at in places)
        self._ring = [at for at, _ in ring]
        self._owners = [name for _, name in ring]

    def rank(self, blocks: Sequence[tuple[int, int]], load: Callable[[str], float]) -> list[str]:
        """Choose replicas for a request, the best one first; none if there are none.

        Args:
            blocks: how the prompt begins: `RoutingHint.blocks`.
            load: how full a replica would be with this request: 1.0 when all slots are taken.
        """
        if not self._replicas:
            return []
        costs: dict[str, float] = {}
        length = blocks[-1][1] if blocks else 0
        seed, parent, n_homes, depth = self._follow(blocks)
        for i in range(_TRIED if blocks else 0):  # the first has the conversation, if any has
            home = self._home(_mix(seed, i) if i else seed, parent, n_homes)
            costs.setdefault(home, (length - depth if i else 0) + waiting(load(home)))
        # Without a parent, what is common is common to all replicas.
        missing = length - depth if parent is None else length
        for other in self._rng.sample(self._replicas, min(2, len(self._replicas))):
            costs.setdefault(other, missing + waiting(load(other)))
        return sorted(costs, key=costs.__getitem__)

    def of_key(self, key: str) -> str | None:
        """Return the replica where a key is at home, however full it is, or None without any."""
        if not self._replicas:
            return None
        return self._owner(_hash(key.encode("utf-8", "surrogatepass")))

    def _follow(self, blocks: Sequence[tuple[int, int]]) -> tuple[int, int | None, int, int]:
        """Count a prompt's beginnings as far as they are common.

        Returns what is the prompt's own, the common beginning of whose homes it has one (None if
        all replicas are), how many homes that has, and how long what is common is.
        """
        n_replicas = len(self._replicas)
        self._forget()
        # What comes twice is not common yet if there were only a few requests for each replica.
        by_share = ROOM * n_replicas / (self._total + 2 * ROOM * n_replicas + _FIRST)
        parent, n_homes, common = None, n_replicas, 0
        for block, length in blocks:
            count = self._counts[block] = self._counts.get(block, 0.0) + 1.0
            need = math.ceil(count * by_share)
            if need <= 1:
                return block, parent, n_homes, common
            common = length
            if 2 * need < n_replicas:
                parent, n_homes = block, min(need, n_homes)
        return self._rng.getrandbits(64), parent, n_homes, common

    def _forget(self) -> None:
        """Have what came long ago count less, and forget what is rare."""
        self._total += 1
        self._recent += 1
        if self._recent > WINDOW:
            self._recent = 0
            self._total /= 2
            self._counts = {at: count / 2 for at, count in self._counts.items() if count >= 2}

    def _home(self, seed: int, parent: int | None, n_homes: int) -> str:
        """Return a home of a common beginning, the same one for the same seed."""
        return self._owner(seed if parent is None else _mix(parent, _jump(seed, n_homes)))

    def _owner(self, at: int) -> str:
        return self._owners[bisect(self._ring, at) % len(self._owners)]


def waiting(load: float) -> float:
    """Return what it costs to wait at a replica that is so full."""
    return FULL * min(load, 1.0) + TURN * max(load - 1.0, 0.0)


def _jump(seed: int, n: int) -> int:
    """Choose one of `n`, such that most seeds keep theirs when `n` grows.

    See Lamping and Veach, "A fast, minimal memory, consistent hash algorithm", 2014.
    """
    at = following = 0
    while following < n:
        at = following
        seed = (seed * 2862933555777941757 + 1) % (1 << 64)
        following = int((at + 1) * (1 << 31) / ((seed >> 33) + 1))
    return at


def _places(name: str) -> tuple[int, ...]:
    return tuple(_hash(f"{name} {i}".encode()) for i in range(_PLACES))


def _mix(one: int, other: int) -> int:
    return _hash(struct.pack("<QQ", one, other))


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")
