"""Stored chats: OpenAI's SDK, streams that are stored whole, and what cannot be stored."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.support.clients import client_and_service, client_of, events_in, use_openai
from tests.support.scripts import HI, answering
from tests.support.served_tools import client_of_tools
from tests.support.tool_calls import FakeTool, calls, saying
from tests.support.waiting import until
from trioserve.api.stored.listing import Page
from trioserve.api.stored.shelf import Shelf
from trioserve.errors import StoreError
from trioserve.store import Record, Store

PATH = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def test_the_sdk_stores_chats() -> None:
    parts: list[Any] = [{"type": "text", "text": "Hi"}]
    asked: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": parts},
    ]

    def use(client: openai.OpenAI) -> None:
        chats = client.chat.completions
        first = chats.create(model="m", messages=asked, store=True, metadata={"a": "1", "b": "2"})
        second = chats.create(model="m", messages=asked, store=True)
        chats.create(model="m", messages=asked)
        chats.create(model="m", messages=asked, store=False)
        assert [each.id for each in chats.list()] == [first.id, second.id]
        assert [each.id for each in chats.list(order="desc", limit=1)] == [second.id, first.id]
        assert [each.id for each in chats.list(metadata={"a": "1"})] == [first.id]
        assert [*chats.list(metadata={"a": "2"})] == [*chats.list(model="other")] == []
        found = chats.retrieve(first.id)
        assert found.to_dict() == first.to_dict() | {"metadata": {"a": "1", "b": "2"}}
        changed = chats.update(first.id, metadata={"c": "3"})
        assert changed.to_dict()["metadata"] == {"c": "3"} and changed.choices == first.choices
        system, user = chats.messages.list(first.id)
        assert (system.to_dict()["role"], system.content) == ("system", "Be brief.")
        assert user.content is None and user.to_dict()["content_parts"] == parts
        assert [each.id for each in chats.messages.list(first.id, after=system.id)] == [user.id]
        assert chats.delete(first.id).object == "chat.completion.deleted"
        for gone in (chats.retrieve, chats.delete, chats.messages.list):
            with pytest.raises(openai.NotFoundError):
                gone(first.id)

    await use_openai(answering("Hello"), use)


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ("Hello", {}),
        ("Hello", {"n": 3, "stream_options": {"include_usage": True}}),
        ("Hello", {"logprobs": True, "top_logprobs": 2}),
        (calls(("f", {"a": 1}), ("f", {"a": 2})), {"tools": [TOOL]}),
        ("", {}),
        ("x", {"messages": [*HI, {"role": "assistant", "content": "So "}]}),
    ],
)
async def test_a_stream_is_stored_as_a_whole_chat_is(said: str, fields: dict[str, Any]) -> None:
    async with client_of(answering(said)) as client:
        asked = {"messages": HI, "store": True, "seed": 1, **fields}
        stream = await client.post(PATH, json=asked | {"stream": True})
        (chunk, *_) = events_in(stream.text)
        whole = (await client.post(PATH, json=asked)).json()
        stored = [(await client.get(f"{PATH}/{id_}")).json() for id_ in (chunk["id"], whole["id"])]
        assert {**stored[1], "metadata": {}} == whole | {"metadata": {}}
        for each in stored:
            for name in ("id", "created", "timings"):
                del each[name]
            del each["usage"]["prompt_tokens_details"]  # of what was in the cache
            for choice in each["choices"]:
                for call in choice["message"].get("tool_calls", ()):
                    del call["id"]
        assert stored[0] == stored[1]


async def test_a_run_of_tools_is_stored() -> None:
    backend, _ = saying([calls(("work", {})), "Done."] * 2)
    async with client_of_tools(backend, FakeTool()) as (client, _):
        asked = {"messages": HI, "store": True, "trioserve_run_tools": True}
        whole = (await client.post(PATH, json=asked)).json()
        stream = await client.post(PATH, json=asked | {"stream": True})
        (chunk, *_) = events_in(stream.text)
        found = [(await client.get(f"{PATH}/{id_}")).json() for id_ in (whole["id"], chunk["id"])]
        for each in found:
            assert each["choices"][0]["message"]["content"] == "Done."
            assert len(each["trioserve_messages"]) == 3


async def test_a_chat_that_cannot_be_stored_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*args: Any, **kwargs: Any) -> None:
        raise StoreError("The disk is full.")

    async with client_and_service(answering("Hello")) as (client, _):
        for fields, param in (({"store": "yes"}, "store"), ({"metadata": {"a": 1}}, "metadata")):
            answer = await client.post(PATH, json={"messages": HI, "store": True, **fields})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        id_ = (await client.post(PATH, json={"messages": HI, "store": True})).json()["id"]
        for change, status in (({}, 400), ({"metadata": 1}, 400), ({"metadata": None}, 200)):
            answer = await client.post(f"{PATH}/{id_}", json=change)
            assert answer.status_code == status
        monkeypatch.setattr(Store, "add", broken)
        asked = {"messages": HI, "store": True}
        assert (await client.post(PATH, json=asked)).status_code == 503
        stream = (await client.post(PATH, json=asked | {"stream": True})).text
        *_, last = events_in(stream, done=False)
        assert last["error"]["code"] == "store_failed" and "[DONE]" not in stream
        # A chat that need not be stored is answered.
        assert (await client.post(PATH, json=asked | {"store": False})).status_code == 200


async def test_candidates_that_are_kept_count_as_memory() -> None:
    backend = answering("x" * 2000, n_ctx=2**13, n_ctx_seq=2**13)
    async with client_and_service(backend, max_request_memory=2**20) as (client, service):
        asked = {"messages": HI, "store": True, "stream": True, "logprobs": True}
        stream = (await client.post(PATH, json=asked | {"top_logprobs": 20})).text
        *_, last = events_in(stream, done=False)
        assert last["error"]["type"] in ("invalid_request_error", "unavailable_error"), last
        assert (await client.get(PATH)).json()["data"] == []
        await until(lambda: service.memory.n_held == 0)


async def test_a_list_leaves_out_chats_deleted_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Page.found

    async def deleting(page: Page, shelf: Shelf, *more: Any) -> tuple[list[Record], bool]:
        records, has_more = await found(page, shelf, *more)
        await shelf.store.delete(records[0].id)
        return records, has_more

    async with client_of(answering("Hello")) as client:
        body = {"messages": HI, "store": True}
        ids = [(await client.post(PATH, json=body)).json()["id"] for _ in range(3)]
        monkeypatch.setattr(Page, "found", deleting)
        listed = await client.get(PATH)
    assert [each["id"] for each in listed.json()["data"]] == ids[1:]
