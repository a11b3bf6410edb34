"""Formats over HTTP: streaming equals not streaming, and all of the message arrives."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

from tests.support.clients import client_and_service, use_openai
from tests.support.message_writers import WRITERS
from tests.support.scripts import HI
from trioserve.chat.formats.syntax import ChatFormat
from trioserve.testing import ScriptedBackend

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": {}}, "required": ["a"]},
        },
    }
]


def gathered(events: list[dict[str, Any]]) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Put a message together from its chunks; returns it, the finish reason and the usage."""
    message: dict[str, Any] = {"role": "", "content": "", "reasoning_content": "", "calls": []}
    finish, usage = "", {}
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            finish = choice["finish_reason"] or finish
            delta = choice["delta"]
            message["role"] += delta.get("role", "")
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                if call["index"] == len(message["calls"]):
                    message["calls"].append([call["function"]["name"], ""])
                message["calls"][call["index"]][1] += call["function"].get("arguments", "")
    return message, finish, usage


@pytest.mark.parametrize(
    ("name", "with_calls"),
    [
        ("hermes-think", True),
        ("glm-4", True),  # the prompt begins the thoughts
        ("plain", True),  # calls that come alone
        ("gigachat-3", True),  # one call at most
        ("harmony", True),  # channels
        ("muse-glimmer", True),
        ("olmo-3", True),  # no marker between calls
        ("lfm2.5-bare", True),
        ("kimi-k3", False),
    ],
)
async def test_streaming_equals_not_streaming(name: str, with_calls: bool) -> None:
    writer = WRITERS[name]
    calls = [("f", {"a": "b c"}), ("f", {"a": 1})][: writer.most] if with_calls else []
    text = writer.write("Hm, a.", "" if writer.bare and calls else "Well, é.", calls)
    backend = ScriptedBackend(lambda prompt: text, n_ctx=8192)
    # Its output ends with the prompt that the format continues.
    template = "{{ messages[0].content }}{% raw %}" + writer.prompt + "{% endraw %}"
    async with client_and_service(backend, chat_template=template) as (client, service):
        use_format(service.server.model.template, writer.format)
        body = {"messages": HI, "tools": TOOLS, "parallel_tool_calls": True}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        whole = answer.json()
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        lines = (await client.post("/v1/chat/completions", json=body)).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    message, finish, usage = gathered(events)
    choice = whole["choices"][0]
    assert message["role"] == choice["message"]["role"] == "assistant"
    assert message["content"] == (choice["message"]["content"] or "")
    assert message["reasoning_content"] == choice["message"].get("reasoning_content", "")
    assert message["calls"] == [
        [call["function"]["name"], call["function"]["arguments"]]
        for call in choice["message"].get("tool_calls", [])
    ]
    assert finish == choice["finish_reason"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == whole["usage"][name]
    if calls and writer.format.tool_calls is not None:
        assert finish == "tool_calls"
        assert [json.loads(arguments) for _, arguments in message["calls"]] == [a for _, a in calls]
    if writer.reasoning:
        assert message["reasoning_content"].strip() == "Hm, a."


def use_format(template: Any, format: ChatFormat) -> None:
    """Have a template's messages read as those of another one."""
    vars(template)["format"] = format


class Answer(pydantic.BaseModel):
    a: int


async def test_the_sdk_reads_an_answer_of_a_given_shape() -> None:
    def use(client: openai.OpenAI) -> None:
        done = client.chat.completions.parse(
            model="m",
            messages=[{"role": "user", "content": "go"}],
            response_format=Answer,
        )
        assert done.choices[0].message.parsed == Answer(a=1)

    await use_openai(ScriptedBackend(lambda prompt: '{"a": 1}', n_ctx=4096), use)
