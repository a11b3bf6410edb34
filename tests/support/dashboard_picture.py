"""Draws the dashboard for the documentation: a router with two models, under load for minutes.

python -m tests.support.dashboard_picture docs/images/dashboard.svg 180
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import trio

from examples.deploy.grafana.panels import ROWS, Panel
from examples.deploy.grafana.queries import Query
from tests.deploy.test_dashboard import in_full
from tests.support.http_server import chunks_of, post
from tests.support.panel_drawing import Curve, Drawn, svg
from tests.support.prometheus import Prometheus, free_port, scraping, until_ready
from trioserve.models import BUNDLED

_FLAGS = (
    *("--metrics", "--threads", "1", "--parallel", "3", "--max-queue", "6"),
    *("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "2"),
)
_URL = "/v1/chat/completions"
_SYSTEM = "You are a helpful assistant, who tells short stories to children. " * 6


async def main(path: Path, seconds: float) -> None:
    """Serve, load, and draw."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("small", "other"):
            (Path(folder) / f"{name}.gguf").symlink_to(BUNDLED)
        port = free_port()
        command = [*(sys.executable, "-m", "trioserve"), "--models-dir", folder, *_FLAGS]
        process = await trio.lowlevel.open_process(
            [*command, "--port", str(port)], stderr=subprocess.DEVNULL
        )
        try:
            await _watch(Path(folder), port, path, seconds)
        finally:
            process.terminate()
            await process.wait()


async def _watch(folder: Path, port: int, path: Path, seconds: float) -> None:
    url = f"http://127.0.0.1:{port}"
    async with (
        scraping(folder, [f"127.0.0.1:{port}"]) as prometheus,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
        trio.open_nursery() as nursery,
    ):
        await until_ready(client, "/health")
        for i in range(12):
            nursery.start_soon(_user, client, url, i, seconds)
        await trio.sleep(seconds)
        rows = {
            row.title: [await _drawn(prometheus, panel, seconds) for panel in row.panels]
            for row in ROWS
        }
        nursery.cancel_scope.cancel()
    caption = (
        "Drawn by tests/support/panel_drawing.py from what Prometheus had scraped; Grafana draws "
        "the same panels in its own way."
    )
    path.write_text(svg("trioserve", rows, caption), encoding="utf-8")


async def _user(client: httpx.AsyncClient, url: str, number: int, seconds: float) -> None:
    """Chats with pauses. The higher the number, the later and shorter the user is there."""
    pick = random.Random(number)
    await trio.sleep(seconds * number / 24)
    with trio.move_on_after(seconds * (1 - number / 12)):
        while True:
            with suppress(AssertionError):  # a stream that was refused
                await _ask(client, url, pick)
            await trio.sleep(pick.uniform(0, 3))


async def _ask(client: httpx.AsyncClient, url: str, pick: random.Random) -> None:
    body = {
        "model": pick.choice(("small", "small", "other")),
        "messages": [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": f"Tell me about the number {pick.randrange(50)}."},
        ],
        "max_tokens": pick.choice((20, 80, 200)),
        "temperature": "hot" if pick.random() < 0.04 else 0.7,
    }
    if pick.random() < 0.2:
        stream = post(_URL, json.dumps({**body, "stream": True}).encode())
        async with chunks_of(url, stream) as next_chunk:
            await next_chunk()  # and leave
    else:
        await client.post(_URL, json=body)


async def _drawn(prometheus: Prometheus, panel: Panel, seconds: float) -> Drawn:
    curves = [
        curve
        for query in panel.queries
        for curve in await _curves(prometheus, query, seconds)
        if panel.kind != "heatmap" or curve[1][-1][1] > 0
    ]
    return Drawn(panel, curves)


async def _curves(prometheus: Prometheus, query: Query, seconds: float) -> Sequence[Curve]:
    now = await prometheus.get("query", query="time()")
    end = float(now["result"][0])
    found = await prometheus.get(
        "query_range",
        query=in_full(query.expr, "15s"),
        start=end - seconds,
        end=end,
        step=max(seconds / 120, 1),
    )
    return [
        (_legend(query, one["metric"]), [(float(at), float(value)) for at, value in one["values"]])
        for one in found["result"]
    ]


def _legend(query: Query, labels: dict[str, str]) -> str:
    text = query.legend
    for name in ("instance", "model_name", "model", "status", "reason", "type", "state", "le"):
        text = text.replace("{{" + name + "}}", labels.get(name, ""))
    return text.replace("127.0.0.1:", ":").strip()


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), float(sys.argv[2]))
