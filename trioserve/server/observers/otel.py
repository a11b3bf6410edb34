"""`OpenTelemetry`: exports a span and histogram values for each request, when it has ended.

Names follow OpenTelemetry's conventions for generative AI; additional names begin with
``trioserve.``. Nothing here blocks: a span goes into a queue of the SDK, whose thread sends it by
OTLP over HTTP. The standard variables of OpenTelemetry set the target, the sampling and the
interval. Queues are bounded; the SDK drops what the receiver does not accept in time.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeAlias

import trio
from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import Histogram, MeterProvider
from opentelemetry.sdk import metrics as sdk_metrics, trace as sdk_trace
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from trioserve._version import __version__
from trioserve.errors import ConfigError, TrioServeError
from trioserve.log import get_logger
from trioserve.server.context import RequestContext
from trioserve.server.observers.observer import (
    Event,
    RequestEnd,
    RequestInfo,
    RequestRecord,
    ToolRecord,
)
from trioserve.types import CancelReason, FinishReason, Task

_Attributes: TypeAlias = dict[str, str | int | float | list[str]]

#: Reasons of clients to cancel, which are not errors.
_BY_CLIENT = (CancelReason.DISCONNECT, CancelReason.CALLER)

_FINISH = {FinishReason.EOS: "stop", FinishReason.WORD: "stop", FinishReason.LIMIT: "length"}

#: Bucket bounds in seconds, as the conventions recommend.
_DURATION = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28),
    *(2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)

_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)

_PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5),
)

#: Seconds to send the last spans and values. The command ends 5 seconds after its requests.
FAREWELL = 3.0
_log = get_logger("trioserve.otel")


class OpenTelemetry:
    """An observer that traces requests.

    A span is a child of the `traceparent` of its `RequestContext`. It starts when the request
    arrived. One request to the server may make several: one for each choice and each prompt.

    Args:
        content: include prompts and outputs in spans, if `Config.otel_content` keeps them.
    """

    def __init__(
        self, tracer_provider: TracerProvider, meter_provider: MeterProvider, *, content: bool
    ) -> None:
        self._tracer = tracer_provider.get_tracer("trioserve", __version__)
        self._content = content
        self._propagator = TraceContextTextMapPropagator()
        meter = meter_provider.get_meter("trioserve", __version__)

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            return meter.create_histogram(
                f"gen_ai.server.{name}",
                unit="s",
                description=text,
                explicit_bucket_boundaries_advisory=bounds,
            )

        self._duration = histogram("request.duration", "From arrival to the end", _DURATION)
        self._first_token = histogram(
            "time_to_first_token", "From submission to the first token", _FIRST_TOKEN
        )
        self._per_token = histogram(
            "time_per_output_token", "Between two tokens, the mean of a request", _PER_TOKEN
        )

    def on_event(self, event: Event) -> None:
        """Make the span of a request or tool call that has ended."""
        match event:
            case RequestRecord(request, end):
                self._trace_request(request, end)
            case ToolRecord():
                self._trace_tool(event)

    def _trace_request(self, request: RequestInfo, end: RequestEnd) -> None:
        """Make the span of a request, and record its histogram values."""
        seconds = end.total_s
        if (arrived := request.context.arrived) is not None:
            seconds = max(seconds, trio.current_time() - arrived)
        self._record(request, end, seconds)
        now = time.time_ns()
        span = self._tracer.start_span(
            f"{request.operation} {request.model}",
            context=self._parent(request.context),
            kind=SpanKind.SERVER,
            attributes={**_of_request(request), **_of_end(end)},
            start_time=now - int(seconds * 1e9),
        )
        if end.error is not None or end.cancelled not in (None, *_BY_CLIENT):
            span.set_status(Status(StatusCode.ERROR, _message(end)))
        if self._content and span.is_recording():
            _add_content(span, request, end)
        span.end(now)

    def _trace_tool(self, record: ToolRecord) -> None:
        now = time.time_ns()
        failed = record.outcome == "failed"
        span = self._tracer.start_span(
            f"execute_tool {record.tool}".strip(),
            context=self._parent(record.context),
            kind=SpanKind.INTERNAL,
            attributes={
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": record.tool,
                "gen_ai.tool.type": "function" if record.kind == "function" else "extension",
                "gen_ai.tool.call.id": record.call_id,
                "trioserve.tool.outcome": record.outcome,
                **({"error.type": "tool_failed"} if failed else {}),
            },
            start_time=now - int(record.seconds * 1e9),
        )
        if failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end(now)

    def _parent(self, context: RequestContext) -> Context:
        """The parent context of a request's span."""
        return self._propagator.extract(
            {"traceparent": context.traceparent, "tracestate": context.tracestate}
        )

    def _record(self, request: RequestInfo, end: RequestEnd, seconds: float) -> None:
        labels = _labels_of(request)
        error = {"error.type": kind} if (kind := _error_type(end)) else {}
        self._duration.record(seconds, {**labels, **error})
        if (timings := end.timings) is None or not timings.predicted_n:
            return
        self._first_token.record((timings.queue_ms + timings.prompt_ms) / 1e3, labels)
        if timings.predicted_n > 1:
            per_token = timings.predicted_ms / 1e3 / (timings.predicted_n - 1)
            self._per_token.record(per_token, labels)


def _error_type(end: RequestEnd) -> str:
    if end.cancelled is not None:
        return end.cancelled.value
    return end.error_type if end.error is not None else ""


def _message(end: RequestEnd) -> str:
    """The error's message. For foreign exceptions, only the type: the text may quote data."""
    error = end.error
    if isinstance(error, TrioServeError):
        return error.message
    return type(error).__name__ if error is not None else _error_type(end)


