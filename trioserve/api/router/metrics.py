"""What a router counts, in the text format of Prometheus. Its models have metrics of their own."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from trioserve.router.fleet import Fleet
from trioserve.router.states import Status
from trioserve.server.observers.observer import ToolWork


class RouterMetrics:
    """Counts requests. What the models do is read when metrics are asked for."""

    def __init__(self) -> None:
        self._answered: Count[tuple[str, str]] = Count()  # by model and status
        self._tool_calls: Count[tuple[str, str]] = Count()  # by tool and outcome

    def answered(self, model: str, status: int) -> None:
        """Count a request by the status that its client gets."""
        self._answered[model, str(status)] += 1

    def tool_ended(self, work: ToolWork) -> None:
        """Count a call of a tool."""
        self._tool_calls[work.tool, work.outcome] += 1

    def render(self, fleet: Fleet) -> bytes:
        """Write all metrics."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Now(fleet, self._answered, self._tool_calls))
        return generate_latest(registry)


class _Now:
    """A collector of what is so at this moment."""

    def __init__(
        self,
        fleet: Fleet,
        answered: Mapping[tuple[str, str], int],
        tool_calls: Mapping[tuple[str, str], int],
    ) -> None:
        self._fleet = fleet
        self._answered = answered
        self._tool_calls = tool_calls

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "trioserve:router_requests",
            "Requests that a model has answered, or could not",
            labels=["model", "status"],
        )
        for labels, n in self._answered.items():
            requests.add_metric(labels, n)
        yield requests
        calls = CounterMetricFamily(
            "trioserve:router_tool_calls",
            "Calls of the router's own tools",
            labels=["tool", "outcome"],
        )
        for labels, n in self._tool_calls.items():
            calls.add_metric(labels, n)
        yield calls
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
