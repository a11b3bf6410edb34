"""Thinking is switched on, off, up and down by the fields of all APIs, on all routes for chats."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.clients import client_of
from tests.support.scripts import HI, answering, noting
from trioserve.api.anthropic.request import BUDGET_TOKENS, MessagesRequest
from trioserve.api.base.chat_request import ChatRequest

#: The routes: a body, and where the text and the reasoning are in the answer.
ROUTES: dict[str, tuple[dict[str, Any], Any]] = {
    "/v1/chat/completions": (
        {"messages": HI},
        lambda a: (
            a["choices"][0]["message"]["content"],
            a["choices"][0]["message"].get("reasoning_content"),
        ),
    ),
    "/v1/responses": (
        {"input": "Hi"},
        lambda a: tuple(
            next((i["content"][0]["text"] for i in a["output"] if i["type"] == kind), None)
            for kind in ("message", "reasoning")
        ),
    ),
    "/v1/messages": (
        {"messages": HI, "max_tokens": 200},
        lambda a: tuple(
            next((b[kind] for b in a["content"] if b["type"] == kind), None)
            for kind in ("text", "thinking")
        ),
    ),
    "/api/chat": (
        {"messages": HI, "stream": False},
        lambda a: (a["message"]["content"], a["message"].get("thinking")),
    ),
    "/api/generate": (
        {"prompt": "Hi", "stream": False},
        lambda a: (a["response"], a.get("thinking")),
    ),
}


async def answered(client: httpx.AsyncClient, path: str, fields: dict[str, Any]) -> Any:
    """Ask on a route; gives the text and the reasoning."""
    body, read = ROUTES[path]
    response = await client.post(path, json=body | fields)
    assert response.status_code == 200, response.text
    return read(response.json())


#: A template with a switch and an effort.
SWITCHED = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "|{{ enable_thinking }}|{{ reasoning_effort }}<think>"
    "{{ '' if enable_thinking else '</think>' }}"
)

ON, OFF = {"type": "enabled"}, {"type": "disabled"}


@pytest.mark.parametrize(
    ("fields", "thinks", "effort"),
    [
        ({"thinking": ON}, True, ""),
        ({"thinking": OFF}, False, ""),
        ({"thinking": {"type": "adaptive"}}, True, ""),
        ({"enable_thinking": True}, True, ""),
        ({"enable_thinking": False}, False, ""),
        ({"think": True}, True, ""),
        ({"think": False}, False, ""),
        ({"think": "high"}, True, "high"),
        ({"reasoning": {"enabled": False}}, False, ""),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, True, "low"),
        ({"reasoning": {"effort": "none"}}, False, ""),
        ({"reasoning_effort": "low"}, True, "low"),
        ({"reasoning_effort": "none"}, False, ""),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, ""),
        ({"chat_template_kwargs": {"thinking": False}}, False, ""),
        ({"chat_template_kwargs": {"reasoning_effort": "none"}}, False, ""),
        # contradictions, in the order of docs/reasoning.md
        ({"thinking": OFF, "enable_thinking": True}, False, ""),
        ({"enable_thinking": True, "think": False}, True, ""),
        ({"think": False, "reasoning": {"enabled": True}}, False, ""),
        ({"think": True, "reasoning_effort": "none"}, True, ""),
        ({"enable_thinking": False, "reasoning_effort": "high"}, False, "high"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            False,
            "",
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            False,
            "low",
        ),
        ({"thinking": ON, "chat_template_kwargs": {"thinking": False}}, True, ""),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, True, "low"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            True,
            "low",
        ),
    ],
    ids=str,
)
async def test_each_field_has_the_effect_of_the_others(
    fields: dict[str, Any], thinks: bool, effort: str
) -> None:
    backend, prompts = noting("Yes", chat_template=SWITCHED)
    async with client_of(backend) as client:
        for path in ROUTES:
            await answered(client, path, fields)
    told = f"Hi|{thinks}|{effort}<think>{'' if thinks else '</think>'}"
    assert prompts == [told] * len(ROUTES)


async def test_where_no_field_says_the_api_and_the_flags_do() -> None:
    for flags, thinks in (({}, True), ({"reasoning": "off"}, False)):
        backend, prompts = noting("Yes", chat_template=SWITCHED)
        async with client_of(backend, **flags) as client:
            for path in ROUTES:
                await answered(client, path, {})
        told = {path: p.split("|")[1] == "True" for path, p in zip(ROUTES, prompts, strict=True)}
        assert told == {path: thinks and path != "/v1/messages" for path in ROUTES}


# -- templates without a switch

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"

NO_SWITCH = {
    "begun": PLAIN + "</think><think>\n",
    "may begin": PLAIN + "{# <think> </think> #}",
    "channels": PLAIN + "{# <|channel|><|message|> #}<|start|>assistant",
}

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def grammars(path: str) -> list[dict[str, Any]]:
    if path.startswith("/api"):
        return [{}, {"format": "json"}, {"format": SCHEMA}]
    if path == "/v1/messages":
        return [{}, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}]
    if path == "/v1/responses":
        return [{}, {"text": {"format": {"type": "json_object"}}}]
    return [
        {},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"guided_choice": ['{"a":1}', "no"]},
        {"structured_outputs": {"choice": ['{"a":1}', "no"]}},
    ]


@pytest.mark.parametrize("name", NO_SWITCH)
async def test_without_a_switch_the_answer_comes_at_once(name: str) -> None:
    async with client_of(answering('{"a":1}', chat_template=NO_SWITCH[name])) as client:
        for path in ROUTES:
            for fields in grammars(path):
                said = await answered(client, path, fields | {"enable_thinking": False})
                assert said == ('{"a":1}', None), (path, fields)
    if name != "begun":
        return
    async with client_of(
        answering('{"a":1}', chat_template=NO_SWITCH[name]), reasoning="off"
    ) as client:
        for fields in grammars("/v1/chat/completions"):
            assert await answered(client, "/v1/chat/completions", fields) == ('{"a":1}', None)


async def test_a_format_without_reasoning_answers_at_once_in_its_channel() -> None:
    backend = answering('{"a":1}', chat_template=PLAIN + "{# >>>all #}>>>")
    async with client_of(backend) as client:
        for fields in grammars("/v1/chat/completions")[1:]:
            assert await answered(client, "/v1/chat/completions", fields) == ('{"a":1}', None)


async def test_reasoning_that_begins_anyway_ends_at_once() -> None:
    backend = answering("<think>Yes", chat_template=NO_SWITCH["may begin"])
    async with client_of(backend, reasoning_budget_message="Well") as client:
        for path in ROUTES:
            assert await answered(client, path, {"enable_thinking": False}) == ("Yes", None)


async def test_reasoning_that_the_client_has_begun_goes_on() -> None:
    backend = answering("see.</think>Yes", chat_template=NO_SWITCH["begun"])
    begun = [*HI, {"role": "assistant", "content": "", "reasoning_content": "I "}]
    fields = {"messages": begun, "enable_thinking": False}
    async with client_of(backend) as client:
        said = await answered(client, "/v1/chat/completions", fields)
    assert said == ("Yes", "I see.")


# -- the budget, and what the client sees


def test_the_budget() -> None:
    def of_chat(**fields: Any) -> int:
        return ChatRequest.parse({"messages": HI, **fields}).chat_params.reasoning_budget

    def of_messages(**fields: Any) -> int:
        return MessagesRequest.parse({"messages": HI, **fields}).chat_params.reasoning_budget

    for budget in (of_chat, of_messages):
        assert budget() == budget(thinking=OFF) == -1
        assert budget(thinking={**ON, "budget_tokens": 5}) == 5
        assert budget(reasoning={"max_tokens": 6}) == budget(thinking_budget_tokens=6) == 6
        assert budget(reasoning_budget_tokens=7, thinking={**ON, "budget_tokens": 5}) == 7
    assert (of_chat(thinking=ON), of_messages(thinking=ON)) == (-1, BUDGET_TOKENS)


async def test_reasoning_is_not_shown() -> None:
    backend = answering("<think>\nHm\n</think>\n\nYes", chat_template=NO_SWITCH["may begin"])
    async with client_of(backend) as client:
        for path in ROUTES:
            for hidden in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
                fields = {"enable_thinking": True, **hidden}
                assert await answered(client, path, fields) == ("Yes", None)
            assert await answered(client, path, {"enable_thinking": True}) == ("Yes", "Hm")
