"""Strategies that share a step between decode and prefill, by costs of tokens and a pace."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

from trioserve.errors import ConfigError

#: From this many rows on, flash attention on a CPU reads the KV cache once for all of them (ggml's
#: `GGML_FA_TILE_Q`). Deep in a long prompt this makes a token 2 to 12 times cheaper.
TILE = 64
#: Prompts get at least this many tokens a step, so that they finish. Steps with fewer say too
#: little about what tokens cost.
MIN_TOKENS = 16
#: The most steps without prompts that are reported to a strategy when it is asked again: the last.
QUIET = 8


class PrefillCosts:
    """Learns what tokens cost, and computes how many fit into a time.

    A step is taken to cost ``decode_s + n_prefill * per_token``. Both are learned as moving
    averages: `decode_s` from steps that only decode, `per_token` from those with a prompt, apart
    for steps that are smaller and larger than a tile.

    In a unified KV cache, all rows of a step make tiles. In a split one, llama.cpp first computes
    one row of each sequence together, and then what a prompt has left.
    """

    #: The KV cache is unified.
    unified = True

    #: Share of a new observation in the average. High: load on the machine comes and goes.
    WEIGHT = 0.3
    #: The most that a token may cost, in costs of the last large step: it is deeper in the prompt.
    DEEPER = 1.15
    #: A tile makes the step longer; it has to make a token cheaper by this factor.
    TILE_GAIN = 0.85
    #: A new cost counts as at most this many times the average: others may have had the cores.
    MOST = 2.0
    #: After this many smaller steps, a tile is tried again.
    RETRY = 4

    def __init__(self) -> None:
        self.decode_s = 0.0  # of a step that only decodes
        #: The last such steps while no prompts came in. Some are longer: a prompt was tokenized.
        self._quiet = deque[float](maxlen=QUIET)
        self._small_s = 0.0  # for each prompt token, in steps smaller than a tile
        self._large_s = 0.0  # in others
        self._alone_s = 0.0  # in steps without decode
        self._n_small = 0  # steps with a prompt since the last tile

    def observe(self, n_prefill: int, n_decode: int, seconds: float, *, quiet: bool) -> None:
        """Learn from a step; `quiet`: no prompt waited in it."""
        if n_prefill == 0:
            self.decode_s = self._average(self.decode_s, seconds)
            if quiet:
                self._quiet.append(seconds)
        elif n_prefill >= MIN_TOKENS:
            if not n_decode:
                self._alone_s = self._average(self._alone_s, seconds / n_prefill)
            rest = max(0.0, seconds - self.decode_s) if n_decode else seconds
            if self._rows(n_prefill, n_decode) < TILE:
                self._small_s = self._average(self._small_s, rest / n_prefill)
                self._n_small += 1
            else:
                self._n_small = 0
                # A long step says enough by itself, and the next one is deeper in the prompt.
                self._large_s = self._average(self._large_s, rest / n_prefill, 2 * self.WEIGHT)

    @property
    def quiet_s(self) -> float:
        """The time of a step that only decodes, while no prompts come in; 0: unknown."""
        return median(self._quiet) if self._quiet else 0.0

    def _rows(self, n_prefill: int, n_decode: int) -> int:
        """Count the rows that a step computes in tiles."""
        return n_prefill + (n_decode if self.unified else -(n_decode > 0))

    def filling(self, n_rows: int, n_decode: int) -> int:
        """Count the prompt tokens that fill `n_rows` rows, or a tile more, beside the streams."""
        if not self.unified:
            return n_rows + (n_decode > 0)
        n_tokens = n_rows - n_decode % TILE
        return n_tokens if n_tokens >= MIN_TOKENS else n_tokens + TILE

    def _average(self, old: float, new: float, weight: float = WEIGHT) -> float:
        return old + weight * (min(new, self.MOST * old) - old) if old else new

    def forget_depth(self, time: float, *, small: bool) -> None:
        """Forget the cost of a tile deep in a prompt, if it no longer fits into a time.

        Args:
            time: in seconds.
            small: also forget the cost of tokens in steps smaller than a tile.
        """
        if self._large_s * TILE > time:
            self._large_s = 0.0
            if small:
                self._small_s = 0.0

    @property
    def knows_tiles(self) -> bool:
        """True after a step as large as a tile."""
        return bool(self._large_s)

    def tile_pays(self, n_tokens: int, ahead_s: float) -> bool:
        """True if a prompt should get these tokens, which fill a tile, rather than fewer.

        Args:
            n_tokens: how many.
            ahead_s: seconds that streams may be ahead: they do not notice a step of that length.
        """
        seconds = self.large_seconds(n_tokens)  # 0: not measured, so try a tile
        if seconds < ahead_s:
            return True
        # Without a retry, a cost that other processes raised would never fall.
        is_due = self._n_small >= self.RETRY and seconds < 2 * ahead_s
        return is_due or self._large_s < self._small_s * self.TILE_GAIN

    def large_seconds(self, n_tokens: int) -> float:
        """Seconds that tokens may take in the next large step, beside decode: in whole tiles."""
        n_tiles = -(-(n_tokens - (not self.unified)) // TILE)
        return n_tiles * TILE * (self._large_s or self._alone_s) * self.DEEPER

    def fitting(self, time: float) -> int:
        """Count the tokens that fit into a time, in a large or else a small step; 0: unknown."""
        small, large = self._small_s or self._large_s, self._large_s or self._small_s
        if not small or time <= 0:
            return 0
        in_large = int(time / large)
        return in_large if in_large >= TILE else min(TILE - 1, int(time / small))

    def fitting_alone(self, time: float) -> int:
        """Count the tokens that fit into a step without decode; 0: unknown."""
        return int(time / self._alone_s) if self._alone_s else 0


#: The most that the time between two tokens of a stream may grow while prompts come in.
SLOWDOWN = 4.1


class PacedStrategy:
    """Chooses how many prompt tokens a step may have, so that streams keep their pace.

    While prompts come in, streams get a token every `pace` seconds on average. A step may take
    longer than that, where fewer tokens would cost much more each. Then prompts wait for steps
    that only decode, until the streams have what they missed; their readers get these tokens one
    by one, at the pace, so that they do not see how uneven the steps are::

        step     | prefill and decode     |decode|decode| prefill and decode     |
        tokens                            a      b      c                        d
        readers                           a           b           c           d

    Args:
        max_tick_ms: the pace. 0: `slowdown` times what a step takes that only decodes.
        slowdown: how much slower streams may become while prompts come in.
    """

    #: The pace until the time of a decode has been measured.
    DEFAULT_PACE_S = 0.05
    #: Rows that long prompts get once the streams are so far ahead that they do not miss them: a
    #: token costs a third less than in the smallest tile, and no less in any larger one.
    LARGE_TILES = (256, 128)
    #: A large tile takes no longer than that, for streams cannot be further ahead.
    MAX_AHEAD_S = 1.0
    #: While no stream decodes, a step may take this many times the pace, or `DEFAULT_PACE_S`.
    ALONE = 10
    #: And has this many tokens at least: fewer would not keep the cores busy.
    MIN_TOKENS_ALONE = 128
    #: It may take so much longer, if that finishes all prompts: one that is left behind takes
    #: another step, and streams wait for that.
    FINISHING = 1.5

    def __init__(self, max_tick_ms: float = 0.0, slowdown: float = SLOWDOWN) -> None:
        self._max_step_s = max_tick_ms / 1e3
        self._slowdown = slowdown
        self._costs = PrefillCosts()
        #: Seconds that streams are ahead of their pace; below 0: behind.
        self._lead_s = 0.0
        #: Seconds between two tokens of a stream while prompts come in, and 0 while none do.
        self.pace = 0.0
        self._is_first = True  # no step with a pace has come before this one
        self._in_tiles = False  # a prompt got a tile where that took longer than the pace

    def begin(self, *, unified: bool) -> None:
        self._costs.unified = unified

    def observe(self, n_prefill: int, n_decode: int, seconds: float) -> None:
        """Learn what a step cost, and count what the streams are owed after it."""
        pace, self.pace, costs = self.pace, 0.0, self._costs
        is_first, self._is_first = self._is_first, not (pace and n_decode)
        costs.observe(n_prefill, n_decode, seconds, quiet=not pace)
        if pace and n_decode:
            # The first token is read when it comes; those that follow are held until they are due.
            lead = self._lead_s + (min(pace, seconds) if is_first else pace) - seconds
            self._lead_s = max(-self.ALONE * pace, min(lead, max(pace, self.MAX_AHEAD_S)))
        elif not pace and not n_prefill:  # no prompts
            self._lead_s = 0.0
            if costs.knows_tiles:
                costs.forget_depth(self._target(), small=self._in_tiles)
            self._in_tiles = False

    def _target(self) -> float:
        """The pace while as many prompts come in as streams decode, or fewer."""
        # If a step that only decodes is already long, prompts get as much time again.
        wanted = self._max_step_s or self._slowdown * self._costs.quiet_s
        return max(wanted, 2 * self._costs.decode_s) or self.DEFAULT_PACE_S

    def prompt_tokens(self, pending: Sequence[int], n_decode: int, budget: int) -> int:
        """Choose the number of prompt tokens of the next step; 0: streams are behind their pace.

        If more requests wait for their first token than for their next one, the pace is slower in
        proportion. If one step without streams would finish all prompts, it may take as long.
        """
        n_pending, costs = sum(pending), self._costs
        n_alone = costs.fitting_alone(self.ALONE * (self._max_step_s or self.DEFAULT_PACE_S))
        if not n_decode:
            n_tokens = max(self.MIN_TOKENS_ALONE, n_alone)
            return min(budget, n_pending if n_pending <= self.FINISHING * n_tokens else n_tokens)
        self.pace = self._target() * min(self.ALONE, max(1.0, len(pending) / n_decode))
        if len(pending) > n_decode and n_pending <= min(self.FINISHING * n_alone, budget):
            return n_pending
        time = self.pace + self._lead_s - costs.decode_s
        fitting = costs.fitting(min(time, self.pace - costs.decode_s))
        if large := self._large_tile(fitting, n_pending, n_decode):
            n_tokens = min(budget, large)
            return n_tokens if costs.large_seconds(n_tokens) <= time else 0
        least = costs.filling(TILE, n_decode)
        if not costs.tile_pays(least, self.MAX_AHEAD_S):
            least = MIN_TOKENS
        if fitting < least and self._lead_s < 0:
            return 0
        n_tokens = min(budget, _with_rest(max(least, fitting), n_pending))
        is_long = n_tokens >= TILE and n_tokens > fitting
        if is_long and time < costs.large_seconds(n_tokens) < self.MAX_AHEAD_S:
            return 0  # it would be a gap in every stream
        self._in_tiles = self._in_tiles or (fitting < least and least > MIN_TOKENS)
        return n_tokens

    def _large_tile(self, fitting: int, n_pending: int, n_decode: int) -> int:
        """Find the largest tile that a long prompt may have; 0: none, or more than that fits."""
        if fitting >= min(self.LARGE_TILES) or not self._costs.knows_tiles:
            return 0
        for n_rows in self.LARGE_TILES:
            n_tokens = _with_rest(self._costs.filling(n_rows, n_decode), n_pending)
            if n_rows < n_pending and self._costs.large_seconds(n_tokens) < self.MAX_AHEAD_S:
                return n_tokens
        return 0


def _with_rest(n_tokens: int, n_pending: int) -> int:
    """Leave nothing that is smaller than a tile: that could cost more than all of this step."""
    return n_pending if n_tokens >= TILE // 2 and n_pending - n_tokens < TILE else n_tokens


class BatchStrategy(Protocol):
    """Decides how many prompt tokens go into a step.

    Every slot in decode gets one token in every step; a strategy shares out the rest.
    """

    #: Seconds between two tokens of a stream for its reader; 0: as they come. It belongs to the
    #: step that `share` was called for, and hides how uneven steps are.
    pace: float = 0.0

    def begin(self, *, unified: bool) -> None:
        """Learn whether the KV cache is unified, before the first step; by default, nothing."""

    def share(self, pending: Sequence[int], n_decode: int, budget: int) -> Sequence[int]:
        """Choose how many tokens each prompt gets in this step.

        Args:
            pending: tokens still to prefill of each prompt, the oldest first.
            n_decode: how many slots decode in this step.
            budget: the most tokens to give, all together; at least 1.

        Returns:
            One number for each prompt, from 0 to its pending ones; at most `budget` in sum, and
            at least 1 in sum, unless prompts must wait for the slots that decode.
        """

    def observe(self, n_prefill: int, n_decode: int, seconds: float) -> None:
        """Learn from a step: its tokens of each kind, and how long it took; by default, nothing.

        While `pace` is 0, steps without prompts are reported before the next `share`, and only the
        last ones.
        """


class DecodeMaximal(PacedStrategy):
    """Keep streams flowing: while some decode, prompts get only as much as the pace allows.

    While no stream decodes, they get ten times that, and those that fit into one batch get equal
    parts: they have come together, and are computed together. Otherwise the oldest prompt gets at
    least half, so that it does not starve, and the shortest ones get the rest, so that they do not
    wait for long ones.
    """

    def __init__(self, max_tick_ms: float = 0.0) -> None:
        super().__init__(max_tick_ms)
        self._in_turns = self._is_turn_of_oldest = False

    def begin(self, *, unified: bool) -> None:
        super().begin(unified=unified)
        self._in_turns = not unified

    def share(self, pending: Sequence[int], n_decode: int, budget: int) -> Sequence[int]:
        """Share as many tokens as leave the streams at their pace."""
        n_tokens = self.prompt_tokens(pending, n_decode, budget)
        if not n_decode and sum(pending) <= budget:
            return share_equally(pending, n_tokens)
        if not self._in_turns or len(pending) == 1 or not TILE < n_tokens < 5 * TILE:
            return share_out(pending, n_tokens)
        # In a split KV cache, each prompt needs a whole tile, so prompts take turns.
        self._is_turn_of_oldest = not self._is_turn_of_oldest
        return share_out(pending, n_tokens, first=n_tokens if self._is_turn_of_oldest else 0)


class Balanced(PacedStrategy):
    """Equal parts: each prompt gets the same; streams become half as fast as by default."""

    def __init__(self, max_tick_ms: float = 0.0) -> None:
        super().__init__(2 * max_tick_ms, slowdown=2 * SLOWDOWN)

    def share(self, pending: Sequence[int], n_decode: int, budget: int) -> Sequence[int]:
        """Give every prompt an equal part; the others share what one does not need."""
        return share_equally(pending, self.prompt_tokens(pending, n_decode, budget))


class PrefillPriority(BatchStrategy):
    """First tokens first: prompts get all of the batch, and streams wait for them."""

    def __init__(self, max_tick_ms: float = 0.0) -> None:
        """Take the limit that all strategies are given, and do without."""

    def share(self, pending: Sequence[int], n_decode: int, budget: int) -> Sequence[int]:
        return share_out(pending, budget)


class AnswersFirst(BatchStrategy):
    """Batching that is not continuous: while some slots decode, prompts wait.

    Args:
        strategy: shares the steps in which no slot decodes.
    """

    def __init__(self, strategy: BatchStrategy) -> None:
        self._strategy = strategy

    def begin(self, *, unified: bool) -> None:
        self._strategy.begin(unified=unified)

    def share(self, pending: Sequence[int], n_decode: int, budget: int) -> Sequence[int]:
        """Give prompts nothing, or all that the other strategy gives them."""
        if n_decode:
            return [0] * len(pending)
        return self._strategy.share(pending, n_decode, budget)

    def observe(self, n_prefill: int, n_decode: int, seconds: float) -> None:
        self._strategy.observe(n_prefill, n_decode, seconds)


def share_out(pending: Sequence[int], budget: int, first: int | None = None) -> list[int]:
    """Give the oldest prompt `first` tokens, by default half, and the rest to the shortest ones."""
    shares = [0] * len(pending)
    shares[0] = min(pending[0], -(-budget // 2) if first is None else first)
    left = budget - shares[0]
    for i in sorted(range(len(pending)), key=lambda i: pending[i] - shares[i]):
        more = min(pending[i] - shares[i], left)
        shares[i] += more
        left -= more
    return shares


def share_equally(pending: Sequence[int], budget: int) -> list[int]:
    """Give every prompt the same; the others share what one does not need.

    In a split KV cache, llama.cpp computes together what sequences have in equal numbers, and what
    one has more in another pass. So a few tokens may be left, unless there are fewer than prompts.
    """
    shares, left, level = [0] * len(pending), budget, 0
    order = sorted(range(len(pending)), key=lambda i: pending[i])
    for done, i in enumerate(order):
        level = level or left // (len(order) - done)
        if pending[i] <= level:
            shares[i], level = pending[i], 0
        else:
            shares[i] = level or min(1, left)
        left -= shares[i]
    return shares


#: The strategies by name.
STRATEGIES: dict[str, Callable[[float], BatchStrategy]] = {
    "decode-maximal": DecodeMaximal,
    "prefill-priority": PrefillPriority,
    "balanced": Balanced,
}

#: The members of a strategy that the engine uses.
_PARTS = ("pace", "begin", "share", "observe")


def load_strategy(name: str, max_tick_ms: float) -> BatchStrategy:
    """Make a strategy: one of `STRATEGIES`, or a class of the user's, as ``module:Class``.

    The class is called with `max_tick_ms`.

    Raises:
        ConfigError: there is no such strategy, it cannot be imported or made, or it lacks a method.
    """
    if name in STRATEGIES:
        return STRATEGIES[name](max_tick_ms)
    module, _, attribute = name.partition(":")
    if not attribute:
        known = ", ".join(STRATEGIES)
        raise ConfigError(f"strategy is {name!r}, and must be {known} or module:Class")
    try:
        make: Callable[[float], BatchStrategy] = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the module may raise anything
        raise ConfigError(f"strategy {name!r} cannot be imported: {error}") from error
    try:
        strategy = make(max_tick_ms)
    except Exception as error:
        raise ConfigError(f"strategy {name!r} cannot be made: {error}") from error
    lacks = [part for part in _PARTS if not hasattr(strategy, part)]
    if not lacks and getattr(strategy.share, "__func__", None) is BatchStrategy.share:
        lacks = ["share"]
    if lacks:
        raise ConfigError(
            f"strategy {name!r} lacks {' and '.join(lacks)}. A class derived from "
            "trioserve.engine.strategy.BatchStrategy has all but share."
        )
    return strategy
