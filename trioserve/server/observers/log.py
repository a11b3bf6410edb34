"""One log line when a request starts and one when it has ended."""

from __future__ import annotations

import structlog

from trioserve.errors import TrioServeError
from trioserve.server.observers.observer import RecordingWork, RequestEnd, RequestInfo, ToolWork
from trioserve.types import Timings

_log = structlog.stdlib.get_logger("trioserve.request")


class RequestLog:
    """An observer that writes the log.

    The second line has the token counts, the speeds, and how the request ended: ``finish`` or
    ``error`` or ``cancelled``, exactly one of them.
    """

    def request_started(self, request: RequestInfo) -> None:
        """Write the first line."""
        _log.info(
            "request started",
            task=request.task_id,
            model=request.model,
            prompt_tokens=request.n_prompt,
        )

    def request_ended(self, request: RequestInfo, end: RequestEnd) -> None:
        """Write the second line, as a warning if the request failed."""
        facts = {
            "task": request.task_id,
            "model": request.model,
            "prompt_tokens": request.n_prompt,
            "completion_tokens": end.n_output,
            **({} if end.timings is None else _speeds(end.timings)),
            "total_ms": round(end.total_s * 1e3, 1),
        }
        if end.finish is not None:
            _log.info("request ended", **facts, finish=end.finish.value)
        elif end.cancelled is not None:
            _log.info("request ended", **facts, cancelled=end.cancelled.value)
        else:
            error = end.error
            message = error.message if isinstance(error, TrioServeError) else repr(error)
            if error is not None and error.__cause__ is not None:
                facts["cause"] = repr(error.__cause__)
            _log.warning("request failed", **facts, error=message)

    def recording_ended(self, work: RecordingWork) -> None:
        """Write a line, as a warning if the recording could not be transcribed."""
        facts = {"seconds": round(work.seconds, 1), "total_ms": round(work.total_s * 1e3, 1)}
        if work.error is not None:
            _log.warning("recording failed", **facts, error=work.error.message)
        else:
            _log.info("recording ended", **facts, end=work.end)

    def tool_ended(self, work: ToolWork) -> None:
        """Write a line. What the arguments and the result are is not in it."""
        _log.info(
            "tool ended",
            tool=work.tool or "unknown",
            call=work.call_id,
            end=work.outcome,
            total_ms=round(work.seconds * 1e3, 1),
        )


def _speeds(timings: Timings) -> dict[str, object]:
    return {
        "cached_tokens": timings.cache_n,
        "prefill_tokens_per_s": _rate(timings.prompt_n, timings.prompt_ms),
        "decode_tokens_per_s": _rate(timings.predicted_n - 1, timings.predicted_ms),
        "queue_ms": round(timings.queue_ms, 1),
        "ttft_ms": round(timings.queue_ms + timings.prompt_ms, 1),
    }


def _rate(n: int, ms: float) -> float:
    return round(n / ms * 1e3, 1) if ms > 0 and n > 0 else 0.0
