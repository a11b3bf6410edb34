"""The dashboard and the alerts: Grafana knows their form, and what they ask for is there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser as promql
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client.parser import text_string_to_metric_families

from examples.deploy.grafana import make_dashboard
from examples.deploy.grafana.panels import ROWS
from tests.support.clients import client_of
from tests.support.deployment import DEPLOY, ROOT
from tests.support.fake_fleet import routed
from tests.support.scripts import answering

ALERTS = DEPLOY / "prometheus" / "alerts.yml"
PANELS = [panel for row in ROWS for panel in row.panels]

#: Labels that Prometheus adds to every metric.
ADDED = {"job", "instance"}


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return group["rules"]


def expressions() -> dict[str, str]:
    """All of them, as Grafana sends them, by where they are."""
    asked = {
        f"{panel.title}, {query.legend}": in_full(query.expr)
        for panel in PANELS
        for query in panel.queries
    }
    return asked | {rule["alert"]: rule["expr"] for rule in rules()}


def in_full(expr: str, window: str = "1m") -> str:
    """An expression as Grafana sends it, with all servers and models."""
    return re.sub(r"\$\w+", ".*", expr.replace("$__rate_interval", window))


def parts(expr: promql.Expr) -> Iterator[promql.Expr]:
    """An expression and all that it is made of."""
    found: list[promql.Expr] = []
    promql.walk(expr, lambda part: found.append(part))
    return iter(found)


def selectors(expr: promql.Expr) -> Iterator[tuple[str, set[str]]]:
    """The metrics that an expression asks for, each with the labels that it is chosen by."""
    for part in parts(expr):
        if isinstance(part, promql.VectorSelector):
            yield part.name, {one.name for one in part.matchers.matchers}


async def scraped() -> dict[str, set[str]]:
    """The labels of every metric of a server and of a router."""
    async with client_of(metrics_endpoint=True) as client:
        await client.post("/completion", json={"prompt": "a"})
        text = (await client.get("/metrics")).text
    async with routed({"one": answering("a")}, metrics_endpoint=True) as router:
        await router.client.post("/completion", json={"prompt": "a"})
        text += (await router.client.get("/metrics")).text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_the_file_is_what_the_script_writes() -> None:
    assert json.loads(make_dashboard.FILE.read_text()) == make_dashboard.dashboard()


def test_grafana_knows_every_field() -> None:
    """Grafana's own model of a dashboard drops what it does not know."""
    register_default_plugins()
    made = json.loads(make_dashboard.FILE.read_text())
    kept = json.loads(JSONEncoder().encode(Dashboard.from_json(made)))
    assert list(lost(made, kept)) == []
    made["panels"][1]["options"]["colour"] = "red"
    kept = json.loads(JSONEncoder().encode(Dashboard.from_json(made)))
    assert list(lost(made, kept)) == ["/panels/1/options/colour"]


def lost(made: Any, kept: Any, place: str = "") -> Iterator[str]:
    """The places of what is not the same any more."""
    if isinstance(made, dict) and isinstance(kept, dict):
        for name in made:
            yield from lost(made[name], kept.get(name), f"{place}/{name}")
    elif isinstance(made, list) and isinstance(kept, list) and len(made) == len(kept):
        for i, one in enumerate(made):
            yield from lost(one, kept[i], f"{place}/{i}")
    elif made != kept:
        yield place


def test_panels_have_a_place_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    ids: set[int] = set()
    panels = make_dashboard.dashboard()["panels"]
    for panel in [one for top in panels for one in (top, *top.get("panels", ()))]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        assert panel["id"] not in ids
        ids.add(panel["id"])


def test_each_expression_can_be_parsed_and_shows_its_labels() -> None:
    for place, text in expressions().items():
        grouped = {
            label
            for part in parts(promql.parse(text))
            if isinstance(part, promql.AggregateExpr) and part.modifier is not None
            for label in part.modifier.labels
        }
        assert set(re.findall(r"\{\{(\w+)\}\}", place)) <= grouped, place


async def test_every_metric_and_label_is_in_a_scrape() -> None:
    there = await scraped()
    there["up"] = set()
    # Of these, only the processes of a router's models have a name.
    for name in there:
        if name.startswith("process_"):
            there[name].add("model_name")
    for place, text in expressions().items():
        expr = promql.parse(text)
        for name, labels in selectors(expr):
            assert name in there, place
            assert labels - ADDED <= there[name], place
        for part in parts(expr):
            if isinstance(part, promql.AggregateExpr) and part.modifier is not None:
                for name, _ in selectors(part.expr):
                    assert set(part.modifier.labels) - ADDED <= there[name], place


def test_an_alert_says_what_to_do() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"].endswith(".")
        for metric, labels in selectors(promql.parse(rule["expr"])):
            assert "job" in labels, metric


def test_the_page_has_every_alert() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(TrioServe\w+)` \|", page, re.MULTILINE)
    assert listed == [rule["alert"] for rule in rules()]
