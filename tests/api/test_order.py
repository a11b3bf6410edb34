"""Text, thinking and calls in one answer: every API keeps their order, streamed and whole."""

from __future__ import annotations

import json
from itertools import groupby
from operator import itemgetter
from typing import Any

import pytest

from tests.support import families
from tests.support.clients import client_of, events_in, named_events_in
from tests.support.ollama_api import lines_in
from tests.support.parsing import deltas_of
from tests.support.scripts import HI, answering
from trioserve.api.ollama.events import OllamaChat, OllamaEvents, Writer
from trioserve.server.stream import ChatChunk

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": NUMBER}}\n</tool_call>'
ONE, TWO = (CALL.replace("NUMBER", number) for number in "12")
SAID = (
    f"<think>\nHm.\n{ONE}\nSo.\n</think>\n\nFirst.\n<think>\nNo.\n</think>\nThen.\n\n"
    f"{TWO}\n<think>Well.</think>\n\nDone."
)
PARTS = [
    *(("thinking", "Hm."), ("call", '{"a": 1}'), ("thinking", "So."), ("text", "First.\n")),
    *(("thinking", "No."), ("text", "Then."), ("call", '{"a": 2}'), ("thinking", "Well.")),
    ("text", "Done."),
]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "f", "parameters": PARAMETERS}


