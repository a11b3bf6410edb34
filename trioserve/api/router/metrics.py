"""What a router counts, in the text format of Prometheus. A child has metrics of its own."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from trioserve.router.fleet import Fleet
from trioserve.router.states import Status


class RouterMetrics:
    """Counts requests. What the models do is read when metrics are asked for."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._answered = Counter(
            "trioserve:router_requests",
            "Requests that a model has answered, or could not",
            ("model", "status"),
            registry=self._registry,
        )

    def answered(self, model: str, status: int) -> None:
        """Count a request by the status that its client gets."""
        self._answered.labels(model, str(status)).inc()

    def render(self, fleet: Fleet) -> bytes:
        """Write all metrics."""
        now = _Now(fleet)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(now)
        return generate_latest(self._registry) + generate_latest(registry)


class _Now:
    """A collector of what is so at this moment."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        states = {name: self._fleet.state(name) for name in self._fleet.catalog.entries}
        by_status = Count(state.value for state in states.values())
        models = GaugeMetricFamily(
            "trioserve:router_models", "Models, by what they do", labels=["status"]
        )
        for status in Status:
            models.add_metric([status.value], by_status[status])
        yield models
        running = GaugeMetricFamily(
            "trioserve:router_requests_running", "Requests with a model", labels=["model"]
        )
        waiting = GaugeMetricFamily(
            "trioserve:router_requests_waiting", "Requests that wait for a model", labels=["model"]
        )
        for name, state in states.items():
            running.add_metric([name], state.n_requests)
            waiting.add_metric([name], state.n_waiting)
        yield running
        yield waiting
