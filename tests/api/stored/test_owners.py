"""Each route hides the records of one API key from other keys."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.support.clients import client_and_service
from tests.support.fake_fleet import routed
from tests.support.scripts import answering
from tests.support.waiting import until
from trioserve.api.base.request_schemas import of_fields
from trioserve.api.base.routes import Route
from trioserve.api.stored import ROUTES
from trioserve.app import create_app
from trioserve.config import Config

KEYS = ("one", "two")
CHATS = "/v1/chat/completions"
MESSAGES = "/v1/messages/batches"
MESSAGE = {"model": "a", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
ANTHROPIC = {"anthropic-version": "2023-06-01"}


def kind_of(route: Route) -> str:
    """The path of what a route is about; files have a form for each of two APIs."""
    path = route.path.removeprefix("/v1").partition("/<")[0]
    return f"{path} of messages" if route.header else path


#: The kinds of records with ids. Usage has none.
KINDS = {kind_of(each) for each in ROUTES} - {"/usage"}

#: The bodies that POSTs below an id need.
BODIES = {
    "/v1/chat/completions/<id_>": {"metadata": {"of": "two"}},
    "/v1/conversations/<id_>": {"metadata": {"of": "two"}},
    "/v1/conversations/<id_>/items": {"items": [{"role": "user", "content": "Hi"}]},
}
#: The fields that name something stored, and what they name.
REFERENCES = {
    "previous_response_id": "/responses",
    "conversation": "/conversations",
    "input_file_id": "/files",
}
#: Reads go first, and what deletes comes last.
ORDER = ("HEAD", "GET", "POST", "DELETE")


@asynccontextmanager
async def clients(place: str) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    """Serve one model, or a router with it; gives the clients with the two API keys."""
    backend = answering("Hello")
    if place == "router":
        async with routed({"a": backend}, api_keys=KEYS) as router, _another(router.client) as two:
            yield router.client, two
    else:
        async with (
            client_and_service(backend, api_keys=KEYS) as (one, _),
            _another(one) as two,
        ):
            yield one, two


@asynccontextmanager
async def _another(one: httpx.AsyncClient) -> AsyncIterator[httpx.AsyncClient]:
    one.headers["Authorization"] = "Bearer one"
    headers = {"Authorization": "Bearer two"}
    async with httpx.AsyncClient(base_url=one.base_url, headers=headers, timeout=60) as two:
        yield two


async def posted(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def over(client: httpx.AsyncClient, path: str, status: str = "status") -> dict[str, Any]:
    """Wait until a batch, or a response in the background, is over."""
    body: dict[str, Any] = {}

    async def is_over() -> bool:
        body.update((await client.get(path)).json())
        return body[status] not in ("queued", "in_progress")

    await until(is_over)
    return body


async def stored(client: httpx.AsyncClient) -> dict[str, dict[str, str]]:
    """Store one of each kind; gives the parts of their paths, by kind."""
    asked = {"model": "a", "messages": [{"role": "user", "content": "Hi"}]}
    line = {"custom_id": "1", "url": CHATS, "body": asked}
    form = {"purpose": "batch"}
    file = await client.post("/v1/files", data=form, files={"file": ("a", json.dumps(line))})
    batch = await posted(client, "/v1/batches", input_file_id=file.json()["id"], endpoint=CHATS)
    batch = await over(client, f"/v1/batches/{batch['id']}")
    assert batch["request_counts"]["completed"] == 1, batch
    items = [{"role": "user", "content": "Hi"}]
    conversation = (await posted(client, "/v1/conversations", items=items))["id"]
    response = await posted(client, "/v1/responses", model="a", input="Hi", background=True)
    assert (await over(client, f"/v1/responses/{response['id']}"))["status"] == "completed"
    items = (await client.get(f"/v1/conversations/{conversation}/items")).json()["data"]
    messages = await posted(client, MESSAGES, requests=[{"custom_id": "1", "params": MESSAGE}])
    ended = await over(client, f"{MESSAGES}/{messages['id']}", "processing_status")
    assert ended["request_counts"]["succeeded"] == 1, ended
    file = await client.post("/v1/files", files={"file": ("a", "Hi")}, headers=ANTHROPIC)
    chat = await posted(client, CHATS, **asked, store=True, metadata={"of": "one"})
    return {
        "/chat/completions": {"id_": chat["id"]},
        "/messages/batches": {"id_": messages["id"]},
        "/files of messages": {"id_": file.json()["id"]},
        "/files": {"id_": batch["output_file_id"]},
        "/batches": {"id_": batch["id"]},
        "/conversations": {"id_": conversation, "item": items[0]["id"]},
        "/responses": {"id_": response["id"]},
    }


def requests_to(
    names: dict[str, dict[str, str]],
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The method, path, body and headers of a request to each route below an id that is stored."""
    found = [each for each in ROUTES if "<" in each.path]
    assert {kind_of(each) for each in found} == KINDS
    for method in ORDER:
        # The routes of items before those of what they belong to.
        for route in sorted(found, key=lambda route: -len(route.path)):
            if route.method == ("GET" if method == "HEAD" else method):
                parts = names[kind_of(route)]
                path = re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", route.path).format(**parts)
                body = BODIES.get(route.path, {}) if method == "POST" else None
                yield method, path, {"json": body, "headers": ANTHROPIC if route.header else {}}


