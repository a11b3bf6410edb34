"""Writes `trioserve.json`, the dashboard, from the list of its panels in `panels.py`.

python -m examples.deploy.grafana.make_dashboard
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from examples.deploy.grafana.panels import ROWS, Panel, Row
from examples.deploy.grafana.queries import SERVERS, Query

FILE = Path(__file__).with_name("trioserve.json")
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS, _STAT_HEIGHT, _HEIGHT = 24, 4, 8


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana imports it."""
    return {
        "uid": "trioserve",
        "title": "trioserve",
        "description": "Requests, their times, caches, the engine and the process of trioserve.",
        "tags": ["trioserve", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,  # one cross hair for all panels
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "panels": _rows(ROWS),
    }


def _variables() -> list[dict[str, Any]]:
    any_of_ours = '{__name__=~"trioserve:(ticks_total|router_models)"}'
    here = f"trioserve:ticks_total{{{SERVERS}}}"
    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
        },
        _variable("job", "Job", any_of_ours, "job"),
        _variable("instance", "Server", any_of_ours[:-1] + ',job=~"$job"}', "instance"),
        _variable("model", "Model", here, "model_name"),
    ]


def _variable(name: str, label: str, series: str, of: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": f"label_values({series},{of})", "refId": name},
        "refresh": 2,  # whenever the time range changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _rows(rows: Iterable[Row]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    ids, y = itertools.count(1), 0
    for row in rows:
        heading: dict[str, Any] = {
            "id": next(ids),
            "type": "row",
            "title": row.title,
            "collapsed": row.closed,
            "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
            "panels": [],
        }
        made.append(heading)
        y += 1
        stats = row.panels[0].kind == "stat"
        width, height = (4, _STAT_HEIGHT) if stats else (8, _HEIGHT)
        for place, panel in enumerate(row.panels):
            x = place * width % _COLUMNS
            here = {"x": x, "y": y, "w": width, "h": height}
            (heading["panels"] if row.closed else made).append(_panel(next(ids), panel, here))
            if x + width == _COLUMNS or place == len(row.panels) - 1:
                y += height
    return made


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "targets": [
            _target(ref, query, "heatmap" if panel.kind == "heatmap" else "time_series")
            for ref, query in zip("ABCDEF", panel.queries, strict=False)
        ],
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": _OPTIONS[panel.kind],
    }


def _target(ref: str, query: Query, form: str) -> dict[str, Any]:
    return {
        "refId": ref,
        "datasource": _DATASOURCE,
        "expr": query.expr,
        "legendFormat": query.legend,
        "format": form,
    }


def _field(panel: Panel) -> dict[str, Any]:
    field: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.most is not None:
        field["max"] = panel.most
    if panel.kind == "timeseries":
        field["custom"] = {
            "fillOpacity": 30 if panel.stacked else 8,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    if panel.kind == "stat":
        steps = ((None, "green"), (panel.warn, "orange"), (panel.alarm, "red"))
        field["color"] = {"mode": "thresholds"}
        field["thresholds"] = {
            "mode": "absolute",
            "steps": [
                {"color": colour, "value": value}
                for i, (value, colour) in enumerate(steps)
                if i == 0 or value is not None
            ],
        }
    return field


_OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "value",
    },
    "heatmap": {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5},
        "yAxis": {"unit": "s"},
        "tooltip": {"show": True, "yHistogram": True},
        "legend": {"show": True},
    },
}


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=2) + "\n", encoding="utf-8")
