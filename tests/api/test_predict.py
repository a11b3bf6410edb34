"""Google's way to send several requests in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypercorn.utils import LifespanFailureError

from tests.server.test_keys import table
from tests.support.clients import client_of
from tests.support.configs import read, refused
from tests.support.scripts import HI, answering
from trioserve.app import create_app
from trioserve.config import Config

CHAT = {"@requestFormat": "chatCompletions", "messages": HI, "max_tokens": 5}


async def predict(*instances: Any, **config: Any) -> Any:
    async with client_of(answering("Hello you"), predict_route="/predict", **config) as client:
        answer = await client.post("/predict", json={"instances": list(instances)})
    assert answer.status_code == 200
    return answer.json()["predictions"]


async def test_each_instance_is_a_request() -> None:
    text = {"@requestFormat": "/completion", "prompt": "a", "n_predict": 2, "stream": True}
    ollama = {"@requestFormat": "/api/chat", "model": "scripted", "messages": HI}  # would stream
    chat, completion, other = await predict(CHAT, text, ollama)
    assert chat["choices"][0]["message"]["content"] == "Hello"
    assert completion["content"] == "He"
    assert other["message"]["content"] == "Hello you"


async def test_what_is_wrong_with_one_instance_does_not_hurt_the_others() -> None:
    no_format = "must be an object with the string '@requestFormat'"
    bad: list[tuple[Any, str]] = [
        (5, no_format),
        ({"messages": HI}, no_format),
        ({"@requestFormat": "predict"}, "There is no route for the '@requestFormat' 'predict'"),
        (CHAT | {"messages": 5}, "messages"),
    ]
    *errors, good = await predict(*(instance for instance, _ in bad), CHAT)
    for error, (_, message) in zip(errors, bad, strict=True):
        assert message in error["error"]["message"]
        assert error["error"]["code"] == 400
    assert good["choices"][0]["message"]["content"] == "Hello"


async def test_a_body_without_a_list_of_instances_is_refused() -> None:
    async with client_of(answering("Hi"), predict_route="/predict") as client:
        for body in ({}, {"instances": 5}, {"instances": [{}] * 129}):
            answer = await client.post("/predict", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "instances")


async def test_it_needs_a_key_and_a_prefix_like_any_route() -> None:
    settings: Any = {"api_keys": ("key",), "api_prefix": "/llm", "health_route": "/healthy"}
    async with client_of(answering("Hi"), predict_route="/predict", **settings) as client:
        refused_ = await client.post("/llm/predict", json={"instances": [CHAT]})
        headers = {"Authorization": "Bearer key"}
        answer = await client.post("/llm/predict", json={"instances": [CHAT]}, headers=headers)
        healthy = await client.get("/llm/healthy", headers=headers)
    assert refused_.status_code == 401
    assert answer.json()["predictions"][0]["choices"][0]["message"]["content"] == "Hi"
    assert healthy.json() == {"status": "ok"}


async def test_without_a_route_there_is_none() -> None:
    async with client_of(answering("Hi")) as client:
        assert (await client.post("/predict", json={"instances": []})).status_code == 404


def test_vertex_ai_says_so_with_variables() -> None:
    config = read(AIP_MODE="PREDICTION", AIP_HTTP_PORT="9000", AIP_HEALTH_ROUTE="ok")
    assert (config.port, config.predict_route, config.health_route) == (9000, "/predict", "/ok")
    named = read("--port", "7000", AIP_MODE="PREDICTION", AIP_PREDICT_ROUTE="/p")
    assert (named.port, named.predict_route) == (7000, "/p")
    assert read(AIP_HTTP_PORT="9000", AIP_PREDICT_ROUTE="/p") == read()
    assert "AIP_HTTP_PORT: 'x' is not an integer" in refused(
        AIP_MODE="PREDICTION", AIP_HTTP_PORT="x"
    )


@pytest.mark.parametrize("path", ["predict", "/<x>", "/a b", "//", "/predict/"])
def test_a_route_is_a_plain_path(path: str) -> None:
    assert "--predict-route must be a path such as /predict" in refused("--predict-route", path)


async def test_a_route_that_is_taken_is_an_error_at_the_start() -> None:
    app = create_app(Config(predict_route="/completion"))
    with pytest.raises(LifespanFailureError, match="/completion is a route of the server"):
        await app.startup()


async def test_a_key_that_may_not_manage_the_server_does_not_do_it_here(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        "".join(table(*each) for each in (("chat", "c"), ("admin", "a", "manage = true")))
    )
    instance = {"@requestFormat": "/v1/unload_lora_adapter", "lora_name": "x"}
    async with client_of(answering("Hi"), predict_route="/p", keys_file=str(file)) as client:
        for key, status in (("c", 403), ("a", 501)):
            headers = {"Authorization": f"Bearer {key}"}
            answer = await client.post("/p", json={"instances": [instance]}, headers=headers)
            (error,) = answer.json()["predictions"]
            assert error["error"]["code"] == status


async def test_a_route_that_takes_no_object_says_so() -> None:
    (answer,) = await predict({"@requestFormat": "/lora-adapters"})
    assert answer["error"]["code"] == 400
