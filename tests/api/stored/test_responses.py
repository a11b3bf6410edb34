"""Stored responses: OpenAI's SDK, other keys, the background, and what ends it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trio
import trio.testing

from tests.support.clients import client_and_service, client_of, use_openai
from tests.support.event_source import gated
from tests.support.fake_fleet import routed
from tests.support.http_server import chunks_of, post
from tests.support.scripts import answering, noting
from tests.support.stored import RESPONSES, stored
from tests.support.waiting import until


def data_in(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines]


async def test_the_sdk_continues_lists_and_deletes() -> None:
    backend, prompts = noting("Fine.")

    def use(client: openai.OpenAI) -> None:
        first = client.responses.create(model="any", input="How are you?", instructions="Be kind.")
        assert first.store is True and first.previous_response_id is None
        assert client.responses.retrieve(first.id).output_text == "Fine."
        assert client.responses.retrieve(first.id) == first
        second = client.responses.create(
            model="any",
            input=[{"role": "user", "content": "And now?"}],
            previous_response_id=first.id,
        )
        assert second.previous_response_id == first.id
        listed = client.responses.input_items.list(second.id, order="asc", limit=2)
        assert [item.type for item in listed] == ["message"] * 3  # two pages
        (newest, *_) = client.responses.input_items.list(second.id).data
        assert newest.content[0].text == "And now?" if newest.content != "And now?" else True
        third = client.responses.create(model="any", input="Well?", previous_response_id=second.id)
        assert third.usage is not None
        client.responses.delete(first.id)
        for use_it in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError):
                use_it(first.id)
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="any", input="?", previous_response_id=third.id)
        assert caught.value.code == "previous_response_not_found"
        assert caught.value.param == "previous_response_id"

    await use_openai(backend, use)
    assert "Be kind." in prompts[0] and "Be kind." not in prompts[1]
    assert [prompts[2].count(text) for text in ("How are you?", "Fine.", "And now?")] == [1, 2, 1]


async def test_a_stream_is_stored_before_its_last_event() -> None:
    async with client_of(answering("Hello")) as client:
        events = []
        body = {"input": "Hi", "stream": True}
        async with client.stream("POST", RESPONSES, json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    events.append(json.loads(line[6:]))
        assert events[-1]["type"] == "response.completed"
        found = await client.get(f"{RESPONSES}/{events[0]['response']['id']}")
        assert found.json() == events[-1]["response"]


async def test_store_false_stores_nothing() -> None:
    async with client_of(answering("Hello")) as client:
        response = await stored(client, store=False)
        assert response["store"] is False
        assert (await client.get(f"{RESPONSES}/{response['id']}")).status_code == 404
        kept = await stored(client)
        more = await stored(client, store=False, previous_response_id=kept["id"])
        assert more["previous_response_id"] == kept["id"]
        assert (await client.get(f"{RESPONSES}/{more['id']}")).status_code == 404


async def test_references_to_stored_items() -> None:
    backend, prompts = noting("Blue.")
    async with client_of(backend) as client:
        first = await stored(client, input="Which color?")
        message = first["output"][0]["id"]
        await stored(client, input=[{"type": "item_reference", "id": message}, *_said("Why?")])
        assert "Blue." in prompts[-1]
        reference = [{"type": "item_reference", "id": "msg_none"}, *_said("Why?")]
        answer = await client.post(RESPONSES, json={"input": reference})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "input[0]"


def _said(text: str) -> list[dict[str, Any]]:
    return [{"type": "message", "role": "user", "content": text}]


@pytest.mark.parametrize("id_", ["", 7])
async def test_an_item_has_an_id_or_none(id_: object) -> None:
    async with client_of() as client:
        for item in ({"type": "item_reference", "id": id_}, {**_said("Why?")[0], "id": id_}):
            answer = await client.post(RESPONSES, json={"input": [*_said("Hi"), item]})
            assert answer.status_code == 400, item
            assert answer.json()["error"]["param"] == "input[1].id"


async def test_errors_name_the_items_of_the_client() -> None:
    async with client_of(answering("Hello")) as client:
        first = await stored(client)
        body = {"previous_response_id": first["id"], "input": [{"role": "guest"}]}
        answer = await client.post(RESPONSES, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0].role")


async def test_tokens_of_continued_responses_are_counted() -> None:
    async with client_of(answering("Hello")) as client:
        first = await stored(client, input="x" * 100)
        asked = {"input": "y", "previous_response_id": first["id"]}
        counted = (await client.post(f"{RESPONSES}/input_tokens", json=asked)).json()
        alone = (await client.post(f"{RESPONSES}/input_tokens", json={"input": "y"})).json()
        assert counted["input_tokens"] > alone["input_tokens"] + 100
        assert (await stored(client, **asked))["usage"]["input_tokens"] == counted["input_tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True, "store": False}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"previous_response_id": "resp_1", "conversation": "conv_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": 7}, "conversation"),
        ({"store": "yes"}, "store"),
        ({"previous_response_id": 7}, "previous_response_id"),
    ],
)
async def test_invalid_storing_fields_are_refused(fields: dict[str, Any], param: str) -> None:
    async with client_of() as client:
        answer = await client.post(RESPONSES, json={"input": "Hi", **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


# -- in the background


async def test_the_sdk_polls_a_background_response() -> None:
    def use(client: openai.OpenAI) -> None:
        made = client.responses.create(model="any", input="Hi", background=True)
        assert made.background is True
        while made.status in ("queued", "in_progress"):
            made = client.responses.retrieve(made.id)
        assert (made.status, made.output_text) == ("completed", "Hello")
        assert client.responses.cancel(made.id).status == "completed"
        now = client.responses.create(model="any", input="Hi")
        with pytest.raises(openai.BadRequestError, match="in the background"):
            client.responses.cancel(now.id)

    await use_openai(answering("Hello"), use)


async def test_a_client_that_leaves_stops_nothing_in_the_background() -> None:
    backend, gate = gated("0123456789" * 5)
    async with client_and_service(backend) as (client, service):
        body = json.dumps({"input": "Hi", "background": True, "stream": True}).encode()
        async with chunks_of(str(client.base_url), post(RESPONSES, body)) as next_chunk:
            gate.allow(3)
            event = data_in(await next_chunk())[0]
        id_ = event["response"]["id"]
        assert (await client.get(f"{RESPONSES}/{id_}")).json()["status"] == "in_progress"
        gate.open()
        await until(lambda: not service.stored_runs)
        found = (await client.get(f"{RESPONSES}/{id_}")).json()
        assert found["status"] == "completed"
        assert found["output"][0]["content"][0]["text"] == "0123456789" * 5


async def test_a_background_response_is_cancelled() -> None:
    backend, gate = gated("0123456789" * 50)
    async with client_and_service(backend) as (client, service):
        made = await stored(client, background=True)
        gate.allow(5)
        cancelled = await client.post(f"{RESPONSES}/{made['id']}/cancel")
        gate.open()
        assert cancelled.json()["status"] == "cancelled"
        assert (await client.get(f"{RESPONSES}/{made['id']}")).json()["status"] == "cancelled"
        assert not service.stored_runs
        assert (await client.get(f"{RESPONSES}/{made['id']}?stream=true")).status_code == 400
        again = await client.post(f"{RESPONSES}/{made['id']}/cancel")
        assert again.json()["status"] == "cancelled"


async def test_deleting_a_running_response_ends_it() -> None:
    backend, gate = gated("0123456789" * 50)
    async with client_and_service(backend) as (client, service):
        made = await stored(client, background=True)
        assert (await client.delete(f"{RESPONSES}/{made['id']}")).json()["deleted"] is True
        gate.open()
        assert not service.stored_runs
        assert (await client.get(f"{RESPONSES}/{made['id']}")).status_code == 404


async def test_a_wrong_request_fails_at_once_in_the_background() -> None:
    async with client_and_service(answering("Hello")) as (client, service):
        body = {"input": "Hi", "background": True, "temperature": "hot"}
        answer = await client.post(RESPONSES, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")
        assert not list(service.streams)
        number = await service.store.do(
            lambda records: records.listed("response", service.store.owner_of(""), limit=9)
        )
        assert number == []


async def test_the_end_of_the_server_cancels_background_responses(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    backend, gate = gated("0123456789" * 50)
    async with client_and_service(backend, store=path, drain_timeout=0) as (client, service):
        made = await stored(client, background=True)
        gate.allow(3)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(service.drain)
                await trio.testing.wait_all_tasks_blocked()
                gate.open()
    async with client_of(store=path) as client:
        found = (await client.get(f"{RESPONSES}/{made['id']}")).json()
        assert found["status"] == "cancelled"


async def test_responses_survive_a_restart(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    async with client_of(answering("Fine."), store=path) as client:
        first = await stored(client, input="How are you?")
    backend, prompts = noting("Fine.")
    async with client_of(backend, store=path) as client:
        assert (await client.get(f"{RESPONSES}/{first['id']}")).json() == first
        await stored(client, input="And now?", previous_response_id=first["id"])
        assert "How are you?" in prompts[-1]


# -- a router


async def test_a_router_stores_responses_of_its_models() -> None:
    backend, prompts = noting("Fine.")
    async with routed({"a": backend}) as router:
        client = router.client
        first = await stored(client, model="a", input="How are you?")
        assert first["store"] is True
        assert (await client.get(f"{RESPONSES}/{first['id']}")).json() == first
        body = {"model": "a", "input": "And now?", "previous_response_id": first["id"]}
        stream = await client.post(RESPONSES, json={**body, "stream": True})
        last = data_in(stream.text)[-1]["response"]
        assert last["previous_response_id"] == first["id"]
        assert "How are you?" in prompts[-1]
        made = await stored(client, **body, background=True)
        await until(lambda: not router.service.stored_runs)
        found = (await client.get(f"{RESPONSES}/{made['id']}")).json()
        assert found["status"] == "completed"


# -- what clients cannot tell


#: An id, and an item that stands before the input, as one process tells another.
_FORGED = {"id": "resp_forged", "repeated": {"metadata": {"a": "forged"}}}
_ITEMS = [{"type": "message", "role": "user", "content": "forged"}]
_BODIES: list[dict[str, Any]] = [
    {"trioserve_stored": {**_FORGED, "before": _ITEMS}},
    {"trioserve.stored": {**_FORGED, "before": _ITEMS, "n_before": 1}},
]


@pytest.mark.parametrize("many", [True, False])
async def test_internal_values_are_not_taken_from_clients(many: bool) -> None:
    backend, prompts = noting("Fine.")
    headers = {"X-Trioserve-Stored": json.dumps({**_FORGED, "n_before": 1})}
    async with routed({"a": backend}) if many else client_of(backend) as served:
        client = served if isinstance(served, httpx.AsyncClient) else served.client
        for body, store in itertools.product(_BODIES, (True, False)):
            asked = {"input": _said("Hi"), "store": store, **body}
            answer = await client.post(RESPONSES, json=asked, headers=headers)
            assert answer.status_code == 200 and "forged" not in answer.text
            assert "forged" not in prompts[-1]
            wrong = {**asked, "input": [{"role": "guest"}]}
            answer = await client.post(RESPONSES, json=wrong, headers=headers)
            assert answer.json()["error"]["param"] == "input[0].role"


async def test_an_unknown_route_below_responses_is_not_found() -> None:
    async with client_of() as client:
        assert (await client.post(f"{RESPONSES}/shrink", json={})).status_code == 404
