"""Tables of medians, spreads and ratios, and the same as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks.stats import Metric, Sample, column, ratio
from trioserve.bench.report import machine
from trioserve.bench.stats import spread


def table(
    title: str,
    metrics: Sequence[Metric],
    samples: Mapping[str, Sequence[Sample]],
) -> str:
    """Return one table: a line for each metric, a column for each server, then the ratios.

    The last server is the base of the ratios. Brackets hold the least and the greatest round.
    """
    names = list(samples)
    base = names[-1]
    head = [title, *names, *(f"{name} / {base}" for name in names[:-1])]
    rows = [head]
    for metric in metrics:
        unit = f" ({metric.unit})" if metric.unit else ""
        row = [f"{metric.name}{unit}"]
        for name in names:
            row.append(_cell(spread(column(samples[name], metric.name)), metric.digits))
        for name in names[:-1]:
            row.append(_cell(ratio(samples[name], samples[base], metric.name), 3))
        rows.append(row)
    rows.append(["failed requests", *(_failed(samples[name]) for name in names)])
    return align(rows) + _remarks(samples)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, the head first, as a table in Markdown."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines) + "\n"


def _cell(value: Any, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value.median:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def _failed(samples: Sequence[Sample]) -> str:
    return f"{sum(s.failed for s in samples)} of {sum(s.requests for s in samples)}"


def align(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, the head first, as a table in plain text."""
    width = max(len(row) for row in rows)
    full = [[*row, *[""] * (width - len(row))] for row in rows]
    widths = [max(len(row[place]) for row in full) for place in range(width)]
    lines = []
    for row in full:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(size) for cell, size in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(len(line) for line in lines))
    return "\n".join(lines) + "\n"


def _remarks(samples: Mapping[str, Sequence[Sample]]) -> str:
    lines = []
    for name, runs in samples.items():
        remarks = {remark: None for run in runs for remark in (*run.errors, *run.notes)}
        lines += [f"  {name}: {remark}\n" for remark in remarks]
    return "".join(lines)


def plain(options: argparse.Namespace) -> dict[str, object]:
    """Return options as they go into the JSON file: paths as text, and no API key."""
    shown = {name: value for name, value in vars(options).items() if name != "api_key"}
    return {name: str(v) if isinstance(v, Path) else v for name, v in shown.items()}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write results with the machine they come from.

    Raises:
        OSError: the file can't be written.
    """
    whole = {"machine": machine(), **content}
    path.write_text(json.dumps(whole, indent=1, default=_plain) + "\n", encoding="utf-8")


def _plain(value: object) -> object:
    if isinstance(value, Sample):
        return attrs.asdict(value, recurse=False)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")
