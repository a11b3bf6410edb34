"""Strategies that break an engine. A server in another process loads them by name."""

from __future__ import annotations

from collections.abc import Sequence

#: The message of an exception, which only the log may show.
SECRET = "the inside of the engine"


class Raises:
    """Raises in the third step with a token of output: its stream has begun by then."""

    pace = 1e-6  # with one, every step is reported

    def __init__(self, max_tick_ms: float) -> None:
        self._n_decodes = 0

    def begin(self, *, unified: bool) -> None:
        """Do nothing."""

    def share(self, pending: Sequence[int], n_decode: int, budget: int) -> Sequence[int]:
        """Give the oldest prompt all."""
        return [min(pending[0], budget), *[0] * (len(pending) - 1)] if pending else []

    def observe(self, n_prefill: int, n_decode: int, seconds: float) -> None:
        """Break, when it is time."""
        self._n_decodes += bool(n_decode)
        if self._n_decodes == 3:
            raise RuntimeError(SECRET)
