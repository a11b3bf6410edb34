"""The metrics of every app: answers and connections."""

from __future__ import annotations

import httpx

from tests.server.observers.test_metrics import read
from tests.support.http_server import connected, serving_script


def answers(text: str) -> dict[str, float]:
    """The answers by route and status."""
    begin = "trioserve:http_answers_total"
    return {name[len(begin) :]: n for name, n in read(text).items() if name.startswith(begin)}


async def test_answers_are_counted_by_route_and_status() -> None:
    async with (
        serving_script(metrics_endpoint=True, api_keys=("k",)) as (url, _),
        httpx.AsyncClient(base_url=url) as client,
    ):
        await client.post("/completion", json={"prompt": "a"})
        client.headers["Authorization"] = "Bearer k"
        for prompt in ("a", "a", 3.5):
            await client.post("/completion", json={"prompt": prompt})
        await client.get("/v1/models/a/b?c=d")
        await client.request("BREW", "/nowhere")
        async with connected(url):
            text = (await client.get("/metrics")).text
            seen = read(text)
            assert seen["trioserve:http_connections"] == 2
    assert answers(text) == {
        '{route="/completion",status="200"}': 2,
        '{route="/completion",status="400"}': 1,
        '{route="/completion",status="401"}': 1,
        '{route="/v1/models/<path:name>",status="404"}': 1,
        '{route="",status="404"}': 1,
    }
