"""The pictures of a `results.json`: bars beside llama-server, curves over the number of clients."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.servers import BASE, OURS
from trioserve.bench import plot
from trioserve.bench.stats import Spread, spread

SERVERS = (OURS, BASE)
#: Panels are in this order; measures without a title come last, under their names.
TITLES = {
    "tokens/s": "Throughput, tokens/s",
    "ttft p50": "Time to the first token, median, ms",
    "latency p99": "Time of a whole request, p99, ms",
    "p99 meanwhile / p50 before": "Gaps in streams beside a long prompt, p99, in medians before it",
    "long prompt ttft": "Time to the first token of that prompt, ms",
    "ttft p99 / one prefill": "Time to the first token of a shared prompt, p99, in prefills of it",
    "wall s": "Time of all requests together, s",
    "prefilled / new": "Prompt tokens computed for each new one",
    "slot free p99": "From a cancel until the slot is free, p99, ms",
    "schema / plain": "Throughput with a JSON Schema, as a share of that without",
    "busy / quiet": "Throughput beside a busy process, as a share of that without",
    "memory/connection": "Memory of each connection, KB",
    "health p99": "/health meanwhile, p99, ms",
}
_CURVES = ("tokens/s", "ttft p50")


def write(results: Path, folder: Path) -> list[Path]:
    """Draw what a `results.json` holds; returns the pictures.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: it is no such file.
    """
    content = json.loads(results.read_text(encoding="utf-8"))
    try:
        caption, found = caption_of(content), charts(content)
        title = f"{OURS} beside {BASE}"
        factor = f" A factor is {OURS}'s median over {BASE}'s."
        pictures = {"results.svg": plot.bars(title, SERVERS, panels(content), caption + factor)}
        if found:
            title += ", by the number of clients"
            pictures["results-clients.svg"] = plot.curves(title, SERVERS, found, caption)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{results} is no file of results: {error!r}") from error
    for name, picture in pictures.items():
        (folder / name).write_text(picture, encoding="utf-8")
    return [folder / name for name in pictures]


def panels(content: Mapping[str, Any]) -> list[plot.Panel]:
    """Make a panel of each figure, with a row for each scenario and model."""
    rows: dict[str, list[plot.Row]] = {}
    better: dict[str, bool] = {}
    for result in content["results"]:
        for verdict in result["verdicts"]:
            check = verdict["check"]
            values = _values(result["samples"], check["metric"])
            if values:
                better[check["metric"]] = check["least"]
                rows.setdefault(check["metric"], []).append(_row(result, verdict, values))
    order = [*(name for name in TITLES if name in rows), *(n for n in rows if n not in TITLES)]
    return [
        plot.Panel(title=TITLES.get(name, name), more_is_better=better[name], rows=rows[name])
        for name in order
    ]


def _row(
    result: Mapping[str, Any], verdict: Mapping[str, Any], values: Mapping[str, Spread]
) -> plot.Row:
    check, remark = verdict["check"], verdict["outcome"]
    target: float | None = check["bound"]
    if check["ratio"]:
        target = check["bound"] * values[BASE].median if BASE in values else None
    if OURS in values and BASE in values and values[BASE].median:
        factor = values[OURS].median / values[BASE].median
        shown = f"{factor:.2f}" if factor >= 0.005 else "< 0.01"
        remark = f"{shown}\N{MULTIPLICATION SIGN}, {remark}"
    label = f"{result['scenario']}: {result['model']}"
    return plot.Row(label=label, values=values, target=target, remark=remark)


def charts(content: Mapping[str, Any]) -> list[plot.Chart]:
    """Make charts for each model that was measured with several numbers of clients."""
    models = dict.fromkeys(result["model"] for result in content["results"])
    found = []
    for model in models:
        for metric in _CURVES:
            lines = _lines(content["results"], model, metric)
            if any(len(line) > 1 for line in lines.values()):
                found.append(
                    plot.Chart(
                        title=f"{TITLES[metric]}: {model}",
                        x_title="clients at the same time",
                        more_is_better=metric == "tokens/s",
                        lines=lines,
                    )
                )
    return found


def _lines(
    results: Sequence[Mapping[str, Any]], model: str, metric: str
) -> dict[str, list[tuple[float, Spread]]]:
    lines: dict[str, list[tuple[float, Spread]]] = {}
    for result in results:
        clients = re.match(r"(\d+) (?:streams?, \d+ tokens|clients, streams)$", result["scenario"])
        if result["model"] == model and clients is not None:
            for server, value in _values(result["samples"], metric).items():
                lines.setdefault(server, []).append((float(clients[1]), value))
    return {server: sorted(line, key=lambda point: point[0]) for server, line in lines.items()}


def _values(samples: Mapping[str, Any], metric: str) -> dict[str, Spread]:
    """Return what each server was measured at, if it was."""
    found: dict[str, Spread] = {}
    for server in SERVERS:
        numbers = [one["numbers"] for one in samples.get(server, ())]
        value = spread([each[metric] for each in numbers if metric in each])
        if value is not None:
            found[server] = value
    return found


def caption_of(content: Mapping[str, Any]) -> str:
    """Say what was measured, on what, and how."""
    machine, results = content["machine"], content["results"]
    models = ", ".join(dict.fromkeys(result["model"] for result in results))
    rounds = {len(runs) for result in results for runs in result["samples"].values() if runs}
    found = [result.get("layouts") for result in results]
    layouts = dict.fromkeys(
        ", ".join(f"{name} {layout}" for name, layout in each.items()) for each in found if each
    )
    caches = f" KV caches: {'; or '.join(layouts)}." if layouts else ""
    number = f"{min(rounds)} to {max(rounds)}" if len(rounds) > 1 else "".join(map(str, rounds))
    return (
        f"Measured {machine['when'][:10]} on {machine['cores']} cores, {machine['system']} "
        f"{machine['machine']}. Models: {models}. Both servers with {content['flags']}. "
        f"Medians of {number or 'no'} rounds, the two servers in turn; thin lines and bands reach "
        f"from the least round to the greatest.{caches}"
    )
