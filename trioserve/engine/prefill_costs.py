"""`PrefillCosts`: what prompt tokens cost beside streams, as measured lately."""

from __future__ import annotations

#: From so many rows on, flash attention on a CPU reads the KV cache once for all of them (ggml's
#: `GGML_FA_TILE_Q`). Deep in a long prompt this makes a token 2 to 12 times as cheap.
TILE = 64
#: Prompts get this many tokens a step at least, so that they come to an end. Steps with fewer say
#: too little of what tokens cost.
MIN_TOKENS = 16


class PrefillCosts:
    """Learns what tokens cost, and says how many fit into a time.

    A step is taken to cost ``decode_s + n_prefill * per_token``. Both are learned as moving
    averages: `decode_s` from steps that only decode, `per_token` from those with a prompt, apart
    for steps that are smaller and larger than a tile.

    In a unified KV cache, all rows of a step make tiles. In a split one, llama.cpp first computes
    one row of each sequence together, and then what a prompt has left.
    """

    #: Whether the KV cache is unified.
    unified = True

    #: Share of a new observation in the average. High: load on the machine comes and goes.
    WEIGHT = 0.3
    #: How much more a token may cost than in the last large step: it is deeper in the prompt.
    DEEPER = 1.15
    #: A tile makes the step longer; it has to make a token cheaper by this factor.
    TILE_GAIN = 0.85
    #: A new cost counts as at most so many times the average: others may have had the cores.
    MOST = 2.0
    #: After so many steps that were smaller, a tile is tried again.
    RETRY = 4

    def __init__(self) -> None:
        #: What a step takes that only decodes, and while no prompts come in.
        self.decode_s = self.quiet_s = 0.0
        self._small_s = 0.0  # for each prompt token, in steps smaller than a tile
        self._large_s = 0.0  # in others
        self._alone_s = 0.0  # in steps without decode
        self._n_small = 0  # steps with a prompt since the last tile

    def observe(self, n_prefill: int, n_decode: int, seconds: float, *, quiet: bool) -> None:
        """Learn from a step; `quiet`: no prompt waited in it."""
        if n_prefill == 0:
            self.decode_s = self._average(self.decode_s, seconds)
            if quiet:
                self.quiet_s = self._average(self.quiet_s, seconds)
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

    def _rows(self, n_prefill: int, n_decode: int) -> int:
        """Count the rows of which a step makes tiles."""
        return n_prefill + (n_decode if self.unified else -(n_decode > 0))

    def filling(self, n_rows: int, n_decode: int) -> int:
        """How many prompt tokens make so many rows, or a tile more, with whatever decodes."""
        if not self.unified:
            return n_rows + (n_decode > 0)
        n_tokens = n_rows - n_decode % TILE
        return n_tokens if n_tokens >= MIN_TOKENS else n_tokens + TILE

    def _average(self, old: float, new: float, weight: float = WEIGHT) -> float:
        return old + weight * (min(new, self.MOST * old) - old) if old else new

    def forget_depth(self, time: float, *, small: bool) -> None:
        """Forget what a tile cost deep in a prompt, if it no longer fits into a time.

        Args:
            time: in seconds.
            small: forget with it what tokens cost in steps smaller than a tile.
        """
        if self._large_s * TILE > time:
            self._large_s = 0.0
            if small:
                self._small_s = 0.0

    @property
    def knows_tiles(self) -> bool:
        """Whether there was a step as large as a tile."""
        return bool(self._large_s)

    def tile_pays(self, n_tokens: int, ahead_s: float) -> bool:
        """Whether a prompt is to have so many tokens, which make a tile, and not fewer.

        Args:
            n_tokens: how many.
            ahead_s: seconds that streams may be ahead, so that they do not miss a step as long.
        """
        seconds = self.large_seconds(n_tokens)  # 0: nobody knows, and the tile shows it
        if seconds < ahead_s:
            return True
        # What others have made dear would stay so, without another try.
        is_due = self._n_small >= self.RETRY and seconds < 2 * ahead_s
        return is_due or self._large_s < self._small_s * self.TILE_GAIN

    def large_seconds(self, n_tokens: int) -> float:
        """Seconds that tokens may take in the next large step, beside decode."""
        return n_tokens * self._large_s * self.DEEPER

    def fitting(self, time: float) -> int:
        """How many tokens fit into a time, in a large step or else a small one; 0: unknown."""
        small, large = self._small_s or self._large_s, self._large_s or self._small_s
        if not small or time <= 0:
            return 0
        in_large = int(time / large)
        return in_large if in_large >= TILE else min(TILE - 1, int(time / small))

    def fitting_alone(self, time: float) -> int:
        """How many tokens fit into a step without decode; 0: unknown."""
        return int(time / self._alone_s) if self._alone_s else 0