def joined(parts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Join neighbours of one kind."""
    return [
        (kind, "".join(map(itemgetter(1), each))) for kind, each in groupby(parts, itemgetter(0))
    ]


def whole(kind: str) -> Any:
    texts = [text for each, text in PARTS if each == kind]
    return texts if kind == "call" else "".join(texts)


async def post(path: str, body: dict[str, Any], **config: Any) -> Any:
    async with client_of(answering(SAID), **config) as client:
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer


OPENAI = {"messages": HI, "tools": [{"type": "function", "function": FUNCTION}]}


async def test_openai_streams() -> None:
    answer = await post("/v1/chat/completions", {**OPENAI, "stream": True})
    parts = []
    for event in events_in(answer.text):
        for choice in event["choices"]:
            delta = choice["delta"]
            for call in delta.get("tool_calls", []):
                parts.append(("call", call["function"]["arguments"]))
            fields = {"thinking": "reasoning_content", "text": "content"}
            parts += [(kind, delta[name]) for kind, name in fields.items() if delta.get(name)]
    assert joined(parts) == PARTS


async def test_openai() -> None:
    (choice,) = (await post("/v1/chat/completions", OPENAI)).json()["choices"]
    message = choice["message"]
    assert message["content"] == whole("text")
    assert message["reasoning_content"] == whole("thinking")
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == whole("call")
    assert choice["finish_reason"] == "tool_calls"


def item(value: dict[str, Any]) -> tuple[str, str]:
    if value["type"] == "function_call":
        return "call", value["arguments"]
    kind = {"reasoning": "thinking", "message": "text"}[value["type"]]
    return kind, "".join(part["text"] for part in value["content"])


@pytest.mark.parametrize("stream", [False, True])
async def test_items_of_responses(stream: bool) -> None:
    body = {"input": "Hi", "tools": [{"type": "function", **FUNCTION}], "stream": stream}
    answer = await post("/v1/responses", body)
    if not stream:
        assert [item(each) for each in answer.json()["output"]] == PARTS
        return
    events = named_events_in(answer.text)
    done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    assert [item(each) for each in done] == PARTS
    assert [item(each) for each in events[-1]["response"]["output"]] == PARTS


@pytest.mark.parametrize("stream", [False, True])
async def test_blocks_of_anthropic(stream: bool) -> None:
    tools = [{"name": "f", "input_schema": PARAMETERS}]
    body = {"messages": HI, "tools": tools, "max_tokens": 999, "stream": stream}
    body["thinking"] = {"type": "adaptive"}
    answer = await post("/v1/messages", body)
    names = {"text": "text", "thinking": "thinking", "tool_use": "call"}
    if not stream:
        blocks = answer.json()["content"]
        found = [
            (
                names[each["type"]],
                json.dumps(each["input"]) if "input" in each else each[each["type"]],
            )
            for each in blocks
        ]
        assert found == PARTS
        return
    kinds, parts = {}, []
    for event in named_events_in(answer.text):
        if event["type"] == "content_block_start":
            kinds[event["index"]] = names[event["content_block"]["type"]]
        elif event["type"] == "content_block_delta":
            kind, piece = event["delta"].values()
            if kind != "signature_delta":
                parts.append((event["index"], kinds[event["index"]], piece))
    assert [
        (kind, "".join(map(itemgetter(2), each)))
        for (_, kind), each in groupby(parts, itemgetter(0, 1))
    ] == PARTS


def ollama_parts(text: str) -> list[tuple[str, str]]:
    parts = []
    for line in lines_in(text):
        message = line["message"]
        fields = {"thinking": "thinking", "text": "content"}
        parts += [(kind, message[name]) for kind, name in fields.items() if message.get(name)]
        for call in message.get("tool_calls", []):
            parts.append(("call", json.dumps(call["function"]["arguments"])))
    return joined(parts)


async def test_ollama_streams() -> None:
    body = {"model": "m", **OPENAI, "stream": True}
    assert ollama_parts((await post("/api/chat", body)).text) == PARTS


def test_one_event_of_ollama_keeps_the_order() -> None:
    deltas = deltas_of([SAID], families.HERMES_THINK)
    events = OllamaEvents(Writer(model="m", kind=OllamaChat))
    assert ollama_parts(events.encode(0, ChatChunk(tuple(deltas), ())).decode()) == PARTS


async def test_ollama() -> None:
    message = (await post("/api/chat", {"model": "m", **OPENAI, "stream": False})).json()["message"]
    assert (message["content"], message["thinking"]) == (whole("text"), whole("thinking"))
    calls = [json.dumps(call["function"]["arguments"]) for call in message["tool_calls"]]
    assert calls == whole("call")


FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_gpt_oss_says_before_an_answer_in_json(stream: bool) -> None:
    said = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>Look:<|end|><|start|>assistant"
        '<|channel|>final<|message|>{"a": 1}'
    )
    template = "{{ messages[0].content }}{# <|channel|><|message|> #}<|start|>assistant"
    async with client_of(answering(said, chat_template=template)) as client:
        body = {"messages": HI, "response_format": FORMAT, "stream": stream}
        answer = await client.post("/v1/chat/completions", json=body)
    if stream:
        choices = [each for event in events_in(answer.text) for each in event["choices"]]
        messages = [each["delta"] for each in choices]
    else:
        messages = [answer.json()["choices"][0]["message"]]
    names = ("content", "reasoning_content")
    joined = ["".join(each.get(name) or "" for each in messages) for name in names]
    assert joined == ['{"a": 1}', "Hm.Look:"]


THOUGHT = "<think>\nA.\n\nB Observation:\n</think>\n\nOne."
STOPS = ["\n\n", "Observation:", "</think>", "Z"]


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_count_in_the_answer(stream: bool) -> None:
    ask = {"model": "m", "messages": HI, "stream": stream}
    said = f"{THOUGHT}\n<think>\nC.\n\nD.</think>Two Z Three"
    async with client_of(answering(said)) as client:
        openai = await client.post("/v1/chat/completions", json={**ask, "stop": STOPS})
        thinks = {"max_tokens": 99, "thinking": {"type": "adaptive"}}
        claude = await client.post("/v1/messages", json={**ask, **thinks, "stop_sequences": STOPS})
        ollama = await client.post("/api/chat", json={**ask, "options": {"stop": STOPS}})
        raw = {**ask, "stop": STOPS, "reasoning_format": "none"}
        whole = await client.post("/v1/chat/completions", json=raw)
    for answer in (openai, claude, ollama):
        assert "Two" in answer.text and "Three" not in answer.text, answer.text
    assert '"stop_sequence": "Z"' in claude.text or '"stop_sequence":"Z"' in claude.text
    assert "B Observation" not in whole.text  # there is nothing but an answer


async def test_stop_strings_count_in_the_final_channel() -> None:
    said = (
        "<|channel|>analysis<|message|>A.\n\nB.<|end|><|start|>assistant"
        "<|channel|>final<|message|>One.\n\nTwo."
    )
    template = "{{ messages[0].content }}{# <|channel|><|message|> #}<|start|>assistant"
    async with client_of(answering(said, chat_template=template)) as client:
        body = {"messages": HI, "stop": ["\n\n", "final", "assistant"]}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("One.", "A.\n\nB.")
