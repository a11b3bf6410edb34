"""`GET /v1/metrics`: the metrics as JSON."""

from __future__ import annotations

import math
import time

import pytest

from tests.support.clients import client_of
from tests.support.fake_fleet import routed
from tests.support.scripts import answering
from trioserve.server.observers.metrics import quantile


async def test_over_http() -> None:
    async with client_of(answering("abc"), metrics_endpoint=True, parallel=2) as client:
        before = (await client.get("/v1/metrics")).json()
        for _ in range(2):
            body = {"prompt": "p" * 40, "cache_prompt": True}
            assert (await client.post("/completion", json=body)).status_code == 200
        bad = await client.post("/completion", json={"prompt": "p", "n_predict": "x"})
        assert bad.status_code == 400
        seen = (await client.get("/v1/metrics")).json()
        prometheus = (await client.get("/metrics")).text
    assert before["latency_s"]["queue"] == dict.fromkeys(("mean", "p50", "p90", "p99")) | {
        "count": 0
    }
    assert seen.keys() == before.keys()
    assert (seen["object"], seen["model"]) == ("metrics", "scripted")
    assert abs(seen["started"] + seen["uptime_s"] - time.time()) < 30
    assert seen["requests"]["finished"] == {"none": 0, "eos": 2, "word": 0, "limit": 0}
    assert seen["requests"]["running"] == seen["requests"]["waiting"] == 0
    assert seen["slots"] == {"total": 2, "busy": 0}
    tokens = seen["tokens"]
    assert tokens["prompt"] == tokens["cached"] + tokens["computed"] == 80
    assert tokens["generated"] == 8
    first = seen["latency_s"]["time_to_first_token"]
    assert first["count"] == 2
    assert 0 < first["p50"] <= first["p90"] <= first["p99"]
    assert seen["kv_cache"]["running"] == 0 < seen["kv_cache"]["used"] <= seen["kv_cache"]["cells"]
    assert f'trioserve:ticks_total{{model_name="scripted"}} {seen["engine"]["ticks"]}.0' in (
        prometheus
    )


async def test_of_a_router() -> None:
    backends = {"one": answering("a"), "two": answering("b"), "three": None}
    async with routed(backends, child={"metrics_endpoint": True}, metrics_endpoint=True) as router:
        await router.client.post("/completion", json={"prompt": "p", "model": "two"})
        seen = (await router.client.get("/v1/metrics")).json()
        own = (await router.client.get("/v1/metrics?model=two")).json()
    assert {name: one["requests"]["finished"]["eos"] for name, one in seen["models"].items()} == {
        "one": 0,
        "two": 1,
    }
    assert own["requests"] == seen["models"]["two"]["requests"]


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, 0.0), (0.25, 0.5), (0.5, 1.0), (0.75, 2.0), (0.8, 2.2), (1.0, 3.0)],
)
def test_values_are_spread_evenly_within_a_bucket(share: float, expected: float) -> None:
    buckets = [(1.0, 2.0), (2.0, 3.0), (3.0, 4.0), (math.inf, 4.0)]
    assert quantile(buckets, share) == pytest.approx(expected)


def test_a_quantile_above_all_bounds_and_one_of_nothing() -> None:
    assert quantile([(1.0, 0.0), (math.inf, 2.0)], 0.5) == 1.0
    assert quantile([(1.0, 0.0), (math.inf, 0.0)], 0.5) is None
