"""How long a prompt and its output took, as all answers tell it. The names are llama-server's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import UNSET, UnsetType

from trioserve import types
from trioserve.api.base.answers import Answer


class Timings(Answer):
    """The times of a prompt and its output. The first output token counts as the prompt's."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET


def timings_of(value: types.Timings) -> Timings:
    """Write the timings of prompt and output."""
    n_decoded = value.predicted_n - 1
    return Timings(
        value.cache_n,
        value.prompt_n,
        value.prompt_ms,
        _ratio(value.prompt_ms, value.prompt_n),
        _ratio(value.prompt_n * 1e3, value.prompt_ms),
        value.predicted_n,
        value.predicted_ms,
        _ratio(value.predicted_ms, n_decoded),
        _ratio(n_decoded * 1e3, value.predicted_ms),
        value.draft_n or UNSET,
        value.draft_n_accepted if value.draft_n else UNSET,
    )


def _ratio(a: float, b: float) -> float:
    return a / b if a > 0 and b > 0 else 0.0


class LiveTimings:
    """The timings of a request that is still running, as far as its events tell them."""

    def __init__(self, n_prompt: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._prompt = types.Progress(0, n_prompt, 0, 0, 0.0)
        self._first: float | None = None
        self.n_predicted = 0
        self._drafts = (0, 0)

    def on_output(self, n_tokens: int, drafts: tuple[int, int]) -> None:
        """Record new tokens, and the totals drafted and accepted so far; zeros: unchanged."""
        self.n_predicted += n_tokens
        self._drafts = max(self._drafts, drafts)

    def on_progress(self, value: types.Progress) -> None:
        """Record the progress of the prompt."""
        self._prompt = value

    def with_progress(self, value: types.Progress, *, timed: bool) -> dict[str, Any]:
        """Record and return the progress of the prompt, with the timings so far if `timed`."""
        self.on_progress(value)
        written: dict[str, Any] = {
            "prompt_progress": {
                "total": value.total,
                "cache": value.cached,
                "processed": value.processed,
                "time_ms": round(value.time_ms),
            }
        }
        if timed:
            so_far = types.Timings(
                cache_n=value.cached,
                prompt_n=value.processed - value.cached,
                prompt_ms=value.time_ms,
            )
            written["timings"] = timings_of(so_far)
        return written

    def now(self) -> types.Timings:
        """The timings so far, once there is output."""
        now = self._clock()
        if self._first is None:
            self._first = now
        return types.Timings(
            cache_n=self._prompt.cached,
            prompt_n=self._prompt.total - self._prompt.cached,
            prompt_ms=self._prompt.time_ms,
            predicted_n=self.n_predicted,
            predicted_ms=(now - self._first) * 1e3,
            draft_n=self._drafts[0],
            draft_n_accepted=self._drafts[1],
        )
