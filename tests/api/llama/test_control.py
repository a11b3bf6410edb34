"""Reasoning over HTTP: budgets, formats, the control of running answers. Scripted."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.support.clients import client_and_service
from tests.support.http_server import slots_in_use
from tests.support.scripts import HI, TEMPLATE
from trioserve.testing import ScriptedBackend

CONTROL = "/v1/chat/completions/control"


def thinking(text: str, **settings: Any) -> ScriptedBackend:
    return ScriptedBackend(lambda _: text, n_ctx=8192, chat_template=TEMPLATE, **settings)


async def answer(client: httpx.AsyncClient, fields: dict[str, Any]) -> Any:
    response = await client.post("/v1/chat/completions", json={"messages": HI, **fields})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


@asynccontextmanager
async def streamed(client: httpx.AsyncClient, **fields: Any) -> AsyncIterator[AsyncIterator[Any]]:
    """Stream an answer; gives its chunks."""

    async def chunks(response: httpx.Response) -> AsyncGenerator[Any, None]:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))

    body = {"messages": HI, "stream": True, **fields}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        async with aclosing(chunks(response)) as source:
            yield source


def joined(chunks: list[Any], field: str) -> str:
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk.get("choices")]
    return "".join(delta.get(field) or "" for delta in deltas)


# -- budgets

LONG = "<think>One. Two. Three.</think>Four."


@pytest.mark.parametrize(
    ("settings", "requests"),
    [
        (
            {},
            [
                ({}, "One. Two. Three."),
                ({"thinking_budget_tokens": 4}, "One."),
                ({"thinking_budget_tokens": 9, "reasoning_budget_tokens": 4}, "One."),
            ],
        ),
        ({"reasoning_budget": 1}, [({"reasoning_budget_tokens": 4}, "One.")]),
        ({"reasoning_budget": 4}, [({"reasoning_budget_tokens": -1}, "One.")]),
        ({"reasoning_budget": 0}, [({}, None)]),
        (
            {"reasoning_budget": 4, "reasoning_budget_message": " Well."},
            [({}, "One. Well."), ({"reasoning_budget_message": " So."}, "One. So.")],
        ),
    ],
)
async def test_a_budget_ends_reasoning(
    settings: dict[str, Any], requests: list[tuple[dict[str, Any], str | None]]
) -> None:
    async with client_and_service(thinking(LONG), **settings) as (client, _):
        for fields, reasoning in requests:
            message = await answer(client, fields)
            assert message.get("reasoning_content") == reasoning
            # The script continues its answer.
            said = (reasoning or "").removesuffix(" Well.").removesuffix(" So.")
            rest = "One. Two. Three."[len(said) :]
            assert message["content"] == (f"{rest}</think>Four." if rest else "Four.")


@pytest.mark.parametrize(
    ("format_", "requests"),
    [
        ("auto", [({}, "Four.")]),
        ("none", [({}, LONG), ({"reasoning_format": "deepseek"}, "Four.")]),
        ("deepseek-legacy", [({}, LONG)]),
    ],
)
async def test_the_format_of_the_server(
    format_: str, requests: list[tuple[dict[str, Any], str]]
) -> None:
    async with client_and_service(thinking(LONG), reasoning_format=format_) as (client, _):
        for fields, content in requests:
            assert (await answer(client, fields))["content"] == content


# -- variables of the template

ASKED = "First think between <think> and </think>, then answer."


@pytest.mark.parametrize(
    ("settings", "requests"),
    [
        ({}, [({}, True), ({"enable_thinking": False}, False)]),
        ({"reasoning": "on"}, [({}, True)]),
        ({"reasoning": "off"}, [({}, False), ({"enable_thinking": True}, True)]),
        ({"chat_template_kwargs": '{"enable_thinking": false}'}, [({}, False)]),
    ],
)
async def test_whether_the_model_is_to_think(
    settings: dict[str, Any], requests: list[tuple[dict[str, Any], bool]]
) -> None:
    async with client_and_service(thinking("x"), **settings) as (client, _):
        for fields, thinks in requests:
            body = {"messages": HI, "chat_template_kwargs": fields}
            response = await client.post("/apply-template", json=body)
            assert (ASKED in response.json()["prompt"]) == thinks


async def test_a_last_message_of_the_assistants_can_be_one_like_any_other() -> None:
    body = {"messages": [*HI, {"role": "assistant", "content": "Yo"}]}
    async with client_and_service(thinking("x"), prefill_assistant=False) as (client, _):
        whole = (await client.post("/apply-template", json=body)).json()["prompt"]
        body["continue_final_message"] = True  # type: ignore[assignment]
        begun = (await client.post("/apply-template", json=body)).json()["prompt"]
    assert whole.endswith("Yo<|im_end|>\n<|im_start|>assistant\n")
    assert begun.endswith("Yo")


# -- structured output

OBJECT = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize("text", ['{"a": 1}', '<think>Hm {</think>{"a": 1}'])
async def test_structured_output_comes_after_reasoning(text: str) -> None:
    async with client_and_service(thinking(text)) as (client, _):
        message = await answer(client, OBJECT)
    assert json.loads(message["content"]) == {"a": 1}


async def test_in_the_format_none_all_of_it_is_structured() -> None:
    async with client_and_service(thinking('<think>Hm</think>{"a": 1}')) as (client, _):
        body = {"messages": HI, "reasoning_format": "none", **OBJECT}
        response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 500  # the script does not follow the grammar


# -- control

#: Long enough for an order to come while it is said, and a text that comes only after the order.
ENDLESS = "<think>" + "m" * 7000
ORDERED = {"reasoning_control": True, "stop": ["mmm"]}


async def control(client: httpx.AsyncClient, **body: Any) -> Any:
    response = await client.post(CONTROL, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def drained(client: httpx.AsyncClient, id_: str, chunks: AsyncIterator[Any]) -> Any:
    """Cancel an answer; gives the last chunk."""
    assert await control(client, id=id_, action="cancel") == {"success": True}
    return [chunk async for chunk in chunks][-1]


@pytest.mark.parametrize("n", [1, 2])
async def test_reasoning_is_ended(n: int) -> None:
    async with (
        client_and_service(thinking(ENDLESS)) as (client, _),
        streamed(client, n=n, **ORDERED) as chunks,
    ):
        first = await anext(chunks)
        done = await control(client, id=first["id"], action="reasoning_end")
        rest = [chunk async for chunk in chunks]
    assert done == {"success": True}
    assert set(joined(rest, "reasoning_content")) <= {"m"}
    choices = [chunk["choices"][0] for chunk in rest]
    ends = {c["index"]: c["finish_reason"] for c in choices if c["finish_reason"]}
    assert ends == dict.fromkeys(range(n), "stop")


async def test_it_has_to_be_allowed_but_for_a_cancel() -> None:
    refused = {"success": False, "message": "reasoning control not enabled for this completion"}
    async with client_and_service(thinking(ENDLESS)) as (client, service):
        async with streamed(client) as chunks:
            first = await anext(chunks)
            assert await control(client, id=first["id"], action="reasoning_end") == refused
            last = await drained(client, first["id"], chunks)
        assert last["error"]["message"] == "The request was cancelled."
        assert await slots_in_use(service) == 0
    plain = ScriptedBackend(lambda _: "x" * 4000, n_ctx=8192)  # no reasoning in its template
    async with (
        client_and_service(plain) as (client, _),
        streamed(client, reasoning_control=True) as chunks,
    ):
        first = await anext(chunks)
        assert await control(client, id=first["id"], action="reasoning_end") == refused
        await drained(client, first["id"], chunks)


async def test_a_completion_that_has_ended_is_not_found() -> None:
    gone = {"success": False, "message": "no active completion for this id"}
    async with client_and_service(thinking("Yo")) as (client, _):
        async with streamed(client, reasoning_control=True) as chunks:
            ids = {chunk["id"] async for chunk in chunks}
        (id_,) = ids
        for action in ("reasoning_end", "cancel"):
            assert await control(client, id=id_, action=action) == gone
            assert await control(client, id="chatcmpl-x", action=action) == gone


async def test_a_wrong_order_is_refused() -> None:
    orders: list[tuple[dict[str, Any], str]] = [
        ({}, "missing completion id"),
        ({"id": ""}, "missing completion id"),
        ({"id": "chatcmpl-x"}, "unknown control action"),
        ({"id": "chatcmpl-x", "action": "pause"}, "unknown control action"),
        ({"id": 5, "action": "cancel"}, "'id' must be a string."),
    ]
    async with client_and_service(thinking("x")) as (client, _):
        for body, message in orders:
            response = await client.post(CONTROL, json=body)
            assert response.status_code == 400
            assert response.json()["error"]["message"] == message
            assert response.json()["error"]["type"] == "invalid_request_error"
