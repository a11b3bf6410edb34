"""`StepClock`: when prompts may hold up the streams, and for how long."""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.engine.prefill_costs import MIN_TOKENS, TILE, PrefillCosts

#: How much slower streams may become while prompts come in.
SLOWDOWN = 4.5


class StepClock:
    """Says how many prompt tokens a step may have, by what the streams are owed.

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

    #: The pace as long as nobody knows what decoding takes.
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

    def __init__(self, max_tick_ms: float, slowdown: float = SLOWDOWN) -> None:
        self._max_step_s = max_tick_ms / 1e3
        self._slowdown = slowdown
        self._costs = PrefillCosts()
        #: Seconds by which streams are ahead of their pace; below 0: behind.
        self._lead_s = 0.0
        self._pace_s = 0.0  # of the last step; 0: no prompts came in
        self._in_tiles = False  # a prompt got a tile where that took longer than the pace

    def begin(self, *, unified: bool) -> None:
        """Learn whether the KV cache is unified."""
        self._costs.unified = unified

    @property
    def pace(self) -> float:
        """Seconds between two tokens of a stream while prompts come in, and 0 while none do."""
        return self._pace_s

    def observe(self, n_prefill: int, n_decode: int, seconds: float) -> None:
        """Learn what a step cost, and count what the streams are owed after it."""
        pace, self._pace_s = self._pace_s, 0.0
        self._costs.observe(n_prefill, n_decode, seconds, quiet=not pace)
        if pace and n_decode:
            lead = self._lead_s + pace - seconds
            self._lead_s = max(-self.ALONE * pace, min(lead, max(pace, self.MAX_AHEAD_S)))
        elif not pace and not n_prefill:  # no prompts
            self._lead_s = 0.0
            self._costs.forget_depth(self._target(), small=self._in_tiles)
            self._in_tiles = False

    def _target(self) -> float:
        """The pace while as many prompts come in as streams decode, or fewer."""
        # Where a step that only decodes is already long, prompts get as much time again.
        wanted = self._max_step_s or self._slowdown * self._costs.quiet_s
        return max(wanted, 2 * self._costs.decode_s) or self.DEFAULT_PACE_S

    def prompt_tokens(self, pending: Sequence[int], n_decode: int, budget: int) -> int:
        """How many prompt tokens the next step is to have; 0: streams are behind their pace.

        Where more requests wait for their first token than for their next one, the pace is slower,
        in proportion; and as slow as a step takes without streams, if all prompts are done then.
        """
        n_pending, costs = sum(pending), self._costs
        n_alone = costs.fitting_alone(self.ALONE * (self._max_step_s or self.DEFAULT_PACE_S))
        if not n_decode:
            return min(budget, max(self.MIN_TOKENS_ALONE, n_alone))
        self._pace_s = self._target() * min(self.ALONE, max(1.0, len(pending) / n_decode))
        if len(pending) > n_decode and n_pending <= min(n_alone, budget):
            return n_pending
        time = self._pace_s + self._lead_s - costs.decode_s
        fitting = costs.fitting(min(time, self._pace_s - costs.decode_s))
        if large := self._large_tile(fitting, n_pending, n_decode):
            n_tokens = min(budget, large)
            return n_tokens if costs.large_seconds(n_tokens) <= time else 0
        least = costs.filling(TILE, n_decode)
        if not costs.tile_pays(least, self.MAX_AHEAD_S):
            least = MIN_TOKENS
        if fitting < least and self._lead_s < 0:
            return 0
        self._in_tiles = self._in_tiles or (fitting < least and least > MIN_TOKENS)
        return min(budget, _with_rest(max(least, fitting), n_pending))

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