def _labels_of(request: RequestInfo) -> dict[str, str]:
    return {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": "trioserve",
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
    }


def _of_request(request: RequestInfo) -> _Attributes:
    attributes: _Attributes = {
        **_labels_of(request),
        "gen_ai.usage.input_tokens": request.n_prompt,
        "trioserve.task_id": request.task_id,
    }
    if request.context.request_id:
        attributes["trioserve.request_id"] = request.context.request_id
    if isinstance(task := request.task, Task):
        sampling = task.params.sampling
        attributes |= {
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
            "gen_ai.request.presence_penalty": sampling.presence_penalty,
        }
        if task.params.max_tokens >= 0:
            attributes["gen_ai.request.max_tokens"] = task.params.max_tokens
    return attributes


def _of_end(end: RequestEnd) -> _Attributes:
    attributes: _Attributes = {"gen_ai.usage.output_tokens": end.n_output}
    if kind := _error_type(end):
        attributes["error.type"] = kind
    if end.finish in _FINISH:
        attributes["gen_ai.response.finish_reasons"] = [_FINISH[end.finish]]
    if (timings := end.timings) is not None:
        attributes |= {
            "gen_ai.usage.cache_read.input_tokens": timings.cache_n,
            "trioserve.slot": end.slot_id,
            "trioserve.queue_time": timings.queue_ms / 1e3,
            "trioserve.prefill_time": timings.prompt_ms / 1e3,
            "trioserve.decode_time": timings.predicted_ms / 1e3,
        }
        if timings.predicted_n:
            first = (timings.queue_ms + timings.prompt_ms) / 1e3
            attributes["gen_ai.response.time_to_first_chunk"] = first
        if timings.draft_n:
            attributes["trioserve.draft_tokens"] = timings.draft_n
            attributes["trioserve.draft_tokens_accepted"] = timings.draft_n_accepted
    return attributes


def _add_content(span: Span, request: RequestInfo, end: RequestEnd) -> None:
    """Add the prompt and the output, as one message each."""
    if request.prompt_text is not None:
        prompt = {"type": "text", "content": request.prompt_text()}
        messages = [{"role": "user", "parts": [prompt]}]
        span.set_attribute("gen_ai.input.messages", json.dumps(messages, ensure_ascii=False))
    if end.text:
        answer = {"type": "text", "content": end.text}
        reason = _FINISH.get(end.finish, "") if end.finish else ""
        messages = [{"role": "assistant", "parts": [answer], "finish_reason": reason}]
        span.set_attribute("gen_ai.output.messages", json.dumps(messages, ensure_ascii=False))


@asynccontextmanager
async def exporting(*, content: bool = False) -> AsyncIterator[OpenTelemetry]:
    """Provide an observer whose spans and values are exported during a block.

    Uses the providers that the program has set up for OpenTelemetry, or creates them. At the end of
    the block, created ones send the rest within `FAREWELL` seconds or lose it.

    Raises:
        ConfigError: a variable has an unsupported value.
    """
    closing: list[Callable[[], object]] = []
    observer = await trio.to_thread.run_sync(_open, closing, content)
    try:
        yield observer
    finally:
        if closing:
            await _close(closing)


async def _close(closing: list[Callable[[], object]]) -> None:
    threads = trio.CapacityLimiter(len(closing))  # abandoned threads must not block others
    with trio.move_on_after(FAREWELL, shield=True) as scope:
        async with trio.open_nursery() as nursery:
            for shut_down in closing:
                run = partial(trio.to_thread.run_sync, limiter=threads, abandon_on_cancel=True)
                nursery.start_soon(run, shut_down)
    if scope.cancelled_caught:
        _log.warning("the last traces and metrics could not be sent", seconds=FAREWELL)


def _open(closing: list[Callable[[], object]], content: bool) -> OpenTelemetry:
    """Find or make the providers; adds their shutdown functions to `closing`. It is slow."""
    traces_to, metrics_to = trace.get_tracer_provider(), metrics.get_meter_provider()
    resource = _resource()
    if not isinstance(traces_to, sdk_trace.TracerProvider):
        own = sdk_trace.TracerProvider(resource=resource, shutdown_on_exit=False)
        if _is_wanted("TRACES"):
            own.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        closing.append(own.shutdown)
        traces_to = own
    if not isinstance(metrics_to, sdk_metrics.MeterProvider):
        readers = (
            [PeriodicExportingMetricReader(OTLPMetricExporter())] if _is_wanted("METRICS") else []
        )
        own_meters = sdk_metrics.MeterProvider(readers, resource=resource, shutdown_on_exit=False)
        closing.append(partial(own_meters.shutdown, timeout_millis=FAREWELL * 1e3))
        metrics_to = own_meters
    return OpenTelemetry(traces_to, metrics_to, content=content)


def _resource() -> Resource:
    """Describe the server; the variables may change its name."""
    found = Resource.create({"service.version": __version__})
    if str(found.attributes["service.name"]).startswith("unknown_service"):
        found = found.merge(Resource({"service.name": "trioserve"}))
    return found


def _is_wanted(kind: str) -> bool:
    """Check whether a kind of data is to be exported.

    Raises:
        ConfigError: the exporter or protocol is unsupported.
    """
    name = f"OTEL_{kind}_EXPORTER"
    if (where := os.environ.get(name, "") or "otlp") not in ("otlp", "none"):
        raise ConfigError(f"{name} is {where!r}, but may only be otlp or none")
    for name in (f"OTEL_EXPORTER_OTLP_{kind}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if (how := os.environ.get(name, "")) not in ("", "http/protobuf"):
            raise ConfigError(f"{name} is {how!r}, but may only be http/protobuf")
    return where == "otlp"