def references() -> Iterator[tuple[str, str]]:
    """The paths of POSTs that may name something stored in their bodies, and those fields."""
    for route in create_app(Config()).state.routes:
        fields = {} if route.takes is None else of_fields(route.takes)
        yield from ((route.path, name) for name in sorted(REFERENCES.keys() & fields.keys()))


@pytest.mark.parametrize("place", ["model", "router"])
async def test_another_key_finds_nothing(place: str) -> None:
    async with clients(place) as (one, two):
        names = await stored(one)
        assert names.keys() == KINDS
        wanted = list(requests_to(names))
        assert len(wanted) >= 22
        for method, path, more in wanted:
            answer = await two.request(method, path, **more)
            assert answer.status_code == 404, (method, path, answer.text)
        for method, path, more in wanted:  # for its owner, each of them is there
            answer = await one.request(method, path, **more)
            is_again = method == "DELETE" and path.startswith("/responses")  # by its short path
            is_over = path.endswith("/cancel") and "batch" in path
            expected = 404 if is_again else 400 if is_over else 200
            assert answer.status_code == expected, (method, path, answer.text)


async def test_another_key_lists_nothing() -> None:
    lists = [
        (each.path, ANTHROPIC if each.header else {})
        for each in ROUTES
        if kind_of(each) in KINDS and each.method == "GET" and "<" not in each.path
    ]
    assert lists
    async with clients("model") as (one, two):
        names = await stored(one)
        for path, headers in lists:
            assert (await one.get(path, headers=headers)).json()["data"], path
            ids = [each["id_"] for each in names.values()]
            after = "after_id" if headers or path == MESSAGES else "after"
            for query in (
                "",
                *(f"?{after}={id_}" for id_ in ids),
                *(f"?ids[]={id_}" for id_ in ids),
            ):
                found = await two.get(f"{path}{query}", headers=headers)
                assert found.status_code == 400 or found.json()["data"] == [], (path, query)


@pytest.mark.parametrize("place", ["model", "router"])
async def test_another_key_continues_nothing(place: str) -> None:
    wanted = list(references())
    assert {name for _, name in wanted} == REFERENCES.keys()
    async with clients(place) as (one, two):
        names = await stored(one)
        for path, name in wanted:
            body: dict[str, Any] = {"model": "a", "input": "Hi", "endpoint": CHATS}
            body[name] = names[REFERENCES[name]]["id_"]
            answer = await two.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), path
            if path != "/v1/batches":  # whose file has answers, and no requests
                assert (await one.post(path, json=body)).status_code == 200, path
        item = {"type": "item_reference", "id": names["/conversations"]["item"]}
        for path in ("/v1/responses", "/v1/responses/input_tokens"):
            body = {"model": "a", "input": [item]}
            assert (await two.post(path, json=body)).status_code == 400
            assert (await one.post(path, json=body)).status_code == 200
        made = await two.post("/v1/conversations", json={"items": [item]})
        assert item["id"] not in made.text or "Hi" not in made.text


@pytest.mark.parametrize("place", ["model", "router"])
async def test_another_key_cannot_follow_a_running_response(place: str) -> None:
    async with clients(place) as (one, two):
        made = await posted(one, "/v1/responses", model="a", input="Hi", background=True)
        for path in (f"/v1/responses/{made['id']}?stream=true", f"/v1/stream?conv_id={made['id']}"):
            assert (await two.get(path)).status_code == 404, path
        await two.delete(f"/v1/stream?conv_id={made['id']}")
        assert (await over(one, f"/v1/responses/{made['id']}"))["status"] == "completed"
        named = {"conversation_ids": [made["id"]]}
        assert (await two.post("/v1/streams/lookup", json=named)).json() == []


async def test_ids_have_128_random_bits() -> None:
    async with clients("model") as (one, _):
        first, second = await stored(one), await stored(one)
    for names, others in zip(first.values(), second.values(), strict=True):
        for id_, other in zip(names.values(), others.values(), strict=True):
            assert re.fullmatch(r"[a-z]+[_-][0-9a-f]{32}", id_), id_
            same = sum(a == b for a, b in zip(id_[-32:], other[-32:], strict=True))
            assert same < 16, (id_, other)  # of two random ones, two digits are the same
