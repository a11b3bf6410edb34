"""Reports of measurements: lines of a table, JSON, CSV, and a picture."""

from __future__ import annotations

import csv
import io
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from trioserve.bench import plot
from trioserve.bench.speed import Sample, Workload
from trioserve.bench.stats import Spread, ratio_of, spread

#: The columns of a table, with their widths. The last ones are right-aligned.
_COLUMNS = (
    ("test", 16), ("clients", 7), ("server", 20), ("t/s", 27),
    ("TTFT, ms", 9), ("ITL p50, ms", 11), ("p99, ms", 8), ("ratio", 17),
)  # fmt: skip
_N_LEFT = 1
_SERVER, _RATIO = 2, len(_COLUMNS) - 1


@attrs.frozen
class Result:
    """A test with the samples of each server, the one that is compared with last."""

    test: Workload
    samples: Mapping[str, Sequence[Sample]]

    def speed(self, server: str) -> Spread:
        found = spread([one.tokens_per_s for one in self.samples[server]])
        assert found is not None
        return found

    def ratio(self, server: str) -> Spread | None:
        """The speed of a server over that of the last one."""
        base = list(self.samples)[-1]
        if server == base:
            return None
        ours, theirs = ([one.tokens_per_s for one in self.samples[name]] for name in (server, base))
        return ratio_of(ours, theirs)

    def median(self, server: str, name: str) -> float | None:
        """The median of another number of a server, None if it has none."""
        values = [getattr(one, name) for one in self.samples[server]]
        found = spread([value for value in values if value is not None])
        return None if found is None else found.median

    def notes(self) -> list[str]:
        """Figures of the samples, each computed once."""
        every = ((name, one) for name, samples in self.samples.items() for one in samples)
        return list(dict.fromkeys(f"{name}: {note}" for name, one in every for note in one.notes))


# -- the table


@attrs.frozen
class Table:
    """A table in Markdown that is printed line by line, so its columns have fixed widths."""

    is_compared: bool

    def head(self) -> str:
        rule = ["-" * width for _, width in _COLUMNS]
        rule[_N_LEFT:] = [f"{line[:-1]}:" for line in rule[_N_LEFT:]]
        return self._line([name for name, _ in _COLUMNS]) + self._line(rule)

    def lines(self, result: Result) -> str:
        lines = []
        for server in result.samples:
            numbers = [result.median(server, name) for name in ("ttft", "itl_p50", "itl_p99")]
            cells = [result.test.name, str(result.test.clients), server]
            cells.append(spread_text(result.speed(server), 1))
            cells += ["" if number is None else f"{number:.1f}" for number in numbers]
            cells.append(spread_text(result.ratio(server), 2))
            lines.append(self._line(cells))
        return "".join(lines)

    def _line(self, cells: Sequence[str]) -> str:
        shown = [
            cell.ljust(width) if i < _N_LEFT else cell.rjust(width)
            for i, (cell, (_, width)) in enumerate(zip(cells, _COLUMNS, strict=True))
            if self.is_compared or i not in (_SERVER, _RATIO)
        ]
        return f"| {' | '.join(shown)} |\n"


def spread_text(value: Spread | None, digits: int) -> str:
    """Format a median with its bounds, such as ``12.3 [11.9, 12.5]``; empty without one."""
    if value is None:
        return ""
    shown = f"{value.median:.{digits}f}"
    if value.low == value.high:
        return shown
    return f"{shown} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


# -- for programs


def records(result: Result) -> Iterator[dict[str, Any]]:
    """A flat record for each server, as for CSV."""
    for server in result.samples:
        speed, ratio = result.speed(server), result.ratio(server)
        yield {
            "test": result.test.name,
            **attrs.asdict(result.test),
            "server": server,
            "tokens_per_s": speed.median,
            "least": speed.low,
            "greatest": speed.high,
            "ttft_ms": result.median(server, "ttft"),
            "itl_p50_ms": result.median(server, "itl_p50"),
            "itl_p99_ms": result.median(server, "itl_p99"),
            "ratio": None if ratio is None else ratio.median,
        }


def csv_text(results: Sequence[Result]) -> str:
    """All records as CSV, with a head."""
    output = io.StringIO()
    rows = [record for result in results for record in records(result)]
    writer = csv.DictWriter(output, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return output.getvalue()


def plain(results: Sequence[Result], options: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, for a JSON file: the machine, the options, and each sample."""
    found = [
        {
            **attrs.asdict(one.test),
            "test": one.test.name,
            "records": list(records(one)),
            "samples": attrs.asdict(one)["samples"],
        }
        for one in results
    ]
    return {"machine": machine(), "options": options, "results": found}


def machine() -> dict[str, Any]:
    """Describe where the numbers come from."""
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
    }


# -- the picture


def picture(results: Sequence[Result], title: str, caption: str) -> str:
    """Draw curves over the depth or the number of clients, or else bars, as SVG."""
    servers = list(results[0].samples)
    charts = [
        chart
        for axis in ("depth", "clients")
        for chart in _charts(results, axis)
        if any(len(line) > 1 for line in chart.lines.values())
    ]
    if charts:
        return plot.curves(title, servers, charts, caption)
    rows = [
        plot.Row(label=_label(one.test), values={name: one.speed(name) for name in servers})
        for one in results
    ]
    panel = plot.Panel(title="Tokens a second", more_is_better=True, rows=rows)
    return plot.bars(title, servers, [panel], caption)


def _label(test: Workload) -> str:
    return f"{test.name}, {test.clients} client{'s' * (test.clients > 1)}"


def _charts(results: Sequence[Result], axis: str) -> Iterator[plot.Chart]:
    """A chart for all tests that differ in one thing only."""
    groups: dict[Workload, list[Result]] = {}
    for one in results:
        groups.setdefault(attrs.evolve(one.test, **{axis: 1}), []).append(one)
    for group in groups.values():
        test = group[0].test
        rest = _label(attrs.evolve(test, depth=0)) if axis == "depth" else test.name
        lines = {
            server: sorted(
                [(float(getattr(one.test, axis)), one.speed(server)) for one in group],
                key=lambda point: point[0],
            )
            for server in group[0].samples
        }
        yield plot.Chart(
            title=f"Tokens a second: {rest}",
            x_title="tokens in the KV cache before" if axis == "depth" else "clients at once",
            more_is_better=True,
            lines=lines,
        )
