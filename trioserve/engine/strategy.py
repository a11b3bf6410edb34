"""How a step is shared between decode and prefill."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Protocol

from trioserve.engine.prefill_costs import TILE
from trioserve.engine.step_clock import SLOWDOWN, StepClock
from trioserve.errors import ConfigError


class BatchStrategy(Protocol):
    """Decides how many prompt tokens go into a step.

    Every slot in decode gets its one token in every step; what a strategy decides is the rest.
    """

    @property
    def pace(self) -> float:
        """Seconds between two tokens of a stream, as its reader is to get them; 0: as they come.

        It is that of the step that `share` was called for, and hides how uneven steps are.
        """

    def begin(self, *, unified: bool) -> None:
        """Learn whether the KV cache is unified, before the first step."""

    def share(self, pending: Sequence[int], n_decode: int, budget: int) -> Sequence[int]:
        """Say how many tokens each prompt gets in this step.

        Args:
            pending: tokens still to prefill of each prompt, the oldest first.
            n_decode: how many slots decode in this step.
            budget: the most tokens to give, all together; at least 1.

        Returns:
            One number for each prompt, from 0 to its pending ones; at most `budget` in sum, and
            at least 1 in sum, unless prompts are to wait for the slots that decode.
        """

    def observe(self, n_prefill: int, n_decode: int, seconds: float) -> None:
        """Learn from a step: how many tokens it had of each kind, and how long it took."""


class DecodeMaximal:
    """Keep streams flowing: while some decode, prompts get what keeps them at their pace.

    While no stream decodes, they get ten times that. The oldest prompt gets at least half,
    so that it is not starved, and the rest goes to those that need least, so that a short prompt
    does not wait for a long one.

    Args:
        max_tick_ms: milliseconds between two tokens of a stream, while prompts come in; 0: as
            `StepClock` says.
    """

    def __init__(self, max_tick_ms: float = 0.0) -> None:
        self._clock = StepClock(max_tick_ms)
        self._in_turns = self._is_turn_of_oldest = False

    @property
    def pace(self) -> float:
        """Seconds between two tokens of a stream, if prompts come in."""
        return self._clock.pace

    def begin(self, *, unified: bool) -> None:
        """Learn how rows make tiles."""
        self._clock.begin(unified=unified)
        self._in_turns = not unified

    def share(self, pending: Sequence[int], n_decode: int, budget: int) -> Sequence[int]:
        """Share what leaves the streams at their pace."""
        n_tokens = self._clock.prompt_tokens(pending, n_decode, budget)
        if not self._in_turns or len(pending) == 1 or not TILE < n_tokens < 5 * TILE:
            return share_out(pending, n_tokens)
        # In a split KV cache, halves of a tile would be no tiles.
        self._is_turn_of_oldest = not self._is_turn_of_oldest
        return share_out(pending, n_tokens, first=n_tokens if self._is_turn_of_oldest else 0)

    def observe(self, n_prefill: int, n_decode: int, seconds: float) -> None:
        """Learn what tokens cost."""
        self._clock.observe(n_prefill, n_decode, seconds)


class PrefillPriority:
    """First tokens first: prompts get all of the batch, and streams wait for them."""

    pace = 0.0

    def __init__(self, max_tick_ms: float = 0.0) -> None:
        """Take the limit that all strategies are given, and do without."""

    def begin(self, *, unified: bool) -> None:
        """Learn nothing."""

    def share(self, pending: Sequence[int], n_decode: int, budget: int) -> Sequence[int]:
        """Share all of the batch."""
        return share_out(pending, budget)

    def observe(self, n_prefill: int, n_decode: int, seconds: float) -> None:
        """Learn nothing."""


class Balanced:
    """Equal parts: each prompt gets the same, and streams become half as fast as by default."""

    def __init__(self, max_tick_ms: float = 0.0) -> None:
        self._clock = StepClock(2 * max_tick_ms, slowdown=2 * SLOWDOWN)

    @property
    def pace(self) -> float:
        """Seconds between two tokens of a stream, if prompts come in."""
        return self._clock.pace

    def begin(self, *, unified: bool) -> None:
        """Learn how rows make tiles."""
        self._clock.begin(unified=unified)

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
        strategy: shares the steps in which no slot decodes.
    """

    def __init__(self, strategy: BatchStrategy) -> None:
        self._strategy = strategy

    @property
    def pace(self) -> float:
        """0: prompts wait for the streams."""
        return 0.0

    def begin(self, *, unified: bool) -> None:
        """Let the other strategy know."""
        self._strategy.begin(unified=unified)

    def share(self, pending: Sequence[int], n_decode: int, budget: int) -> Sequence[int]:
        """Give prompts nothing, or all that the other strategy gives them."""
        if n_decode:
            return [0] * len(pending)
        return self._strategy.share(pending, n_decode, budget)

    def observe(self, n_prefill: int, n_decode: int, seconds: float) -> None:
        """Let the other strategy learn."""
        self._strategy.observe(n_prefill, n_decode, seconds)


def share_out(pending: Sequence[int], budget: int, first: int | None = None) -> list[int]:
    """Give the oldest prompt so many tokens, by default half, and the rest to the shortest ones."""
    shares = [0] * len(pending)
    shares[0] = min(pending[0], -(-budget // 2) if first is None else first)
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
