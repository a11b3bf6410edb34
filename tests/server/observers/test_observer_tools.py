"""Tools in the metrics, the log and the traces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog.testing
from opentelemetry.trace import SpanKind, StatusCode

from tests.server.observers.test_otel import PARENT, TRACEPARENT, Traced
from tests.support.scripted_server import serve
from tests.support.scripts import HI
from tests.support.tool_calls import FakeTool, calls, saying
from trioserve import ToolCallContext

EVERY = calls(("good", {}), ("bad", {}), ("not there", {}), ("denied", {}))


async def fail(arguments: Mapping[str, Any], context: ToolCallContext) -> str:
    raise ValueError("a secret")


def tools() -> list[FakeTool]:
    return [FakeTool("good"), FakeTool("bad", fail), FakeTool("denied", writes=True)]


async def test_calls_are_counted_by_tool_and_outcome() -> None:
    backend, _ = saying([EVERY, "Done."])
    async with serve(backend, metrics_endpoint=True) as server:
        await server.run(HI, tools())
        assert server.metrics is not None
        text = server.metrics.render(await server.status()).decode()
    counted = {
        (labels["tool"], labels["outcome"]): float(value)
        for line in text.splitlines()
        if line.startswith("trioserve:tool_calls_total{")
        for labels, value in [_sample(line)]
    }
    assert counted == {
        ("good", "finished"): 1.0,
        ("bad", "failed"): 1.0,
        ("", "failed"): 1.0,  # whatever a model calls it, there is one series
        ("denied", "denied"): 1.0,
    }
    assert 'trioserve:tool_seconds_count{model_name="scripted"} 2.0' in text


def _sample(line: str) -> tuple[dict[str, str], str]:
    labels, value = line.partition("{")[2].split("} ")
    pairs = (pair.split("=") for pair in labels.split(","))
    return {name: text.strip('"') for name, text in pairs}, value


async def test_a_line_says_how_a_call_ended_and_not_what_it_was_about() -> None:
    backend, _ = saying([calls(("good", {"password": "hunter2"})), "Done."])
    async with serve(backend) as server:
        with structlog.testing.capture_logs() as lines:
            answer = await server.run(HI, tools())
    (line,) = [line for line in lines if line["event"] == "tool ended"]
    assert (line["tool"], line["end"]) == ("good", "finished")
    assert line["call"] == answer.messages[1]["tool_call_id"]
    assert "hunter2" not in str(lines)


async def test_each_call_has_a_span() -> None:
    traced = Traced()
    backend, _ = saying([EVERY, "Done."])
    async with serve(backend) as server:
        server.observers.append(traced.observer)
        await server.run(HI, tools(), traceparent=TRACEPARENT)
    spans = {span.name: span for span in traced.spans if "execute_tool" in span.name}
    names = ("execute_tool good", "execute_tool bad", "execute_tool", "execute_tool denied")
    assert spans.keys() == set(names)
    good, bad = spans["execute_tool good"], spans["execute_tool bad"]
    assert good.kind is SpanKind.INTERNAL
    assert good.parent is not None
    assert f"{good.parent.span_id:016x}" == PARENT
    assert good.attributes is not None
    assert good.attributes["gen_ai.operation.name"] == "execute_tool"
    assert good.attributes["gen_ai.tool.name"] == "good"
    assert str(good.attributes["gen_ai.tool.call.id"]).startswith("call_")
    assert good.status.status_code is StatusCode.UNSET
    assert bad.status.status_code is StatusCode.ERROR
    assert "a secret" not in str([dict(span.attributes or {}) for span in traced.spans])
