"""OpenTelemetry: what a span of a request says, whose child it is, and what is sent over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import structlog
import trio
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.support.clients import client_and_service
from tests.support.fake_fleet import routed
from tests.support.scripted_embedder import ScriptedEmbedder
from tests.support.scripts import answering
from tests.support.waiting import until
from trioserve.config import Config
from trioserve.errors import ConfigError, DecodeError
from trioserve.server import RequestContext, Server
from trioserve.server.observers.otel import OpenTelemetry, exporting
from trioserve.server.stream import read_all
from trioserve.testing import ScriptedBackend, scripted
from trioserve.types import CancelReason

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Traced:
    """An observer whose spans and values stay in memory."""

    def __init__(self, *, content: bool = False) -> None:
        self._spans = InMemorySpanExporter()
        tracers = TracerProvider(shutdown_on_exit=False)
        tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self._values = InMemoryMetricReader()
        meters = MeterProvider([self._values], shutdown_on_exit=False)
        self.observer = OpenTelemetry(tracers, meters, content=content)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._spans.get_finished_spans()

    @property
    def span(self) -> ReadableSpan:
        (span,) = self.spans
        return span

    def histogram(self, name: str) -> Any:
        """The one series of a histogram."""
        data = self._values.get_metrics_data()
        assert data is not None
        (point,) = [
            point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]
        return point


@asynccontextmanager
async def server_with(
    traced: Traced, backend: ScriptedBackend | None = None, **config: Any
) -> AsyncIterator[Server]:
    async with Server(Config(**config), load=scripted(backend or ScriptedBackend())) as server:
        server.observers.append(traced.observer)
        yield server


async def test_what_a_span_says() -> None:
    traced = Traced()
    async with server_with(traced, answering("abc")) as server:
        await server.complete("prompt", max_tokens=9, temperature=0.5, top_k=3)
    span = traced.span
    assert (span.name, span.kind) == ("text_completion scripted", SpanKind.SERVER)
    assert span.parent is None and span.status.status_code is StatusCode.UNSET
    said = dict(span.attributes or {})
    times = {name: said.pop(name) for name in list(said) if name.endswith("_time")}
    assert times.keys() == {f"trioserve.{part}_time" for part in ("queue", "prefill", "decode")}
    assert 0 < said.pop("gen_ai.response.time_to_first_chunk") <= sum(times.values())
    assert said == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "trioserve",
        "gen_ai.request.model": "scripted",
        "gen_ai.response.model": "scripted",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": server.model.defaults.sampling.top_p,
        "gen_ai.request.top_k": 3,
        "gen_ai.request.frequency_penalty": 0,
        "gen_ai.request.presence_penalty": 0,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.usage.input_tokens": 6,
        "gen_ai.usage.output_tokens": 4,  # with the end
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("stop",),
        "trioserve.task_id": 1,
        "trioserve.slot": 0,
    }
    assert span.start_time is not None and span.end_time is not None
    assert span.end_time - span.start_time >= sum(times.values()) * 1e9 * 0.9


async def test_the_histograms() -> None:
    traced = Traced()
    async with server_with(traced, answering("abc")) as server:
        for _ in range(3):
            await server.chat([{"role": "user", "content": "Hi"}])
    for name in ("request.duration", "time_to_first_token", "time_per_output_token"):
        point = traced.histogram(f"gen_ai.server.{name}")
        assert (point.count, dict(point.attributes)["gen_ai.operation.name"]) == (3, "chat")
        assert point.sum > 0 and len(point.bucket_counts) == len(point.explicit_bounds) + 1
    assert point.explicit_bounds[:2] == (0.01, 0.025)


async def test_how_requests_end() -> None:
    """A failure is an error; a client that goes away is not."""
    traced, backend = Traced(), ScriptedBackend(lambda prompt: "x" * 10**5, n_ctx=2**17)
    async with server_with(traced, backend) as server:
        context = RequestContext(on_cancel=CancelReason.DISCONNECT)
        async with server.stream_all(["a"], await server.params({}), context=context):
            pass
        backend.fail_next = DecodeError("bad luck")
        with pytest.raises(DecodeError):
            await server.complete("a")
        await server.complete("a", max_tokens=2)
        with pytest.raises(ZeroDivisionError):
            async with server.stream_complete("a"):
                raise ZeroDivisionError("a secret")
    left, failed, cut, foreign = traced.spans
    assert left.status.status_code is StatusCode.UNSET
    assert (left.attributes or {})["error.type"] == "disconnect"
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.status.description == "bad luck"
    assert (failed.attributes or {})["error.type"] == DecodeError.type
    assert (cut.attributes or {})["gen_ai.response.finish_reasons"] == ("length",)
    assert foreign.status.description == "ZeroDivisionError"


@pytest.mark.parametrize("is_asked_for", [False, True])
async def test_prompts_are_in_it_only_if_asked_for(is_asked_for: bool) -> None:
    traced = Traced(content=is_asked_for)
    config = {"otel": True, "otel_content": True} if is_asked_for else {}
    with no_exporters():
        async with server_with(traced, answering("an answer"), **config) as server:
            await server.complete("a question")
    said = json.dumps(dict(traced.span.attributes or {}))
    assert ("a question" in said, "an answer" in said) == (is_asked_for, is_asked_for)
    if is_asked_for:
        (message,) = json.loads(str((traced.span.attributes or {})["gen_ai.output.messages"]))
        assert message == {
            "role": "assistant",
            "parts": [{"type": "text", "content": "an answer"}],
            "finish_reason": "stop",
        }


async def test_over_http_it_is_a_child_of_the_callers() -> None:
    traced = Traced()
    async with client_and_service(answering("abc")) as (client, service):
        service.server.observers.append(traced.observer)
        for headers in ({"traceparent": TRACEPARENT, "X-Request-Id": "r1"}, {"traceparent": "no"}):
            body = {"messages": [{"role": "user", "content": "Hi"}]}
            answer = await client.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200
    child, orphan = traced.spans
    assert child.name == "chat scripted"
    assert child.parent is not None and child.context is not None
    assert f"{child.context.trace_id:032x}" == TRACE
    assert f"{child.parent.span_id:016x}" == PARENT
    assert (child.attributes or {})["trioserve.request_id"] == "r1"
    assert orphan.parent is None


async def test_through_a_router_too() -> None:
    traced = Traced()
    async with routed() as router:
        router.processes["one"].server.observers.append(traced.observer)
        body = {"prompt": "p", "n_predict": 2}
        await router.client.post("/completion", json=body, headers={"traceparent": TRACEPARENT})
    assert traced.span.parent is not None
    assert f"{traced.span.parent.span_id:016x}" == PARENT


async def test_each_output_has_a_span() -> None:
    traced = Traced()
    async with server_with(traced, answering("abc"), parallel=2) as server:
        params = await server.params({"max_tokens": 2})
        await read_all(server.stream_all(["a", "b"], params, context=RequestContext(), n=2))
    assert len(traced.spans) == 4
    assert {(span.attributes or {})["trioserve.task_id"] for span in traced.spans} == {1, 2, 3, 4}


async def test_embeddings_have_no_output() -> None:
    traced = Traced()
    load = scripted(ScriptedEmbedder())  # type: ignore[arg-type]
    async with Server(Config(embeddings=True), load=load) as server:
        server.observers.append(traced.observer)
        await server.embed(["one", "two"])
    said = traced.span.attributes or {}
    assert traced.span.name == f"embeddings {server.model.info.name}"
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (6, 0)
    assert not {"gen_ai.response.finish_reasons", "gen_ai.response.time_to_first_chunk"} & set(said)


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": "00-" + "0" * 32 + "-" + "0" * 16 + "-01"},
        {"traceparent": "ff-" + TRACE + "-" + PARENT + "-01"},
        {"traceparent": TRACEPARENT + "-more", "tracestate": "=,=,,;" * 100},
        {"traceparent": "\xff\u0663" * 20, "tracestate": "a=" + "\xff" * 300},
        {"traceparent": TRACEPARENT, "tracestate": ",".join(f"k{i}=v" for i in range(99))},
    ],
)
async def test_what_is_no_trace_is_none(headers: dict[str, str]) -> None:
    traced = Traced()
    async with server_with(traced, answering("abc")) as server:
        assert (await server.complete("p", **headers)).text == "abc"
    assert traced.span.name == "text_completion scripted"
    assert (traced.span.parent is not None) == (headers["traceparent"] == TRACEPARENT)


async def test_a_program_that_has_set_it_up_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    spans, closed = InMemorySpanExporter(), []
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    meters = MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False)
    monkeypatch.setattr(tracers, "shutdown", lambda: closed.append(tracers))
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: tracers)
    monkeypatch.setattr("opentelemetry.metrics.get_meter_provider", lambda: meters)
    async with Server(Config(otel=True), load=scripted(answering("abc"))) as server:
        await server.complete("p")
    assert len(spans.get_finished_spans()) == 1
    assert closed == []


# -- what is sent


class Receiver:
    """A collector that takes OTLP over HTTP, and keeps what it gets."""

    def __init__(self) -> None:
        self.bodies: list[tuple[str, bytes]] = []
        received = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                received.append((self.path, self.rfile.read(length)))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()
    thread = threading.Thread(target=receiver.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield receiver
    finally:
        receiver.server.shutdown()
        receiver.server.server_close()
        thread.join()


@contextmanager
def no_exporters() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_TRACES_EXPORTER", "none")
        patch.setenv("OTEL_METRICS_EXPORTER", "none")
        yield


async def test_it_is_sent_before_the_server_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        async with Server(Config(otel=True), load=scripted(answering("abc"))) as server:
            await server.complete("p", traceparent=TRACEPARENT)
    by_path = dict(receiver.bodies)
    assert by_path.keys() == {"/v1/traces", "/v1/metrics"}
    (sent,) = ExportTraceServiceRequest.FromString(by_path["/v1/traces"]).resource_spans
    said = {one.key: one.value.string_value for one in sent.resource.attributes}
    assert (said["service.name"], said["deployment.environment"]) == ("trioserve", "test")
    ((span,),) = [scope.spans for scope in sent.scope_spans]
    assert (span.name, span.trace_id.hex()) == ("text_completion scripted", TRACE)
    (measured,) = ExportMetricsServiceRequest.FromString(by_path["/v1/metrics"]).resource_metrics
    names = {metric.name for scope in measured.scope_metrics for metric in scope.metrics}
    assert "gen_ai.server.request.duration" in names


async def test_a_receiver_that_is_not_there_delays_the_end_a_little_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trioserve.server.observers.otel.FAREWELL", 0.1)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    with trio.fail_after(60), structlog.testing.capture_logs() as logs:
        async with Server(Config(otel=True), load=scripted(answering("abc"))) as server:
            assert (await server.complete("p")).text == "abc"
    assert "the last traces and metrics could not be sent" in {line["event"] for line in logs}
    # The SDK's thread draws random numbers, which Hypothesis would notice in another test.
    await until(lambda: not any("Otel" in thread.name for thread in threading.enumerate()))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_METRICS_EXPORTER", "prometheus"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
    ],
)
async def test_what_it_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name} is '{value}'"):
        async with exporting():
            pass


def test_it_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"install trioserve\[otel\]"):
        Config(otel=True)
    with pytest.raises(ConfigError, match="otel_content needs otel"):
        Config(otel_content=True)
