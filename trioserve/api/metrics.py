"""Metrics of answers, connections, streams and the process: those of a server and of a router."""

from __future__ import annotations

from collections.abc import Iterator

import trio
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from quart import Quart, Response, request

from trioserve.api.base.intake import Intake, intake_of
from trioserve.api.sessions.sessions import Sessions
from trioserve.server.observers.metrics import render_process

#: The type of what `render` writes.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def install(app: Quart) -> None:
    """Count each answer by its route and status."""

    async def count(response: Response) -> Response:
        route = request.url_rule.rule if request.url_rule is not None else ""
        intake_of(app).n_answers[route, response.status_code] += 1
        return response

    app.after_request(count)


async def render(intake: Intake) -> bytes:
    """Write them, in the text format of Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_AnswersNow(intake))
    own = await trio.to_thread.run_sync(render_process)
    return generate_latest(registry) + render_streams(intake.streams) + own


class _AnswersNow:
    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    def collect(self) -> Iterator[Metric]:
        answers = CounterMetricFamily(
            "trioserve:http_answers", "HTTP answers, when they begin", labels=["route", "status"]
        )
        for (route, status), n in sorted(self._intake.n_answers.items()):
            answers.add_metric([route, str(status)], n)
        yield answers
        yield GaugeMetricFamily(
            "trioserve:http_connections", "Open connections", self._intake.n_connections
        )


def render_streams(sessions: Sessions) -> bytes:
    """Write what there is now."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StreamsNow(sessions))
    return generate_latest(registry)


class _StreamsNow:
    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def collect(self) -> Iterator[Metric]:
        streams = list(self._sessions)
        n_finished = sum(each.ring.closed for each in streams)
        by_state = GaugeMetricFamily(
            "trioserve:streams", "Streams that can be resumed", labels=["state"]
        )
        by_state.add_metric(["running"], len(streams) - n_finished)
        by_state.add_metric(["finished"], n_finished)
        yield by_state
        n_readers = sum(each.n_readers for each in streams)
        yield GaugeMetricFamily("trioserve:stream_readers", "Connections that read them", n_readers)
        yield GaugeMetricFamily(
            "trioserve:stream_bytes", "Bytes that are kept of them", self._sessions.n_bytes
        )
        yield CounterMetricFamily(
            "trioserve:streams_evicted",
            "Streams that were forgotten early, to make room",
            self._sessions.n_evicted,
        )
