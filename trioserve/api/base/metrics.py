"""Metrics of answers, connections, streams and the process: those of a server and of a router."""

from __future__ import annotations

from collections.abc import Iterator

import trio
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from quart import Quart, Response, request

from trioserve.api.base.intake import Intake, intake_of
from trioserve.api.sessions import metrics as streams
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
    registry.register(_Now(intake))
    own = await trio.to_thread.run_sync(render_process)
    return generate_latest(registry) + streams.render(intake.streams) + own


class _Now:
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
