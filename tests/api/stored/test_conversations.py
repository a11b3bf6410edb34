"""Conversations: OpenAI's SDK, their items, and responses that continue them."""

from __future__ import annotations

import openai
import pytest

from tests.support.clients import client_and_service, client_of, use_openai
from tests.support.scripts import answering, noting
from trioserve.api.stored import items as items_module
from trioserve.store import Part, Records, records as records_module

CONVERSATIONS = "/v1/conversations"
RESPONSES = "/v1/responses"


async def test_the_sdk_keeps_a_conversation() -> None:
    backend, prompts = noting("Fine.")

    def use(client: openai.OpenAI) -> None:
        made = client.conversations.create(
            metadata={"topic": "health"},
            items=[{"type": "message", "role": "user", "content": "My name is Ann."}],
        )
        assert client.conversations.retrieve(made.id) == made
        changed = client.conversations.update(made.id, metadata={"topic": "names"})
        assert changed.metadata == {"topic": "names"}
        response = client.responses.create(model="any", input="Who am I?", conversation=made.id)
        assert response.conversation is not None and response.conversation.id == made.id
        response = client.responses.create(
            model="any", input="Sure?", conversation={"id": made.id}, background=True
        )
        while response.status in ("queued", "in_progress"):
            response = client.responses.retrieve(response.id)
        items = list(client.conversations.items.list(made.id, order="asc", limit=2))
        assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"]
        first = client.conversations.items.retrieve(items[0].id, conversation_id=made.id)
        assert first == items[0]
        client.conversations.items.delete(items[0].id, conversation_id=made.id)
        more = client.conversations.items.create(
            made.id, items=[{"role": "user", "content": "And Bob?"}]
        )
        assert more.data[0].type == "message"
        assert len(list(client.conversations.items.list(made.id))) == 5
        assert client.conversations.delete(made.id).deleted is True
        with pytest.raises(openai.NotFoundError):
            client.conversations.retrieve(made.id)

    await use_openai(backend, use)
    assert "My name is Ann." in prompts[0]
    assert prompts[1].count("Who am I?") == 1 and "Fine." in prompts[1]


async def test_items_are_checked() -> None:
    async with client_of() as client:
        items = [{"role": "user", "content": "Hi"}, {"role": "guest", "content": "Hi"}]
        answer = await client.post(CONVERSATIONS, json={"items": items})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "items[1].role")
        made = (await client.post(CONVERSATIONS, json={})).json()
        for query, param in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after")):
            answer = await client.get(f"{CONVERSATIONS}/{made['id']}/items?{query}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("item", [{"id": "msg_none"}, {"type": "item_reference", "id": "msg_none"}])
async def test_a_reference_to_nothing_is_not_stored(item: dict[str, str]) -> None:
    async with client_of(answering("Hello")) as client:
        items = [{"role": "user", "content": "Hi"}, item]
        made = await client.post(CONVERSATIONS, json={"items": items})
        assert (made.status_code, made.json()["error"]["param"]) == (400, "items[1]")
        id_ = (await client.post(CONVERSATIONS, json={})).json()["id"]
        added = await client.post(f"{CONVERSATIONS}/{id_}/items", json={"items": items})
        assert (added.status_code, added.json()["error"]["param"]) == (400, "items[1]")
        body = {"conversation": id_, "input": items}
        for background in (False, True):
            answer = await client.post(RESPONSES, json={**body, "background": background})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[1]")
        answer = await client.post(RESPONSES, json={"conversation": id_, "input": "Hi"})
        assert answer.status_code == 200


async def test_a_conversation_takes_a_number_of_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items_module, "_MAX_ITEMS", 3, raising=False)
    async with client_of() as client:
        some = {"items": [{"role": "user", "content": "Hi"}] * 2}
        id_ = (await client.post(CONVERSATIONS, json=some)).json()["id"]
        answer = await client.post(f"{CONVERSATIONS}/{id_}/items", json=some)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "record_too_large")
        assert len((await client.get(f"{CONVERSATIONS}/{id_}/items")).json()["data"]) == 2


