"""Conversations: OpenAI's SDK, their items, and responses that continue them."""

from __future__ import annotations

import openai
import pytest

from tests.support.clients import client_of, use_openai
from tests.support.scripts import noting

CONVERSATIONS = "/v1/conversations"


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
        client.responses.create(model="any", input="Sure?", conversation={"id": made.id})
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
