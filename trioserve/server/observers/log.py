"""One log line when a request starts and one when it ends, which is also counted."""

from __future__ import annotations

from time import monotonic
from types import TracebackType

import attrs
import structlog
import trio

from trioserve.errors import TrioServeError
from trioserve.server.observers.metrics import Metrics, RequestEnd
from trioserve.server.stream import Stream
from trioserve.types import CancelReason

_log = structlog.stdlib.get_logger("trioserve.request")


class RequestLog:
    """Writes the two lines around a block that holds a request.

    The first line has what is known at the start. The second has the token counts, the speeds
    and how it ended: ``finish`` or ``error`` or ``cancelled``, exactly one of them. The same goes
    to the metrics, if there are any.
    """

    def __init__(
        self, model: str, stream: Stream, on_cancel: CancelReason, metrics: Metrics | None
    ) -> None:
        self._model = model
        self._metrics = metrics
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
        end = self._end(exc)
        facts = {
            "task": self._stream.task_id,
            "model": self._model,
            "prompt_tokens": end.n_prompt,
            **self._speeds(),
            "total_ms": round(end.total_s * 1e3, 1),
        }
        if end.finish is not None:
            _log.info("request ended", **facts, finish=end.finish.value)
        elif end.cancelled is not None:
            _log.info("request ended", **facts, cancelled=end.cancelled.value)
        else:
            message = exc.message if isinstance(exc, TrioServeError) else repr(exc)
            _log.warning("request failed", **facts, error=message)
        if self._metrics is not None:
            self._metrics.record(end)

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

    def _end(self, exc: BaseException | None) -> RequestEnd:
        stream, finished = self._stream, self._stream.finished
        end = RequestEnd(
            n_prompt=len(stream.prompt),
            n_output=stream.n_tokens,
            total_s=monotonic() - self._began,
        )
        if finished is not None:
            timings = finished.timings
            return attrs.evolve(
                end, finish=finished.reason, timings=timings, n_output=timings.predicted_n
            )
        if stream.mailbox.cancel_reason is not None:
            return attrs.evolve(end, cancelled=stream.mailbox.cancel_reason)
        if isinstance(exc, TrioServeError):
            return attrs.evolve(end, error=exc.type)
        if exc is None or isinstance(exc, trio.Cancelled | GeneratorExit):
            return attrs.evolve(end, cancelled=self._on_cancel)
        return attrs.evolve(end, error=TrioServeError.type)


def _rate(n: int, ms: float) -> float:
    return round(n / ms * 1e3, 1) if ms > 0 and n > 0 else 0.0
