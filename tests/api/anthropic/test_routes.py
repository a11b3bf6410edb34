"""Anthropic's routes on the wire: Anthropic's SDK and httpx, over a real socket."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import anthropic
import pydantic
import pytest
import trio

from tests.support.anthropic_api import ASK, WEATHER, post
from tests.support.clients import client_of, named_events_in, use_anthropic
from tests.support.http_server import serving, serving_script, slots_in_use
from tests.support.scripts import HI, TEMPLATE, answering, noting
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.testing import ScriptedBackend


def call(city: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


# -- messages


async def test_a_whole_message() -> None:
    async with client_of(answering("Hello you")) as client:
        answer = await client.post("/v1/messages", json=ASK)
    data = answer.json()
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert data.pop("id").startswith("msg_")
    n_prompt = data["usage"].pop("input_tokens")
    assert n_prompt > 0
    assert data == {
        "type": "message",
        "role": "assistant",
        "model": "scripted",
        "content": [{"type": "text", "text": "Hello you"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 10,
        },
    }


async def test_the_events_of_a_stream() -> None:
    async with client_of(answering("Hey")) as client:
        answer = await client.post("/v1/messages", json=ASK | {"stream": True})
    assert answer.headers["Content-Type"] == "text/event-stream"
    begin, ping, start, *deltas, stop, end, last = named_events_in(answer.text)
    message = begin.pop("message")
    assert begin == {"type": "message_start"}
    assert message.pop("id").startswith("msg_")
    n_prompt = message["usage"]["input_tokens"]
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "scripted",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": n_prompt,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        },
    }
    assert ping == {"type": "ping"}
    block = {"type": "text", "text": ""}
    assert start == {"type": "content_block_start", "index": 0, "content_block": block}
    assert "".join(each["delta"]["text"] for each in deltas) == "Hey"
    assert {each["delta"]["type"] for each in deltas} == {"text_delta"}
    assert stop == {"type": "content_block_stop", "index": 0}
    assert end == {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": {
            "input_tokens": n_prompt,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 4,
        },
    }
    assert last == {"type": "message_stop"}


async def test_a_cached_prompt_is_counted_apart() -> None:
    def use(client: anthropic.Anthropic) -> None:
        first = client.messages.create(**ASK).usage
        second = client.messages.create(**ASK).usage
        with client.messages.stream(**ASK) as stream:
            third = stream.get_final_message().usage
        assert first.cache_read_input_tokens == 0
        assert second.cache_read_input_tokens
        for usage in (second, third):
            assert usage.input_tokens + usage.cache_read_input_tokens == first.input_tokens

    await use_anthropic(answering("Hello you"), use)


ANSWERS = {
    "text": "Hello you",
    "nothing": "",
    "thinking": "<think>\nLet me see.\n</think>\n\nIt rains.",
    "only thinking": "<think>\nLet me see.",
    "a call": call("Paris"),
    "calls": f"<think>\nTwo.\n</think>\n\nWell.\n{call('Paris')}\n{call('Rome')}",
    "text after a call": f"Well.\n{call('Paris')}\nThere.",
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_stream_adds_up_to_the_whole_message(name: str) -> None:
    def use(client: anthropic.Anthropic) -> None:
        for display in ("summarized", "omitted"):
            thinking = {"type": "adaptive", "display": display}
            asked = ASK | {"tools": [WEATHER], "thinking": thinking}
            whole = client.messages.create(**asked)
            with client.messages.stream(**asked) as stream:
                streamed = stream.get_final_message()
            for message in (whole, streamed):
                assert message.id.startswith("msg_")
            assert same(whole) == same(streamed)

    def same(message: Any) -> Any:
        data = message.to_dict(exclude_none=True)
        usage = data["usage"]
        usage["input_tokens"] += usage.pop("cache_read_input_tokens")
        for block in data["content"]:
            if block["type"] == "tool_use":
                assert block.pop("id")
            block.pop("parsed_output", None)
        return {key: value for key, value in data.items() if key != "id"}

    await use_anthropic(answering(ANSWERS[name]), use)


@pytest.mark.parametrize(
    ("text", "fields", "reason", "word"),
    [
        ("Hello you", {}, "end_turn", None),
        ("Hello you", {"stop_sequences": ["x", " y", ""]}, "stop_sequence", " y"),
        ("Hello you", {"max_tokens": 5}, "max_tokens", None),
        (call("Paris"), {"tools": [WEATHER]}, "tool_use", None),
        (call("Paris"), {"tools": [WEATHER], "max_tokens": 70}, "max_tokens", None),
        (call("Paris"), {}, "end_turn", None),
    ],
)
async def test_why_it_stopped(
    text: str, fields: dict[str, Any], reason: str, word: str | None
) -> None:
    def use(client: anthropic.Anthropic) -> None:
        asked = ASK | fields
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        for message in (client.messages.create(**asked), streamed):
            assert message.stop_reason == reason
            assert message.stop_sequence == word

    await use_anthropic(answering(text), use)


async def test_the_context_ends_a_message() -> None:
    backend = ScriptedBackend(lambda prompt: "Hello " * 99, n_ctx=256, chat_template=TEMPLATE)
    data = await post(backend, max_tokens=-1)
    assert data["stop_reason"] == "model_context_window_exceeded"
    assert data["usage"]["input_tokens"] + data["usage"]["output_tokens"] == 256


async def test_no_tokens_only_fill_the_cache() -> None:
    data = await post(answering("Hello"), max_tokens=0)
    assert data["content"] == []
    assert data["stop_reason"] == "max_tokens"
    assert data["usage"]["output_tokens"] == 0


# -- the SDK


async def test_the_sdk() -> None:
    def use(client: anthropic.Anthropic) -> None:
        message = client.messages.create(**ASK, system="Be brief.", metadata={"user_id": "me"})
        assert message.content[0].text == "Hello you"
        text = ""
        for event in client.messages.create(**ASK, stream=True):
            if event.type == "content_block_delta" and event.delta.type == "text_delta":
                text += event.delta.text
        assert text == "Hello you"
        with client.messages.stream(**ASK) as stream:
            assert "".join(stream.text_stream) == "Hello you"
            assert stream.get_final_text() == "Hello you"
            assert stream.request_id
        beta = client.beta.messages.create(**ASK, betas=["context-1m-2025-08-07"])
        assert beta.content[0].text == "Hello you"

    await use_anthropic(answering("Hello you"), use)


async def test_the_sdk_with_thinking() -> None:
    def use(client: anthropic.Anthropic) -> None:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        asked = ASK | {"thinking": thinking, "max_tokens": 2000}
        with client.messages.stream(**asked) as stream:
            heard = "".join(each.thinking for each in stream if each.type == "thinking")
            thought, said = stream.get_final_message().content
        assert heard == thought.thinking == "Let me see."
        assert thought.signature
        assert said.text == "It rains."
        client.messages.create(
            **asked | {"messages": [*HI, {"role": "assistant", "content": [thought, said]}, *HI]}
        )

    await use_anthropic(answering(ANSWERS["thinking"]), use)


async def test_a_loop_of_tools() -> None:
    """The SDK asks, calls, and asks again with the results, until there is an answer."""
    prompts: list[str] = []

    def script(prompt: str) -> str:
        prompts.append(prompt)
        done = "<tool_response>" in prompt
        return "Rain in Paris, sun in Rome." if done else call("Paris") + "\n" + call("Rome")

    def use(client: anthropic.Anthropic) -> None:
        messages: list[Any] = list(HI)
        while True:
            with client.messages.stream(**ASK | {"messages": messages}, tools=[WEATHER]) as stream:
                seen = [each.snapshot for each in stream if each.type == "input_json"]
                message = stream.get_final_message()
            if message.stop_reason != "tool_use":
                break
            assert seen[-1] == {"city": "Rome"}
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": block.input["city"]}
                for block in message.content
            ]
            answer = {"role": "assistant", "content": message.content}
            messages += [answer, {"role": "user", "content": results}]
        assert message.content[0].text == "Rain in Paris, sun in Rome."

    backend = ScriptedBackend(script, n_ctx=4096, chat_template=TEMPLATE)
    await use_anthropic(backend, use)
    assert "<tool_response>\nParis\n" in prompts[-1]
    assert "<tool_response>\nRome\n" in prompts[-1]


class Weather(pydantic.BaseModel):
    city: str
    degrees: int


async def test_an_answer_of_a_given_shape() -> None:
    def use(client: anthropic.Anthropic) -> None:
        message = client.messages.parse(**ASK, output_format=Weather)
        assert message.parsed_output == Weather(city="Paris", degrees=20)
        with client.messages.stream(**ASK, output_format=Weather) as stream:
            assert stream.get_final_message().parsed_output == message.parsed_output

    backend = answering('{"city": "Paris", "degrees": 20}')
    await use_anthropic(backend, use)
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    data = await post(answering('{"a": 1}'), output_format=schema)  # as older clients have it
    assert data["content"] == [{"type": "text", "text": '{"a": 1}'}]


async def test_counting_tokens() -> None:
    asked = {
        "model": "m",
        "messages": [*HI, {"role": "assistant", "content": "Well"}],
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "tools": [WEATHER],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }

    def use(client: anthropic.Anthropic) -> None:
        counted = client.messages.count_tokens(**asked)
        used = client.messages.create(**asked, max_tokens=2000).usage
        assert counted.input_tokens == used.input_tokens

    await use_anthropic(answering("Hello"), use)


async def test_the_bundled_model_thinks_and_calls_as_it_must() -> None:
    city = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    asked = ASK | {
        "extra_body": {"temperature": 0},
        "thinking": {"type": "enabled", "budget_tokens": 3},
        "tools": [WEATHER | {"input_schema": city}, WEATHER | {"name": "time"}],
        "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    }

    def use(url: str) -> None:
        with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as client:
            whole = client.messages.create(**asked)
            with client.messages.stream(**asked) as stream:
                streamed = stream.get_final_message()
        for message in (whole, streamed):
            thought, block = message.content
            assert 0 < len(thought.thinking.split()) <= 3
            assert (block.type, block.name) == ("tool_use", "weather")
            assert block.input["city"] == "Rome"
            assert message.stop_reason == "tool_use"
        assert whole.content[0].thinking == streamed.content[0].thinking
        assert whole.content[1].input == streamed.content[1].input

    await with_bundled(use)


async def with_bundled(use: Callable[[str], None]) -> None:
    app = create_app(Config(parallel=1, ctx_size=2048, threads=1))
    async with serving(app) as url:
        await app.extensions["trioserve"].wait_loaded()
        await trio.to_thread.run_sync(use, url)


async def test_leaving_a_stream_frees_its_slot() -> None:
    backend = answering("x" * 3000)
    backend.on_decode = lambda backend: time.sleep(0.001)

    def use(url: str) -> None:
        with (
            anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as client,
            client.messages.stream(**ASK | {"max_tokens": 3000}) as stream,
        ):
            assert next(stream.text_stream).startswith("x")

    async with serving_script(backend) as (url, service):
        await trio.to_thread.run_sync(use, url)
        with trio.fail_after(60):
            while await slots_in_use(service):
                await trio.lowlevel.checkpoint()


async def test_a_local_page_may_use_the_sdk() -> None:
    """Which sends ``anthropic-version`` and many headers more."""
    async with client_of(answering("Hi")) as client:
        headers = {"Origin": "http://localhost:3000"}
        answer = await client.options("/v1/messages", headers=headers)
    allowed = answer.headers["Access-Control-Allow-Headers"].split(", ")
    assert {"Authorization", "X-Api-Key", "*"} <= set(allowed)
    assert "Request-Id" in answer.headers["Access-Control-Expose-Headers"]


# -- the prompt


async def prompt_of(path: str, body: dict[str, Any]) -> str:
    backend, prompts = noting("Yes")
    async with client_of(backend) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return prompts[-1]


FUNCTION = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather",
        "parameters": WEATHER["input_schema"],
    },
}
CALLED = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {"messages": HI}),
        (
            {"system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            {"messages": [{"role": "system", "content": "Be brief."}, *HI]},
        ),
        (
            {
                "tools": [WEATHER],
                "messages": [
                    *HI,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                            {"type": "text", "text": "Wait."},
                            {"type": "tool_use", "id": "t1", "name": "weather", "input": {}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "t1",
                                "content": [{"type": "text", "text": "Rain"}],
                            },
                            {"type": "text", "text": "And now?"},
                        ],
                    },
                ],
            },
            {
                "tools": [FUNCTION],
                "messages": [
                    *HI,
                    {
                        "role": "assistant",
                        "content": "Wait.",
                        "reasoning_content": "Hm.",
                        "tool_calls": [CALLED],
                    },
                    {"role": "tool", "tool_call_id": "t1", "content": "Rain"},
                    {"role": "user", "content": "And now?"},
                ],
            },
        ),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "none"}},
            {"messages": HI, "tools": [FUNCTION], "tool_choice": "none"},
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2000}},
            {"messages": HI, "chat_template_kwargs": {"enable_thinking": True}},
        ),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
            {"messages": HI, "reasoning_effort": "none"},
        ),
        (
            {"messages": [*HI, {"role": "assistant", "content": "Well, "}]},
            {"messages": [*HI, {"role": "assistant", "content": "Well, "}]},
        ),
    ],
)
async def test_a_prompt_is_that_of_the_same_chat(
    theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    anthropic_prompt = await prompt_of("/v1/messages", ASK | theirs)
    unasked = {"chat_template_kwargs": {"enable_thinking": False}}
    assert anthropic_prompt == await prompt_of("/v1/chat/completions", unasked | ours)


async def test_an_answer_begins_with_text_unless_thinking_is_asked_for() -> None:
    def use(url: str) -> None:
        with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as client:
            message = client.messages.create(**ASK, extra_body={"temperature": 0})
            assert [block.type for block in message.content] == ["text"]

    await with_bundled(use)
