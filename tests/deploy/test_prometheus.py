"""Debian's Prometheus takes our configuration, and has data for every panel."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import trio

from tests.deploy.test_dashboard import PANELS, in_full, rules
from tests.support.clients import client_of
from tests.support.command import serving
from tests.support.fake_fleet import routed
from tests.support.http_server import chunks_of, post
from tests.support.prometheus import EXAMPLE, Prometheus, needs_prometheus, scraping
from tests.support.scripts import answering
from trioserve.models import BUNDLED

pytestmark = [pytest.mark.system, needs_prometheus]

METRICS = {"metrics_endpoint": True}
DRAFTS = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "1")
FLAGS = ("--metrics", "--parallel", "2", "--max-queue", "2", *DRAFTS)
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}]}


def test_promtool_finds_no_mistake_in_our_files() -> None:
    unit_tests = Path(__file__).with_name("alerts_test.yml")
    for argv in (["check", "config", EXAMPLE / "prometheus.yml"], ["test", "rules", unit_tests]):
        done = subprocess.run(["promtool", *argv], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


async def test_promtool_finds_no_mistake_in_metrics() -> None:
    async with client_of(**METRICS) as client:
        await client.post("/completion", json={"prompt": "a"})
        check((await client.get("/metrics")).text)
    backends = {"one": answering("a"), "two": answering("b")}
    async with routed(backends, child=METRICS, **METRICS) as router:
        await router.client.post("/completion", json={"model": "one", "prompt": "a"})
        check((await router.client.get("/metrics")).text)


def check(metrics: str) -> None:
    """Have promtool read metrics. The names are those of llama-server, and in the style of vLLM."""
    command = ["promtool", "check", "metrics"]
    done = subprocess.run(command, input=metrics, capture_output=True, text=True)
    colons = "metric names should not contain ':'"
    others = [line for line in done.stderr.splitlines() if colons not in line]
    assert others == ['llamacpp:n_tokens_max counter metrics should have "_total" suffix']


async def test_prometheus_has_data_for_every_panel(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "one.gguf").symlink_to(BUNDLED)
    async with (
        serving("--models-dir", str(models), *FLAGS) as running,
        scraping(tmp_path, [urlsplit(running.url).netloc]) as prometheus,
        running.client() as client,
        trio.open_nursery() as nursery,
    ):
        for _ in range(4):
            nursery.start_soon(chat, client)
        missing = ["not asked yet"]
        with trio.move_on_after(240):
            while missing:
                missing = await empty(prometheus)
        groups = (await prometheus.get("rules"))["groups"]
        health = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
        nursery.cancel_scope.cancel()
    assert missing == []
    assert health == {rule["alert"]: "ok" for rule in rules()}


async def chat(client: httpx.AsyncClient) -> None:
    """A chat, one that is wrong, and one that is left, again and again."""
    url, body = "/v1/chat/completions", {**CHAT, "model": "one", "max_tokens": 20}
    while True:
        await client.post(url, json=body)
        await client.post(url, json={**body, "temperature": "hot"})
        stream = post(url, json.dumps({**body, "stream": True}).encode())
        async with chunks_of(str(client.base_url), stream) as next_chunk:
            await next_chunk()
        await trio.sleep(0.2)


async def empty(prometheus: Prometheus) -> list[str]:
    """The queries of the dashboard that have no data now."""
    found = []
    for panel in PANELS:
        for query in panel.queries:
            series = await prometheus.ask(in_full(query.expr, "15s"))
            if all(math.isnan(value) for _, value in series):
                found.append(f"{panel.title}: {query.legend}")
    return found
