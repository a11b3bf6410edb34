"""Choices of tools (required, auto, none): the bundled model through the server and the SDK."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import trio

from tests.support.http_server import serving, serving_script
from tests.support.scripts import HI
from trioserve.app import create_app
from trioserve.chat.deltas import Delta, Message, MessageBuilder, ToolCallStart
from trioserve.chat.params import ToolChoice
from trioserve.config import Config
from trioserve.server import Server
from trioserve.server.stream import ChatChunk
from trioserve.testing import ScriptedBackend
from trioserve.types import FinishReason, Grammar

RAIN = [{"role": "user", "content": "What is the weather in Paris?"}]


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def strict(name: str, parameters: Any) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


WEATHER = tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
    },
)
TIME = tool(
    "get_time",
    {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]},
)
TOOLS = [WEATHER, TIME]
GREEDY = {"temperature": 0, "max_tokens": 120}


@asynccontextmanager
async def bundled() -> AsyncIterator[Server]:
    async with Server(Config(threads=1, ctx_size=2048, parallel=2)) as server:
        yield server


def check(message: Message, names: Sequence[str] = ("get_weather", "get_time")) -> None:
    assert message.content == ""
    assert message.tool_calls
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)
    for call in message.tool_calls:
        assert call.name in names
        arguments = json.loads(call.arguments)
        if call.name == "get_weather":
            assert isinstance(arguments["city"], str)
            assert 1 <= arguments["days"] <= 9
        else:
            assert arguments["zone"] in ("UTC", "CET")


# -- the server


async def test_a_weak_model_calls_when_it_has_to() -> None:
    async with bundled() as server:
        free = await server.chat(HI, tools=TOOLS, **GREEDY)
        assert free.message.tool_calls == ()
        assert free.message.content
        done = await server.chat(HI, tools=TOOLS, tool_choice="required", **GREEDY)
        assert done.message.reasoning_content  # thinking is free
        check(done.message)
        for name in ("get_weather", "get_time"):
            for thinks in (True, False):
                done = await server.chat(
                    HI,
                    tools=TOOLS,
                    tool_choice=name,
                    template_kwargs={"enable_thinking": thinks},
                    **GREEDY,
                )
                check(done.message, [name])
                assert done.finished.reason is FinishReason.EOS


async def test_arguments_follow_the_schema_when_the_model_may_choose() -> None:
    async with bundled() as server:
        done = await server.chat(RAIN, tools=TOOLS, **GREEDY)
        check(done.message)
        allowed = ToolChoice("auto", ("get_time",))
        done = await server.chat(RAIN, tools=TOOLS, tool_choice=allowed, **GREEDY)
        check(done.message, ["get_time"])
        done = await server.chat(RAIN, tools=TOOLS, tool_choice="none", **GREEDY)
        assert done.message.tool_calls == ()
        assert "get_weather" in done.prompt_text


async def test_hot_samples_are_calls_too() -> None:
    settings = {"temperature": 3.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 1000}
    async with bundled() as server:
        for seed, parallel in ((0, True), (1, False), (5, False)):
            done = await server.chat(
                HI,
                tools=[TIME],
                tool_choice="required",
                parallel_tool_calls=parallel,
                reasoning_budget=5,
                seed=seed,
                **settings,
            )
            check(done.message)
            assert parallel or len(done.message.tool_calls) == 1


async def test_streamed_equals_whole() -> None:
    async with bundled() as server:
        settings = {"tools": TOOLS, "tool_choice": "required", **GREEDY}
        whole = await server.chat(HI, **settings)
        builder, deltas = MessageBuilder(), list[Delta]()
        async with server.stream_chat(HI, **settings) as stream:
            async for event in stream:
                if isinstance(event, ChatChunk):
                    deltas += event.deltas
        for delta in deltas:
            builder.add(delta)
    streamed = builder.build()
    assert sum(isinstance(delta, ToolCallStart) for delta in deltas) == len(streamed.tool_calls)
    assert len(deltas) > 2 * len(streamed.tool_calls)  # the arguments come in parts
    for one, other in zip(streamed.tool_calls, whole.message.tool_calls, strict=True):
        assert (one.name, one.arguments) == (other.name, other.arguments)


async def test_an_answer_in_json_or_a_call() -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"],
        "additionalProperties": False,
    }
    grammar = Grammar("json_schema", json.dumps(schema), param="response_format")
    async with bundled() as server:
        settings = {"tools": TOOLS, "grammar": grammar, **GREEDY}
        said = await server.chat(HI, template_kwargs={"enable_thinking": False}, **settings)
        if not said.message.tool_calls:
            assert isinstance(json.loads(said.message.content)["n"], int)
        called = await server.chat(HI, tool_choice="get_time", **settings)
        check(called.message, ["get_time"])
        said = await server.chat(HI, tool_choice="none", **settings)
        assert isinstance(json.loads(said.message.content)["n"], int)


async def test_a_model_without_a_place_for_tools() -> None:
    async with serving_server(ScriptedBackend(lambda prompt: '{"tool_calls": []}')) as server:
        assert not server.model.template.capabilities.supports_tools
        done = await server.chat(HI, tools=TOOLS, tool_choice="none")
        assert "get_weather" not in done.prompt_text
        assert done.message.content == '{"tool_calls": []}'
        done = await server.chat(HI, tools=TOOLS)
        assert "get_weather" in done.prompt_text


@asynccontextmanager
async def serving_server(backend: ScriptedBackend) -> AsyncIterator[Server]:
    async with serving_script(backend) as (_, service):
        yield service.server


# -- the wire


@asynccontextmanager
async def http() -> AsyncIterator[tuple[str, httpx.AsyncClient]]:
    app = create_app(Config(threads=1, ctx_size=2048, parallel=2))
    async with serving(app) as url:
        await app.extensions["trioserve"].wait_loaded()
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            yield url, client


BODY = {"messages": HI, "tools": TOOLS, **GREEDY}


async def test_choices_on_the_wire() -> None:
    named = {"type": "function", "function": {"name": "get_time"}}
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [named]},
    }
    async with http() as (_, client):
        for choice in (named, allowed):
            body = BODY | {"tool_choice": choice, "parallel_tool_calls": False}
            answer = await client.post("/v1/chat/completions", json=body)
            (one,) = answer.json()["choices"]
            assert one["finish_reason"] == "tool_calls"
            (call,) = one["message"]["tool_calls"]
            assert call["function"]["name"] == "get_time"
        answer = await client.post("/v1/chat/completions", json=BODY | {"tool_choice": "none"})
        (one,) = answer.json()["choices"]
        assert "tool_calls" not in one["message"]


BAD_FIELDS: list[tuple[dict[str, Any], str | None, str]] = [
    (
        {"tool_choice": "any"},
        '\'tool_choice\' must be "auto", "none", "required", or an object that names functions.',
        "tool_choice",
    ),
    (
        {"tool_choice": {"type": "function", "function": {}}},
        "'tool_choice.function.name' must be the name of a function.",
        "tool_choice.function.name",
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none"}}},
        '\'tool_choice.allowed_tools.mode\' must be "auto" or "required".',
        "tool_choice.allowed_tools.mode",
    ),
    (
        {"tool_choice": {"type": "function", "function": {"name": "nope"}}},
        "'tool_choice' names the function 'nope', which is not in 'tools'.",
        "tool_choice",
    ),
    (
        {"tool_choice": "required", "tools": []},
        "'tool_choice' is \"required\", and there are no 'tools'.",
        "tool_choice",
    ),
    ({"grammar": 'root ::= "a"'}, "'grammar' cannot be used together with 'tools'.", "grammar"),
    (
        {"tools": [strict("f", {"type": "object", "properties": {"a": {"not": {"const": 1}}}})]},
        "'tools[0].function.parameters' cannot be used: the keyword 'not' is not supported, "
        "at #/properties/a/not.",
        "tools[0].function.parameters",
    ),
    ({"tools": [TIME, strict("f", {"type": "array"})]}, None, "tools[1].function.parameters"),
    ({"parallel_tool_calls": "no"}, None, "parallel_tool_calls"),
]


async def test_errors_on_the_wire() -> None:
    async with http() as (_, client):
        for fields, message, param in BAD_FIELDS:
            for stream in (False, True):
                body = BODY | {"stream": stream} | fields
                answer = await client.post("/v1/chat/completions", json=body)
                assert answer.status_code == 400, fields
                error = answer.json()["error"]
                assert error["type"] == "invalid_request_error"
                assert error["param"] == param
                assert message is None or error["message"] == message


async def test_the_sdk_streams_several_calls() -> None:
    """Calls come with an index each, and ids that differ."""
    calls = "".join(
        f'<tool_call>\n{{"name": "get_time", "arguments": {{"zone": "{zone}"}}}}\n</tool_call>\n'
        for zone in ("UTC", "CET", "UTC")
    )

    def ask(url: str) -> Any:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x")
        with (
            client,
            client.chat.completions.stream(
                model="x",
                messages=HI,  # type: ignore[arg-type]
                tools=TOOLS,  # type: ignore[arg-type]
                tool_choice="required",
                parallel_tool_calls=True,
            ) as stream,
        ):
            return stream.get_final_completion()

    template = "<tool_call> {% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"
    backend = ScriptedBackend(lambda prompt: calls, n_ctx=4096, chat_template=template)
    async with serving_script(backend) as (url, _):
        done = await trio.to_thread.run_sync(ask, url)
    found = done.choices[0].message.tool_calls
    assert [call.index for call in found] == [0, 1, 2]
    assert len({call.id for call in found}) == 3
    assert [json.loads(call.function.arguments)["zone"] for call in found] == ["UTC", "CET", "UTC"]
    assert done.choices[0].finish_reason == "tool_calls"
