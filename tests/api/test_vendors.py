"""A vendor is a folder and an entry: a made-up one works alone, in a router and under Ray."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.api import made_up
from tests.support.clients import client_of
from tests.support.fake_fleet import routed
from tests.support.ray_replicas import Replicas, ask, events, ingress_of, json_answer, never
from tests.support.scripts import answering
from trioserve.api.base import vendors
from trioserve.errors import ModelLoadError

QUESTION = {"question": "Why?", "engine": "two"}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendors, "registered", [*vendors.registered, made_up.VENDOR])


async def test_it_works_alone() -> None:
    async with client_of(answering("Because."), rate_limit_requests=9) as client:
        answer = await client.post(made_up.PATH, json=QUESTION)
        assert answer.json() == {"answer": "Because."}
        assert answer.headers["made-up-requests-remaining"] == "8"
        wrong = await client.post(made_up.PATH, json={})
        assert (wrong.status_code, wrong.json()) == (418, {"oh": "There is no question."})
        described = (await client.get("/openapi.json")).json()
        assert made_up.PATH in described["paths"]
        page = await client.get("/health", headers={"Origin": "http://localhost"})
        assert "Made-Up-Tokens-Reset" in page.headers["Access-Control-Expose-Headers"]


async def test_a_router_forwards_it_to_the_model_that_it_names() -> None:
    backends = {"one": answering("Of one."), "two": answering("Of two.")}
    async with routed(backends) as router:
        answer = await router.client.post(made_up.PATH, json=QUESTION)
        assert answer.json() == {"answer": "Of two."}
        wrong = await router.client.post(made_up.PATH, json={"engine": 1})
        assert (wrong.status_code, wrong.json()) == (418, {"oh": "'engine' must be a string."})
        listed = await router.client.get("/made-up/engines")
        assert listed.json() == {"engines": ["one", "two"]}


async def test_a_stream_that_waits_for_its_model_has_its_form() -> None:
    async with routed({"two": None}) as router:
        body = {**QUESTION, "stream": True, "sse_ping_interval": 0.1}
        async with router.client.stream("POST", made_up.PATH, json=body) as answer:
            assert answer.headers["content-type"] == made_up.CONTENT_TYPE
            lines = answer.aiter_lines()
            assert await anext(lines) == "two?"
            router.fleet.failures["two"] = ModelLoadError("It is broken.")
            router.fleet.change()
            rest = [line async for line in lines if line != "two?"]
            assert rest == ["oh: It is broken."]


def test_under_ray_it_goes_to_a_replica_of_its_model() -> None:
    one, two = Replicas(json_answer("of one"), model="one"), Replicas(json_answer("of two"))
    app = ingress_of({"one": one, "two": two})

    def answer_to(question: str) -> None:
        got = asyncio.run(ask(app, "POST", made_up.PATH, {**QUESTION, "question": question}))
        assert got.json == "of two"

    for question in ("Why? " * 100 + "1", "Why? " * 100 + "2", "What?"):
        answer_to(question)
    first, second, other = (hint.blocks for _, hint in two.calls)
    assert first[0] == second[0] != other[0]
    wrong = asyncio.run(ask(app, "POST", made_up.PATH, {"engine": "three"}))
    assert wrong.status == 418
    assert "three" in wrong.json["oh"]


def test_under_ray_its_stream_ends_with_its_error() -> None:
    lost = events(b"Be", ("lost",), content_type=made_up.CONTENT_TYPE)
    got = asyncio.run(ask(ingress_of({"two": Replicas(lost)}), "POST", made_up.PATH, QUESTION))
    assert got.body.startswith(b"Beoh: ")


def test_under_ray_its_lists_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trioserve.ray.routes._LIST_PATIENCE", 0.01)
    models = {"one": Replicas(json_answer({"engines": ["one"]})), "two": Replicas(never)}
    got = asyncio.run(ask(ingress_of(models), "GET", "/made-up/engines"))
    assert json.loads(got.body) == {"engines": ["one", "two"]}