async def test_references_to_stored_items_become_those() -> None:
    async with client_of() as client:
        hi = {"role": "user", "content": "Hi"}
        first = (await client.post(CONVERSATIONS, json={"items": [hi]})).json()["id"]
        (item,) = (await client.get(f"{CONVERSATIONS}/{first}/items")).json()["data"]
        named = {"items": [{"type": "item_reference", "id": item["id"]}]}
        second = (await client.post(CONVERSATIONS, json=named)).json()["id"]
        assert (await client.get(f"{CONVERSATIONS}/{second}/items")).json()["data"] == [item]


async def test_references_to_an_id_that_much_else_has_are_cheap() -> None:
    async with client_and_service(answering("Hello")) as (client, service):
        parts = [Part.of(n, "msg_x", {}) for n in range(1000)]

        def add(records: Records) -> None:
            records.add("other", "file", service.store.owner_of(""), {})
            records.append("other", "data", parts)

        await service.store.do(add)
        hi = {"role": "user", "content": "Hi", "id": "msg_x"}
        await client.post(CONVERSATIONS, json={"items": [hi]})
        statements: list[str] = []
        await service.store.do(
            lambda records: records.connection.set_trace_callback(statements.append)
        )
        reference = {"type": "item_reference", "id": "msg_x"}
        answer = await client.post(RESPONSES, json={"input": [reference] * 40})
        assert answer.status_code == 200
        assert len(statements) < 400


@pytest.mark.parametrize("item", [{"type": "item_reference"}, {"role": "user", "content": "Hi"}])
async def test_an_id_of_an_item_is_not_empty(item: dict[str, str]) -> None:
    async with client_of() as client:
        id_ = (await client.post(CONVERSATIONS, json={})).json()["id"]
        for path in (CONVERSATIONS, f"{CONVERSATIONS}/{id_}/items"):
            answer = await client.post(path, json={"items": [{**item, "id": ""}]})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "items[0].id")
        for conversation in ("", {"id": ""}):
            answer = await client.post(
                RESPONSES, json={"input": "Hi", "conversation": conversation}
            )
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "conversation")


async def test_a_reference_that_was_stored_is_left_out() -> None:
    backend, prompts = noting("Fine.")
    async with client_and_service(backend) as (client, service):
        hi = {"role": "user", "content": "Hi"}
        id_ = (await client.post(CONVERSATIONS, json={"items": [hi]})).json()["id"]
        old = {"status": "completed", "type": "item_reference", "id": "msg_none"}  # of an older one
        part = Part.of(1, "msg_none", old)
        await service.store.do(lambda records: records.append(id_, "items", [part]))
        for _ in range(2):
            answer = await client.post(RESPONSES, json={"conversation": id_, "input": "Why?"})
            assert answer.status_code == 200
        assert prompts[-1].count("Why?") == 2


async def test_continued_items_are_counted_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n_read = 0

    def noted(n: int, name: str, body: bytes) -> Part:
        nonlocal n_read
        n_read += len(body)
        return Part(n, name, body)

    async with client_of(answering("Hello"), max_request_memory=2**22) as client:
        id_ = (await client.post(CONVERSATIONS, json={})).json()["id"]
        for _ in range(3):
            items = [{"role": "user", "content": "x" * 2**20}]
            added = await client.post(f"{CONVERSATIONS}/{id_}/items", json={"items": items})
            assert added.status_code == 200
        monkeypatch.setattr(records_module, "Part", noted)
        for fields in ({}, {"background": True}, {"stream": True}):
            body = {"input": "Hi", "conversation": id_, **fields}
            answer = await client.post(RESPONSES, json=body)
            assert (answer.status_code, n_read) == (413, 0)
