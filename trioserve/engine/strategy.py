"""How a tick is shared between decode and prefill."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Protocol

from trioserve.errors import ConfigError


class BatchStrategy(Protocol):
    """Decides how many prompt tokens go into a tick.

    Every slot in decode gets its one token in every tick; what a strategy decides is the rest.
    """

    @property
    def pace(self) -> float:
        """Seconds between two tokens of a stream, as its reader is to get them; 0: as they come.

        It is that of the tick that `share` was called for, and hides how uneven ticks are.
        """

    def share(self, pending: Sequence[int], n_decode: int, budget: int) -> Sequence[int]:
        """Say how many tokens each prompt gets in this tick.

        Args:
            pending: tokens still to prefill of each prompt, the oldest first.
            n_decode: how many slots decode in this tick.
            budget: the most tokens to give, all together; at least 1.

        Returns:
            One number for each prompt, from 0 to its pending ones; at most `budget` in sum, and
            at least 1 in sum, unless prompts are to wait for the slots that decode.
        """

    def observe(self, n_prefill: int, n_decode: int, seconds: float) -> None:
        """Learn from a tick: how many tokens it had of each kind, and how long it took."""


#: How much slower streams may become while prompts come in.
SLOWDOWN = 4.5


class TickClock:
    """Learns what tokens cost, and says how many prompt tokens a tick may have.

    A tick is taken to cost ``decode + n_prefill * per_token``. Both are learned as moving
    averages: `decode` from ticks that only decode, `per_token` from those with a prompt, apart for
    ticks that are smaller and larger than a tile.

    While prompts come in, streams get a token every `pace` seconds on average. A tick may take
    longer than that, where fewer tokens would cost much more each. Then prompts wait for ticks
    that only decode, until the streams have what they missed; their readers get these tokens one
    by one, at the pace, so that they do not see how uneven the ticks are::

        tick     | prefill and decode     |decode|decode| prefill and decode     |
        tokens                            a      b      c                        d
        readers                           a           b           c           d

    Args:
        max_tick_ms: the pace. 0: `slowdown` times what a tick takes that only decodes.
        slowdown: how much slower streams may become while prompts come in.
    """

    #: Share of a new observation in the average. High: load on the machine comes and goes.
    WEIGHT = 0.3
    #: The pace as long as nobody knows what decoding takes.
    DEFAULT_PACE_S = 0.05
    #: Prompts get this many tokens a tick at least, so that they come to an end.
    MIN_TOKENS = 16
    #: From so many tokens on, flash attention on a CPU reads the KV cache once for all of them.
    #: Deep in a long prompt this makes a token almost twice as cheap.
    TILE = 64
    #: A tile makes the tick longer; it has to make a token cheaper by this factor.
    TILE_GAIN = 0.85
    #: What long prompts get once the streams are so far ahead that they do not miss it: a token
    #: costs a third less than in the smallest tile.
    LARGE_TILES = (256, 128)
    #: How much more a token may cost in it than in the last one: it is deeper in the prompt.
    DEEPER = 1.15
    #: A large tile takes no longer than that, for streams cannot be further ahead.
    MAX_AHEAD_S = 0.75
    #: While no stream decodes, a tick may take this many times the pace, or `DEFAULT_PACE_S`.
    ALONE = 10
    #: And has this many tokens at least: fewer would not keep the cores busy.
    MIN_TOKENS_ALONE = 128

    def __init__(self, max_tick_ms: float, slowdown: float = SLOWDOWN) -> None:
        self._max_tick_s = max_tick_ms / 1e3
        self._slowdown = slowdown
        self._decode_s = 0.0
        self._quiet_s = 0.0  # the same, while no prompts came in
        self._small_s = 0.0  # for each prompt token, in ticks smaller than a tile
        self._large_s = 0.0  # in others
        self._alone_s = 0.0  # in ticks without decode
        #: Seconds by which streams are ahead of their pace; below 0: behind.
        self._lead_s = 0.0
        self._pace_s = 0.0  # of the last tick; 0: no prompts came in
        self._in_tiles = False

    @property
    def pace(self) -> float:
        """Seconds between two tokens of a stream while prompts come in, and 0 while none do."""
        return self._pace_s

    def observe(self, n_prefill: int, n_decode: int, seconds: float) -> None:
        """Learn from a tick. Ticks with a few prompt tokens say too little and are left out."""
        pace, self._pace_s = self._pace_s, 0.0
        if n_decode and pace:
            lead = self._lead_s + pace - seconds
            self._lead_s = max(-self.ALONE * pace, min(lead, max(pace, self.MAX_AHEAD_S)))
        if n_prefill == 0:
            self._decode_s = self._average(self._decode_s, seconds)
            if not pace:  # no prompts
                self._quiet_s = self._average(self._quiet_s, seconds)
                self._lead_s = 0.0
                self._forget()
        elif n_prefill >= self.MIN_TOKENS:
            if not n_decode:
                self._alone_s = self._average(self._alone_s, seconds / n_prefill)
            rest = max(0.0, seconds - self._decode_s) if n_decode else seconds
            if n_prefill + n_decode < self.TILE:
                self._small_s = self._average(self._small_s, rest / n_prefill)
            else:
                # A long tick says enough by itself, and the next one is deeper in the prompt.
                self._large_s = self._average(self._large_s, rest / n_prefill, 2 * self.WEIGHT)

    def _forget(self) -> None:
        """Between prompts, forget what depends on how deep in a prompt it was measured."""
        if self._large_s * self.TILE > self._target():
            self._large_s = 0.0
            if self._in_tiles:
                self._small_s = 0.0
        self._in_tiles = False

    def _average(self, old: float, new: float, weight: float = WEIGHT) -> float:
        return old + weight * (new - old) if old else new

    def _target(self) -> float:
        """The pace while as many prompts come in as streams decode, or fewer."""
        # Where a tick that only decodes is already long, prompts get as much time again.
        wanted = self._max_tick_s or self._slowdown * self._quiet_s
        return max(wanted, 2 * self._decode_s) or self.DEFAULT_PACE_S

    def prompt_tokens(self, pending: Sequence[int], n_decode: int, budget: int) -> int:
        """How many prompt tokens the next tick is to have; 0: streams are behind their pace.

        Where more requests wait for their first token than for their next one, the pace is slower,
        in proportion; and as slow as a tick takes without streams, if all prompts are done then.
        """
        alone_s = self.ALONE * (self._max_tick_s or self.DEFAULT_PACE_S)
        n_alone = int(alone_s / self._alone_s) if self._alone_s else 0
        if not n_decode:
            return min(budget, max(self.MIN_TOKENS_ALONE, n_alone))
        self._pace_s = self._target() * min(self.ALONE, max(1.0, len(pending) / n_decode))
        if len(pending) > n_decode and sum(pending) <= min(n_alone, budget):
            return sum(pending)
        time = self._pace_s + self._lead_s - self._decode_s
        fitting = self._fitting(min(time, self._pace_s - self._decode_s))
        if fitting < min(self.LARGE_TILES) and (tile := self._large_tile(sum(pending))):
            n_tokens = self._no_rest(tile - n_decode, pending, budget)
            return n_tokens if self._seconds(n_tokens) <= time else 0
        least = self.MIN_TOKENS
        # A tile also shows what tiles cost, where that is not known.
        if not self._large_s or self._large_s < self._small_s * self.TILE_GAIN:
            least = max(least, self.TILE - n_decode)
        if fitting < least and self._lead_s < 0:
            return 0
        self._in_tiles = self._in_tiles or (fitting < least and least > self.MIN_TOKENS)
        return self._no_rest(max(least, fitting), pending, budget)

    def _large_tile(self, n_pending: int) -> int:
        """Find the largest tile that a long prompt may have; 0: none."""
        if not self._large_s:
            return 0
        tiles = [tile for tile in self.LARGE_TILES if tile < n_pending]
        with_rest = [n for n in tiles if self._seconds(n + self.TILE) < self.MAX_AHEAD_S]
        return max(with_rest, default=0)

    def _seconds(self, n_tokens: int) -> float:
        return n_tokens * self._large_s * self.DEEPER

    def _no_rest(self, n_tokens: int, pending: Sequence[int], budget: int) -> int:
        """Leave nothing that is smaller than a tile: that could cost more than all of this tick."""
        n_pending = sum(pending)
        if n_tokens >= self.TILE // 2 and n_pending - n_tokens < self.TILE:
            n_tokens = n_pending
        return min(budget, n_tokens)

    def _fitting(self, time: float) -> int:
        """How many tokens fit into a time, in a large tick or else a small one; 0: unknown."""
        small, large = self._small_s or self._large_s, self._large_s or self._small_s
        if not small or time <= 0:
            return 0
        in_large = int(time / large)
        return in_large if in_large >= self.TILE else min(self.TILE - 1, int(time / small))


class DecodeMaximal:
    """Keep streams flowing: while some decode, prompts get what keeps them at their pace.

    While no stream decodes, they get ten times that. The oldest prompt gets at least half,
    so that it is not starved, and the rest goes to those that need least, so that a short prompt
    does not wait for a long one.

    Args:
        max_tick_ms: milliseconds between two tokens of a stream, while prompts come in; 0: as
            `TickClock` says.
    """

    def __init__(self, max_tick_ms: float = 0.0) -> None:
        self._clock = TickClock(max_tick_ms)

    @property
    def pace(self) -> float:
        """Seconds between two tokens of a stream, if prompts come in."""
        return self._clock.pace

    def share(self, pending: Sequence[int], n_decode: int, budget: int) -> Sequence[int]:
        """Share what leaves the streams at their pace."""
        return share_out(pending, self._clock.prompt_tokens(pending, n_decode, budget))

    def observe(self, n_prefill: int, n_decode: int, seconds: float) -> None:
        """Learn what tokens cost."""
        self._clock.observe(n_prefill, n_decode, seconds)


class PrefillPriority:
    """First tokens first: prompts get all of the batch, and streams wait for them."""

    pace = 0.0

    def __init__(self, max_tick_ms: float = 0.0) -> None:
        """Take the limit that all strategies are given, and do without."""

    def share(self, pending: Sequence[int], n_decode: int, budget: int) -> Sequence[int]:
        """Share all of the batch."""
        return share_out(pending, budget)

    def observe(self, n_prefill: int, n_decode: int, seconds: float) -> None:
        """Learn nothing."""


class Balanced:
    """Equal parts: each prompt gets the same, and streams become half as fast as by default."""

    def __init__(self, max_tick_ms: float = 0.0) -> None:
        self._clock = TickClock(2 * max_tick_ms, slowdown=2 * SLOWDOWN)

    @property
    def pace(self) -> float:
        """Seconds between two tokens of a stream, if prompts come in."""
        return self._clock.pace

    def share(self, pending: Sequence[int], n_decode: int, budget: int) -> Sequence[int]:
        """Give every prompt an equal part; what one does not need goes to the others."""
        left = self._clock.prompt_tokens(pending, n_decode, budget)
        shares = [0] * len(pending)
        order = sorted(range(len(pending)), key=lambda i: pending[i])
        for done, i in enumerate(order):
            shares[i] = min(pending[i], -(-left // (len(order) - done)))
            left -= shares[i]
        return shares

    def observe(self, n_prefill: int, n_decode: int, seconds: float) -> None:
        """Learn what tokens cost."""
        self._clock.observe(n_prefill, n_decode, seconds)


class AnswersFirst:
    """Batching that is not continuous: while some slots decode, prompts wait.

    Args:
        strategy: shares the ticks in which no slot decodes.
    """

    def __init__(self, strategy: BatchStrategy) -> None:
        self._strategy = strategy

    @property
    def pace(self) -> float:
        """0: prompts wait for the streams."""
        return 0.0

    def share(self, pending: Sequence[int], n_decode: int, budget: int) -> Sequence[int]:
        """Give prompts nothing, or all that the other strategy gives them."""
        if n_decode:
            return [0] * len(pending)
        return self._strategy.share(pending, n_decode, budget)

    def observe(self, n_prefill: int, n_decode: int, seconds: float) -> None:
        """Let the other strategy learn."""
        self._strategy.observe(n_prefill, n_decode, seconds)


def share_out(pending: Sequence[int], budget: int) -> list[int]:
    """Give the first half of the budget to the oldest prompt, the rest to the shortest ones."""
    shares = [0] * len(pending)
    shares[0] = min(pending[0], -(-budget // 2))
    left = budget - shares[0]
    for i in sorted(range(len(pending)), key=lambda i: pending[i] - shares[i]):
        more = min(pending[i] - shares[i], left)
        shares[i] += more
        left -= more
    return shares


#: The strategies by name.
STRATEGIES: dict[str, Callable[[float], BatchStrategy]] = {
    "decode-maximal": DecodeMaximal,
    "prefill-priority": PrefillPriority,
    "balanced": Balanced,
}


def load_strategy(name: str, max_tick_ms: float) -> BatchStrategy:
    """Make a strategy: one of `STRATEGIES`, or a class of the user's, as ``module:Class``.

    The class is called with `max_tick_ms`.

    Raises:
        ConfigError: there is no such strategy, or it cannot be imported.
    """
    if name in STRATEGIES:
        return STRATEGIES[name](max_tick_ms)
    module, _, attribute = name.partition(":")
    if not attribute:
        known = ", ".join(STRATEGIES)
        raise ConfigError(f"strategy is {name!r}, and must be {known} or module:Class")
    try:
        make: Callable[[float], BatchStrategy] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"strategy {name!r} cannot be imported: {error}") from error
    return make(max_tick_ms)
