"""Prefix affinity: a request goes to a replica that has its prompt's beginning in the KV cache.

Serve's proxy does not look into bodies, and the router needs to know no more than which requests
begin alike. So the ingress makes a `RoutingHint` of each body, once; it goes to the router as an
argument of the call.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from trioserve.api.base.fields import PromptFields

#: Beginnings of this length, twice this length and so on are hashed, and those that end with a
#: message or with the tools.
SHORTEST = 256
#: No more than this of a prompt is looked at, nor more beginnings.
LONGEST, MOST = 65_536, 32

#: Names of what is no text, such as images in base64. So much of their beginning and end is hashed.
_MEDIA = frozenset(("data", "file_data", "image_url", "images", "multimodal_data", "url"))
_SAMPLE = 16_384
_DEPTH = 8  # of lists and objects in a message; what is deeper is left out


@attrs.frozen
class RoutingHint:
    """The properties of a request that the router uses.

    The router goes by the names of the attributes, not by the class, which Ray may pickle by value.
    """

    #: Beginnings of the prompt from short to long: a hash, and how many characters it is of.
    blocks: tuple[tuple[int, int], ...] = ()
    #: Requests with the same key go to the same replica, whatever they begin with.
    key: str | None = None


def hint_of(body: object, prompt: PromptFields | None, key: str | None = None) -> RoutingHint:
    """Make the hint for a request. It never raises, since a bad body is for the replica to refuse.

    Args:
        body: the decoded JSON of the body, or None.
        prompt: the fields that make up the prompt; None: it has none that could be cached.
        key: what names a state that only one replica has, such as a stream that can be resumed.
    """
    if not isinstance(body, Mapping) or prompt is None:
        return RoutingHint(key=key)
    text = _Beginning()
    for part in _parts(body, prompt):
        for string in part:
            text.add(string)
        text.cut()
        if text.full:
            break
    return RoutingHint(tuple(text.blocks), key)


class _Beginning:
    """Hashes of a text's beginnings, while it grows."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, int]] = []
        self._hash = blake2b(digest_size=8)
        self._length = 0
        self._next = SHORTEST

    @property
    def full(self) -> bool:
        """True if further text has no effect."""
        return self._length >= LONGEST or len(self.blocks) >= MOST

    def add(self, text: str) -> None:
        """Append text, up to the bounds."""
        while text and not self.full:
            now, text = text[: self._next - self._length], text[self._next - self._length :]
            self._hash.update(now.encode("utf-8", "surrogatepass"))
            self._length += len(now)
            if self._length == self._next:
                self._next *= 2
                self.cut()

    def cut(self) -> None:
        """Note the text so far as a beginning that others may have."""
        if self._length > (self.blocks[-1][1] if self.blocks else 0) and len(self.blocks) < MOST:
            self.blocks.append((int.from_bytes(self._hash.digest(), "big"), self._length))


def _parts(body: Mapping[str, Any], prompt: PromptFields) -> Iterator[Iterator[str]]:
    """Yield the parts of the prompt."""
    # Requests with other adapters or another salt share nothing in the cache.
    yield _strings({name: body[name] for name in ("lora", "cache_salt") if body.get(name)})
    yield _strings([body.get(name) for name in prompt.head])
    for name in prompt.turns:
        value = body.get(name)
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield from map(_strings, value)
        else:
            yield _strings(value)


def _strings(value: object, depth: int = _DEPTH, media: bool = False) -> Iterator[str]:
    """Yield the strings of a JSON value, in an order that does not depend on who wrote it."""
    if isinstance(value, str):
        yield _digest(value) if media else value
    elif isinstance(value, (int, float)):
        yield f"{value},"
    elif isinstance(value, list) and depth:
        for one in value:
            yield from _strings(one, depth - 1, media)
    elif isinstance(value, Mapping) and depth:
        names = set(value) - {"cache_control"}  # it moves on with each turn
        if names == {"type", "text"}:  # as if the content were this string
            yield from _strings(value["text"], depth - 1)
            return
        for name in sorted(names):
            yield name
            yield from _strings(value[name], depth - 1, name in _MEDIA)


def _digest(data: str) -> str:
    """Return a text in place of an image or a recording: as long as a text with the same cost."""
    sample = f"{len(data)},{data[:_SAMPLE]},{data[-_SAMPLE:]}"
    return blake2b(sample.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest() * 32


#: Costs, as characters of prompt that could be prefilled instead: of a replica whose slots are all
#: taken, beside one that is idle; and of waiting there until every slot has become free once.
FULL, TURN = 4_000, 12_000
#: A beginning has this many times as many homes as its share of the requests needs.
ROOM = 4
#: Requests whose beginnings are counted fully; those before them count half, then a quarter.
WINDOW = 16_384

_TRIED = 4  # homes, beside two other replicas
_PLACES = 32  # of each replica on the ring
_FIRST = 32


class PrefixAffinity:
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
        """Choose replicas for a request, the best one first; empty without replicas.

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
        # A beginning that comes twice is not common yet with only a few requests for each replica.
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
        """Reduce the weight of old requests, and forget rare beginnings."""
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
    """Return the cost of waiting at a replica with this load."""
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
