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
    drafts = (value.draft_n, value.draft_n_accepted)
    prompt = (value.cache_n, value.prompt_n, value.prompt_ms)
    return _timings(*prompt, value.predicted_n, value.predicted_ms, drafts)


def _timings(
    cache_n: int, prompt_n: int, prompt_ms: float, n: int, ms: float, drafts: tuple[int, int]
) -> Timings:
    """Write the timings of a prompt, and of `n` tokens of output in `ms` milliseconds."""
    return Timings(
        cache_n,
        prompt_n,
        prompt_ms,
        _ratio(prompt_ms, prompt_n),
        _ratio(prompt_n * 1e3, prompt_ms),
        n,
        ms,
        _ratio(ms, n - 1),
        _ratio((n - 1) * 1e3, ms),
        *(drafts if drafts[0] else ()),
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
            n_new = value.processed - value.cached
            written["timings"] = _timings(value.cached, n_new, value.time_ms, 0, 0.0, (0, 0))
        return written

    def now(self) -> Timings:
        """Write the timings so far, once there is output."""
        now, prompt = self._clock(), self._prompt
        if self._first is None:
            self._first = now
        n_new, ms = prompt.total - prompt.cached, (now - self._first) * 1e3
        return _timings(prompt.cached, n_new, prompt.time_ms, self.n_predicted, ms, self._drafts)
