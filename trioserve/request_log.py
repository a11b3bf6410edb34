"""One log line when a request starts and one when it ends."""

from __future__ import annotations

from time import monotonic
from types import TracebackType

import structlog
import trio

from trioserve.errors import TrioServeError
from trioserve.stream import Stream
from trioserve.types import CancelReason

_log = structlog.stdlib.get_logger("trioserve.request")


class RequestLog:
    """Writes the two lines around a block that holds a request.

    The first line has what is known at the start. The second has the token counts, the speeds
    and how it ended: ``finish`` or ``error`` or ``cancelled``, exactly one of them.
    """

    def __init__(self, model: str, stream: Stream, on_cancel: CancelReason) -> None:
        self._model = model
        self._stream = stream
        self._on_cancel = on_cancel
        self._began = monotonic()

    def __enter__(self) -> RequestLog:
        _log.info(
            "request started",
            task=self._stream.task_id,
            model=self._model,
            prompt_tokens=len(self._stream.prompt),
        )
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        facts = {
            "task": self._stream.task_id,
            "model": self._model,
            "prompt_tokens": len(self._stream.prompt),
            **self._speeds(),
            "total_ms": round((monotonic() - self._began) * 1e3, 1),
            **self._end(exc),
        }
        if "error" in facts:
            _log.warning("request failed", **facts)
        else:
            _log.info("request ended", **facts)

    def _speeds(self) -> dict[str, object]:
        finished = self._stream.finished
        if finished is None:
            return {"completion_tokens": self._stream.n_tokens}
        timings = finished.timings
        return {
            "completion_tokens": timings.predicted_n,
            "cached_tokens": timings.cache_n,
            "prefill_tokens_per_s": _rate(timings.prompt_n, timings.prompt_ms),
            "decode_tokens_per_s": _rate(timings.predicted_n - 1, timings.predicted_ms),
            "queue_ms": round(timings.queue_ms, 1),
            "ttft_ms": round(timings.queue_ms + timings.prompt_ms, 1),
        }

    def _end(self, exc: BaseException | None) -> dict[str, object]:
        mailbox, finished = self._stream.mailbox, self._stream.finished
        if finished is not None:
            return {"finish": finished.reason.value}
        if mailbox.cancel_reason is not None:
            return {"cancelled": mailbox.cancel_reason.value}
        if isinstance(exc, TrioServeError):
            return {"error": exc.message}
        if exc is None or isinstance(exc, trio.Cancelled | GeneratorExit):
            return {"cancelled": self._on_cancel.value}
        return {"error": repr(exc)}


def _rate(n: int, ms: float) -> float:
    return round(n / ms * 1e3, 1) if ms > 0 and n > 0 else 0.0
