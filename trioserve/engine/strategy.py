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


class TickClock:
    """Learns what tokens cost, and says how many prompt tokens fit into a time.

    A tick is taken to cost ``decode + n_prefill * per_token``. Both are learned as moving
    averages: `decode` from ticks that only decode, `per_token` from those with a prompt, apart for
    ticks that are smaller and larger than a tile.
    """

    #: Share of a new observation in the average. High: load on the machine comes and goes.
    WEIGHT = 0.3
    #: Prompts get this many tokens a tick at least, so that they come to an end.
    MIN_TOKENS = 16
    #: From so many tokens on, flash attention on a CPU reads the KV cache once for all of them.
    #: Deep in a long prompt this makes a token three times cheaper.
    TILE = 64
    #: A tile makes the tick longer; it has to make a token cheaper by this factor.
    TILE_GAIN = 0.65
    #: While no stream decodes, a tick may take this much longer. A cancel waits for the tick.
    ALONE = 10
    #: And has this many tokens at least: fewer would not keep the cores busy.
    MIN_TOKENS_ALONE = 128

    def __init__(self, max_tick_ms: float) -> None:
        self._max_tick_s = max_tick_ms / 1e3
        self._decode_s = 0.0
        self._small_s = 0.0  # for each prompt token, in ticks smaller than a tile
        self._large_s = 0.0  # in others
        self._alone_s = 0.0  # in ticks without decode
        self._in_tiles = False

    def observe(self, n_prefill: int, n_decode: int, seconds: float) -> None:
        """Learn from a tick. Ticks with a few prompt tokens say too little and are left out."""
        if n_prefill == 0:
            self._decode_s = self._average(self._decode_s, seconds)
            self._forget()
        elif n_prefill >= self.MIN_TOKENS:
            if not n_decode:
                self._alone_s = self._average(self._alone_s, seconds / n_prefill)
            rest = max(0.0, seconds - self._decode_s) if n_decode else seconds
            if n_prefill + n_decode < self.TILE:
                self._small_s = self._average(self._small_s, rest / n_prefill)
            else:
                self._large_s = self._average(self._large_s, rest / n_prefill)

    def _forget(self) -> None:
        """Between prompts, forget what depends on how deep in a prompt it was measured."""
        if self._large_s * self.TILE > self._max_tick_s:
            self._large_s = 0.0
            if self._in_tiles:
                self._small_s = 0.0
        self._in_tiles = False

    def _average(self, old: float, new: float) -> float:
        return old + self.WEIGHT * (new - old) if old else new

    def prompt_tokens(self, pending: Sequence[int], n_decode: int, budget: int) -> int:
        """How many prompt tokens make a tick as long as it may be.

        Where more requests wait for their first token than for their next one, that is longer, in
        proportion; and as long as without streams, if all prompts are done then. Where a tick
        that only decodes is already long, prompts get as much time again. Where the fewest tokens
        take longer than that anyway, they get a tile, if that is much cheaper.
        """
        n_alone = int(self._max_tick_s * self.ALONE / self._alone_s) if self._alone_s else 0
        if not n_decode:
            return min(budget, max(self.MIN_TOKENS_ALONE, n_alone))
        if len(pending) > n_decode and sum(pending) <= min(n_alone, budget):
            return sum(pending)
        tick = self._max_tick_s * min(self.ALONE, max(1.0, len(pending) / n_decode))
        min_tokens, time_left = self.MIN_TOKENS, max(tick - self._decode_s, self._decode_s)
        # A tile also shows what tiles cost, where that is not known.
        is_cheaper = self._large_s < self._small_s * self.TILE_GAIN
        if is_cheaper and self._small_s * min_tokens > time_left:
            min_tokens = max(min_tokens, self.TILE - n_decode)
            self._in_tiles = True
        return min(budget, max(min_tokens, self._fitting(time_left)))

    def _fitting(self, time: float) -> int:
        """How many tokens fit into a time, in a large tick or else a small one; 0: unknown."""
        small, large = self._small_s or self._large_s, self._large_s or self._small_s
        if not small:
            return 0
        in_large = int(time / large)
        return in_large if in_large >= self.TILE else min(self.TILE, int(time / small))


class DecodeMaximal:
    """Keep streams flowing: while some decode, prompts get what fits into a tick's time.

    While no stream decodes, they get ten times that. The oldest prompt gets at least half,
    so that it is not starved, and the rest goes to those that need least, so that a short prompt
    does not wait for a long one.

    Args:
        max_tick_ms: how long a tick may take while streams are decoding.
    """

    def __init__(self, max_tick_ms: float = 50.0) -> None:
        self._clock = TickClock(max_tick_ms)

    def share(self, pending: Sequence[int], n_decode: int, budget: int) -> Sequence[int]:
        """Share what fits into the time."""
        return share_out(pending, self._clock.prompt_tokens(pending, n_decode, budget))

    def observe(self, n_prefill: int, n_decode: int, seconds: float) -> None:
        """Learn what tokens cost."""
        self._clock.observe(n_prefill, n_decode, seconds)


class PrefillPriority:
    """First tokens first: prompts get all of the batch, and streams wait for them."""

    def __init__(self, max_tick_ms: float = 50.0) -> None:
        """Take the limit that all strategies are given, and do without."""

    def share(self, pending: Sequence[int], n_decode: int, budget: int) -> Sequence[int]:
        """Share all of the batch."""
        return share_out(pending, budget)

    def observe(self, n_prefill: int, n_decode: int, seconds: float) -> None:
        """Learn nothing."""


class Balanced:
    """Equal parts: each prompt gets the same, and as many tokens as fit into twice the time."""

    def __init__(self, max_tick_ms: float = 50.0) -> None:
        self._clock = TickClock(2 * max_tick_ms)

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
