"""Sending what `OpenTelemetry` makes: OTLP over HTTP, by the SDK's own threads.

Where to, how much and how often is in the standard variables of OpenTelemetry. Queues are bounded;
what a receiver does not take in time is dropped, and no request waits for it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import structlog
import trio
from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from trioserve._version import __version__
from trioserve.errors import ConfigError
from trioserve.server.observers.otel import OpenTelemetry

#: Seconds in which the last spans and values are sent. The command ends 5 after its requests.
FAREWELL = 3.0

_log = structlog.stdlib.get_logger("trioserve.otel")


@asynccontextmanager
async def exporting(*, content: bool = False) -> AsyncIterator[OpenTelemetry]:
    """Give an observer whose spans and values are sent, for as long as a block lasts.

    Where the program has set up OpenTelemetry, they go there. At the end of the block, what is
    left is sent within `FAREWELL` seconds or lost.

    Raises:
        ConfigError: a variable asks for what this cannot do.
    """
    closing: list[Callable[[], object]] = []
    observer = await trio.to_thread.run_sync(_open, closing, content)
    try:
        yield observer
    finally:
        if closing:
            await _close(closing)


async def _close(closing: list[Callable[[], object]]) -> None:
    with trio.move_on_after(FAREWELL, shield=True) as scope:
        async with trio.open_nursery() as nursery:
            for shut_down in closing:
                nursery.start_soon(partial(_in_thread, shut_down))
    if scope.cancelled_caught:
        _log.warning("the last traces and metrics could not be sent", seconds=FAREWELL)


async def _in_thread(shut_down: Callable[[], object]) -> None:
    await trio.to_thread.run_sync(shut_down, abandon_on_cancel=True)


def _open(closing: list[Callable[[], object]], content: bool) -> OpenTelemetry:
    """Find the providers, or make them; adds to `closing` what ends them. It takes a while."""
    traces_to, metrics_to = trace.get_tracer_provider(), metrics.get_meter_provider()
    resource = _resource()
    if not isinstance(traces_to, TracerProvider):
        own = TracerProvider(resource=resource, shutdown_on_exit=False)
        if _is_wanted("TRACES"):
            own.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        closing.append(own.shutdown)
        traces_to = own
    if not isinstance(metrics_to, MeterProvider):
        readers = (
            [PeriodicExportingMetricReader(OTLPMetricExporter())] if _is_wanted("METRICS") else []
        )
        own_meters = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
        closing.append(partial(own_meters.shutdown, timeout_millis=FAREWELL * 1e3))
        metrics_to = own_meters
    return OpenTelemetry(traces_to, metrics_to, content=content)


def _resource() -> Resource:
    """Say what the server is; the variables may give it another name."""
    found = Resource.create({"service.version": __version__})
    if str(found.attributes["service.name"]).startswith("unknown_service"):
        found = found.merge(Resource({"service.name": "trioserve"}))
    return found


def _is_wanted(kind: str) -> bool:
    """Look whether a kind of data is to be sent.

    Raises:
        ConfigError: it is to be sent in another way.
    """
    name = f"OTEL_{kind}_EXPORTER"
    if (where := os.environ.get(name, "") or "otlp") not in ("otlp", "none"):
        raise ConfigError(f"{name} is {where!r}, but may only be otlp or none")
    for name in (f"OTEL_EXPORTER_OTLP_{kind}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if (how := os.environ.get(name, "")) not in ("", "http/protobuf"):
            raise ConfigError(f"{name} is {how!r}, but may only be http/protobuf")
    return where == "otlp"
