"""Expressions for Prometheus, about the servers that are chosen at the top of the dashboard."""

from __future__ import annotations

from typing import NamedTuple

SERVERS = 'job=~"$job",instance=~"$instance"'
EACH = "instance,model_name"

#: The label that has the name of the model. Of metrics of a whole process, none has.
_MODEL = {
    **dict.fromkeys(
        ("process_", "trioserve:http_", "trioserve:stream", "trioserve:router_models"), ""
    ),
    "trioserve:router_": "model",
    "trioserve:": "model_name",
}


class Query(NamedTuple):
    """An expression, and the name of its curves."""

    expr: str
    legend: str


def now(metric: str, by: str = "") -> str:
    """A gauge, added up over the servers that are chosen."""
    return f"sum{_by(by)}({selected(metric)})"


def rate(metric: str, by: str = "") -> str:
    """By how much a counter grows in a second."""
    return f"sum{_by(by)}(rate({selected(metric)}[$__rate_interval]))"


def share(part: str, whole: str) -> str:
    """A part of a whole, 0 to 1; no value where there is no whole."""
    return f"{part} / ({whole} > 0)"


def quantile(q: float, metric: str) -> str:
    """A quantile of a histogram."""
    return f"histogram_quantile({q:g}, {rate(f'{metric}_bucket', 'le')})"


def quantiles(metric: str) -> list[Query]:
    """The quantiles that a panel shows."""
    return [Query(quantile(q, metric), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)]


def of_each(expr: str, name: str = "") -> Query:
    """A curve for each model of each server. The expression is one by `EACH`."""
    return Query(expr, f"{{{{instance}}}} {{{{model_name}}}} {name}".rstrip())


def selected(metric: str) -> str:
    """The series of the servers and models that are chosen."""
    label = next((label for begin, label in _MODEL.items() if metric.startswith(begin)), "")
    return f"{metric}{{{SERVERS}" + (f',{label}=~"$model"' if label else "") + "}"


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""
