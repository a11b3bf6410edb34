"""`Tally`: what the tasks of a request came to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from trioserve.types import CancelReason, FinishReason

if TYPE_CHECKING:
    from trioserve.server.stream import Stream


@attrs.define(eq=False)
class Tally:
    """The outcome of a request's tasks, for its line in the log.

    Attributes:
        model: that computed them.
        n_prompt: tokens of the prompts.
        n_cached: of these, found in the cache.
        n_output: tokens that were generated.
        queue_ms: how long the first task waited for its slot; None: no task has ended.
        ttft_ms: from its submission to its first token.
        finish: why the last one ended.
        cancelled: why the server ended one.
        error: why the request failed.
    """

    model: str = ""
    n_prompt: int = 0
    n_cached: int = 0
    n_output: int = 0
    queue_ms: float | None = None
    ttft_ms: float = 0.0
    finish: FinishReason | None = None
    cancelled: CancelReason | None = None
    error: Any = None

    def add(self, model: str, stream: Stream) -> None:
        """Add a task that has ended or is left."""
        mailbox, finished = stream.mailbox, stream.finished
        self.model = model
        self.n_prompt += mailbox.n_prompt
        self.n_output += mailbox.n_output
        self.cancelled = mailbox.cancel_reason
        if finished is None:
            return
        timings, self.finish = finished.timings, finished.reason
        self.n_cached += timings.cache_n
        if self.queue_ms is None:
            self.queue_ms, self.ttft_ms = timings.queue_ms, timings.queue_ms + timings.prompt_ms
