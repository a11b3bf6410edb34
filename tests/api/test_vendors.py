"""A vendor is a folder and an entry: a made-up one works alone and in a router."""

from __future__ import annotations

import pytest

from tests.api import made_up
from tests.support.clients import client_of
from tests.support.fake_fleet import routed
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
        assert (wrong.status_code, wrong.json()) == (400, {"oh": "There is no question."})
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
        assert (wrong.status_code, wrong.json()) == (400, {"oh": "'engine' must be a string."})
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
