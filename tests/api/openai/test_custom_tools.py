"""Custom tools in chats: the model calls a function with one text, the client sees the text."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.support.clients import client_of, events_in, use_openai
from tests.support.custom_tools import PATCH
from tests.support.scripts import HI, answering
from tests.support.tool_calls import calls
from trioserve.api.base.chat_request import ChatRequest
from trioserve.errors import InvalidRequestError
from trioserve.testing import ScriptedBackend

SAY: dict[str, Any] = {"type": "custom", "custom": {"name": "say", "description": "Says it."}}


def backend() -> ScriptedBackend:
    return answering(calls(("say", {"input": PATCH})))


async def test_a_call_has_the_text() -> None:
    async with client_of(backend()) as client:
        body = {"messages": HI, "tools": [SAY]}
        choice = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert call.pop("id")
        assert call == {"type": "custom", "custom": {"name": "say", "input": PATCH}}
        answer = await client.post("/v1/chat/completions", json={**body, "stream": True})
        deltas = [event["choices"][0]["delta"] for event in events_in(answer.text)]
        calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
        assert (calls[0]["type"], calls[0]["custom"]["name"]) == ("custom", "say")
        assert "".join(one["custom"]["input"] for one in calls) == PATCH


async def test_openai_s_sdk_calls_a_custom_tool_and_sends_its_result() -> None:
    def use(client: openai.OpenAI) -> None:
        tools: Any = [SAY]
        answer = client.chat.completions.create(model="m", messages=HI, tools=tools)
        message = answer.choices[0].message
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert call.type == "custom" and call.custom.input == PATCH
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        messages: Any = [*HI, message.to_dict(), result]
        again = client.chat.completions.create(
            model="m",
            messages=messages,
            tools=tools,
            tool_choice={"type": "custom", "custom": {"name": "say"}},
        )
        assert again.choices[0].finish_reason == "tool_calls"

    await use_openai(backend(), use)


@pytest.mark.parametrize(("syntax", "definition"), [("regex", "[ab]+"), ("lark", "start: /[ab]+/")])
def test_the_text_follows_a_grammar(syntax: str, definition: str) -> None:
    format = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    tool = {"type": "custom", "custom": {**SAY["custom"], "format": format}}
    request = ChatRequest.parse({"messages": HI, "tools": [tool]})
    function = request.tools[0]["function"]
    assert "[ab]+" in function["parameters"]["properties"]["input"]["pattern"]
    assert definition in function["description"]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom"}, "tools[0].custom"),
        ({"type": "custom", "custom": {}}, "tools[0].custom.name"),
        ({"type": "custom", "custom": {"name": "f", "format": 5}}, "tools[0].custom.format"),
        (
            {"type": "custom", "custom": {"name": "f", "format": {"type": "json"}}},
            "tools[0].custom.format.type",
        ),
        (
            {
                "type": "custom",
                "custom": {
                    "name": "f",
                    "format": {"type": "grammar", "grammar": {"syntax": "ebnf", "definition": ""}},
                },
            },
            "tools[0].custom.format.grammar.syntax",
        ),
    ],
)
def test_a_malformed_tool(tool: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatRequest.parse({"messages": HI, "tools": [tool]})
    assert caught.value.param == param


def test_a_malformed_call() -> None:
    call = {"id": "1", "type": "custom", "custom": {"name": "say"}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(InvalidRequestError) as caught:
        ChatRequest.parse({"messages": messages})
    assert caught.value.param == "messages[1].tool_calls[0].custom.input"


def test_runs_take_no_custom_tools() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatRequest.parse(
            {"messages": HI, "tools": [SAY], "trioserve_run_tools": True, "stream": True}
        )
    assert caught.value.param == "tools"
