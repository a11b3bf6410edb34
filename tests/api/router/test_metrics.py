"""`GET /metrics` of a router has the metrics of its models."""

from __future__ import annotations

import pytest

from tests.support.fake_fleet import routed
from tests.support.scripts import answering
from trioserve.api.router.metrics import joined

METRICS = {"metrics_endpoint": True}


def samples(text: str) -> dict[str, float]:
    """The samples, by name and labels."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
    assert len(found) == len(lines)
    return found


def test_each_metric_has_its_help_and_type_once() -> None:
    head = "# HELP a:b_total What it is\n# TYPE a:b_total counter\n"
    http = "# HELP trioserve:http_answers_total x\n# TYPE trioserve:http_answers_total counter\n"
    text = joined(
        f"{http}trioserve:http_answers_total 3\n{head}a:b_total 1\n".encode(),
        {
            "one": f"{head}a:b_total 2\n{http}trioserve:http_answers_total 2\n",
            'a"b\\c': f'{head}a:b_total{{x="y"}} 3\na:b_total{{model_name="z"}} 4\n',
        },
    )
    assert text == (
        f"{http}trioserve:http_answers_total 3\n"
        f"{head}a:b_total 1\n"
        'a:b_total{model_name="one"} 2\n'
        'a:b_total{model_name="a\\"b\\\\c",x="y"} 3\n'
        'a:b_total{model_name="a\\"b\\\\c"} 4\n'
    )


async def test_models_that_are_loaded_are_in_it_and_none_is_loaded_for_it() -> None:
    backends = {"one": answering("a"), "two": answering("b"), "three": None}
    async with routed(backends, child=METRICS, **METRICS) as router:
        for prompt in ("a", "b"):
            await router.client.post("/completion", json={"model": "two", "prompt": prompt})
        seen = samples((await router.client.get("/metrics")).text)
        assert router.fleet.users == []
    ended = 'trioserve:request_success_total{model_name="%s",reason="eos"}'
    assert seen[ended % "one"] == 0
    assert seen[ended % "two"] == 2
    assert 'llamacpp:prompt_tokens_total{model_name="two"}' in seen
    assert {"process_open_fds", 'process_open_fds{model_name="one"}'} <= seen.keys()
    assert 'trioserve:router_requests_waiting{model="three"}' in seen
    assert not any("three" in name and "router" not in name for name in seen)
    assert 'trioserve:http_answers_total{route="/completion",status="200"}' in seen
    assert sum(name.startswith("trioserve:http_connections") for name in seen) == 1
    assert seen['trioserve:router_requests_total{model="two",status="200"}'] == 2


async def test_a_model_that_dies_or_hangs_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {name: answering("a") for name in ("one", "two", "three")}
    async with routed(models, child=METRICS, silent={"two"}, **METRICS) as router:
        router.processes["one"].die()
        monkeypatch.setattr("trioserve.api.router.service._PATIENCE", 1.0)
        text = (await router.client.get("/metrics")).text
    assert 'llamacpp:prompt_tokens_total{model_name="three"}' in text
    assert 'seconds_total{model_name="one"}' not in text
    assert 'seconds_total{model_name="two"}' not in text
    assert 'trioserve:router_requests_running{model="one"}' in text


async def test_a_model_without_metrics_is_left_out() -> None:
    async with routed({"one": answering("a")}, **METRICS) as router:
        text = (await router.client.get("/metrics")).text
        assert 'model_name="one"' not in text and 'router_models{status="loaded"} 1.0' in text
        assert (await router.client.get("/metrics?model=one")).status_code == 501
    async with routed({"one": None}) as router:
        assert (await router.client.get("/metrics")).status_code == 501
