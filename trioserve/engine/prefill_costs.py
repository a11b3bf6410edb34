"""`PrefillCosts`: what prompt tokens cost beside streams, as measured lately."""

from __future__ import annotations

#: From so many tokens on, flash attention on a CPU reads the KV cache once for all of them.
#: Deep in a long prompt this makes a token almost twice as cheap.
TILE = 64
#: Prompts get this many tokens a tick at least, so that they come to an end. Ticks with fewer say
#: too little of what tokens cost.
MIN_TOKENS = 16


class PrefillCosts:
    """Learns what tokens cost, and says how many fit into a time.

    A tick is taken to cost ``decode_s + n_prefill * per_token``. Both are learned as moving
    averages: `decode_s` from ticks that only decode, `per_token` from those with a prompt, apart
    for ticks that are smaller and larger than a tile.
    """

    #: Share of a new observation in the average. High: load on the machine comes and goes.
    WEIGHT = 0.3
    #: How much more a token may cost than in the last large tick: it is deeper in the prompt.
    DEEPER = 1.15
    #: A tile makes the tick longer; it has to make a token cheaper by this factor.
    TILE_GAIN = 0.85

    def __init__(self) -> None:
        #: What a tick takes that only decodes, and while no prompts come in.
        self.decode_s = self.quiet_s = 0.0
        self._small_s = 0.0  # for each prompt token, in ticks smaller than a tile
        self._large_s = 0.0  # in others
        self._alone_s = 0.0  # in ticks without decode

    def observe(self, n_prefill: int, n_decode: int, seconds: float, *, quiet: bool) -> None:
        """Learn from a tick; `quiet`: no prompt waited in it."""
        if n_prefill == 0:
            self.decode_s = self._average(self.decode_s, seconds)
            if quiet:
                self.quiet_s = self._average(self.quiet_s, seconds)
        elif n_prefill >= MIN_TOKENS:
            if not n_decode:
                self._alone_s = self._average(self._alone_s, seconds / n_prefill)
            rest = max(0.0, seconds - self.decode_s) if n_decode else seconds
            if n_prefill + n_decode < TILE:
                self._small_s = self._average(self._small_s, rest / n_prefill)
            else:
                # A long tick says enough by itself, and the next one is deeper in the prompt.
                self._large_s = self._average(self._large_s, rest / n_prefill, 2 * self.WEIGHT)

    def _average(self, old: float, new: float, weight: float = WEIGHT) -> float:
        return old + weight * (new - old) if old else new

    def forget_depth(self, time: float, *, small: bool) -> None:
        """Forget what a tile cost deep in a prompt, if it no longer fits into a time.

        Args:
            time: in seconds.
            small: forget with it what tokens cost in ticks smaller than a tile.
        """
        if self._large_s * TILE > time:
            self._large_s = 0.0
            if small:
                self._small_s = 0.0

    @property
    def knows_tiles(self) -> bool:
        """Whether there was a tick as large as a tile."""
        return bool(self._large_s)

    @property
    def tiles_pay(self) -> bool:
        """Whether a token is clearly cheaper in a tile, or nobody knows."""
        return not self._large_s or self._large_s < self._small_s * self.TILE_GAIN

    def large_seconds(self, n_tokens: int) -> float:
        """Seconds that tokens may take in the next large tick, beside decode."""
        return n_tokens * self._large_s * self.DEEPER

    def fitting(self, time: float) -> int:
        """How many tokens fit into a time, in a large tick or else a small one; 0: unknown."""
        small, large = self._small_s or self._large_s, self._large_s or self._small_s
        if not small or time <= 0:
            return 0
        in_large = int(time / large)
        return in_large if in_large >= TILE else min(TILE - 1, int(time / small))

    def fitting_alone(self, time: float) -> int:
        """How many tokens fit into a tick without decode; 0: unknown."""
        return int(time / self._alone_s) if self._alone_s else 0
