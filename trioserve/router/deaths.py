"""How often a process may die before it is not started again for a while."""

from __future__ import annotations

#: This many deaths within these seconds are too many; for as long, it is not started again.
MAX_DEATHS = 3
WINDOW = 60.0

#: Seconds before the next start, after the first death within the window and the second.
_DELAYS = (0.25, 1.0)


class Deaths:
    """The recent deaths of one model's processes. Times are those of any clock, in seconds."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._failed_until = 0.0

    def note(self, now: float) -> float | None:
        """Count a death. Returns the seconds until the next start; None: there were too many."""
        self._times = [*(time for time in self._times if time > now - WINDOW), now]
        if len(self._times) < MAX_DEATHS:
            return _DELAYS[len(self._times) - 1]
        self._failed_until = now + WINDOW
        return None

    def wait_s(self, now: float) -> float:
        """Seconds until it may be started, when there were too many deaths; otherwise 0."""
        return max(0.0, self._failed_until - now)

    def forget(self) -> None:
        """Begin anew, because a person asked for it or the model has changed."""
        self._times.clear()
        self._failed_until = 0.0
