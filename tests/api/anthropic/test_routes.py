"""Anthropic's routes on the wire: Anthropic's SDK and httpx, over a real socket."""

from __future__ import annotations

from typing import Any

import anthropic
import pydantic
import pytest
import trio

from tests.support.anthropic_api import ASK, WEATHER, post
from tests.support.clients import client_of, named_events_in, use_anthropic
from tests.support.http_server import serving
from tests.support.scripts import HI, TEMPLATE, answering, noting
from tests.support.tool_calls import ANSWERS
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.testing import ScriptedBackend

# -- messages


async def test_a_whole_message_and_the_events_of_a_stream() -> None:
    async with client_of(answering("Hello you"), cache_prompt=False) as client:
        whole = await client.post("/v1/messages", json=ASK)
        streamed = await client.post("/v1/messages", json=ASK | {"stream": True})
    assert whole.headers["request-id"] == whole.headers["x-request-id"]
    assert streamed.headers["Content-Type"] == "text/event-stream"
    data = whole.json()
    begin, ping, start, *deltas, stop, end, last = named_events_in(streamed.text)
    begun = begin.pop("message")
    assert begin == {"type": "message_start"}
    for message in (data, begun):
        assert message.pop("id").startswith("msg_")
    n_prompt = data["usage"]["input_tokens"]
    assert n_prompt > 0
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    absent = ("cache_creation", "inference_geo", "output_tokens_details", "server_tool_use")
    usage = {
        "input_tokens": n_prompt,
        **cached,
        "output_tokens": 10,
        **dict.fromkeys(absent),
        "service_tier": "standard",
    }
    unset = {"stop_sequence": None, "stop_details": None, "container": None}
    ended = {"stop_reason": "end_turn", **unset}
    head = {"type": "message", "role": "assistant", "model": "scripted"}
    assert data == {
        **head,
        "content": [{"type": "text", "text": "Hello you", "citations": None}],
        **ended,
        "usage": usage,
    }
    assert begun == {
        **head,
        "content": [],
        "stop_reason": None,
        **unset,
        "usage": {**usage, "output_tokens": 0},
    }
    assert ping == {"type": "ping"}
    block = {"type": "text", "text": "", "citations": None}
    assert start == {"type": "content_block_start", "index": 0, "content_block": block}
    assert "".join(each["delta"]["text"] for each in deltas) == "Hello you"
    assert {each["delta"]["type"] for each in deltas} == {"text_delta"}
    assert stop == {"type": "content_block_stop", "index": 0}
    assert end == {"type": "message_delta", "delta": ended, "usage": usage}
    assert last == {"type": "message_stop"}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_a_tool_runner_that_is_refused_a_thread_goes_on_without(path: str) -> None:
    async with client_of(answering("Hello you")) as client:
        for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
            answer = await client.post(path, json=ASK | {"thread": thread})
            assert answer.status_code == 400
            details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            assert answer.json()["error"]["details"] == details
        assert (await client.post(path, json=ASK | {"thread": None})).status_code == 200


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


async def test_a_stream_adds_up_to_the_whole_message() -> None:
    def use(client: anthropic.Anthropic) -> None:
        for name in ANSWERS:
            for display in ("summarized", "omitted"):
                thinking = {"type": "adaptive", "display": display}
                messages = [{"role": "user", "content": name}]
                asked = ASK | {"messages": messages, "tools": [WEATHER], "thinking": thinking}
                whole = client.messages.create(**asked)
                with client.messages.stream(**asked) as stream:
                    streamed = stream.get_final_message()
                for message in (whole, streamed):
                    assert message.id.startswith("msg_")
                assert same(whole) == same(streamed), name

    def same(message: Any) -> Any:
        data = message.to_dict(exclude_none=True)
        usage = data["usage"]
        usage["input_tokens"] += usage.pop("cache_read_input_tokens")
        for block in data["content"]:
            if block["type"] == "tool_use":
                assert block.pop("id")
                assert block["caller"] == {"type": "direct"}
            block.pop("parsed_output", None)
        return {key: value for key, value in data.items() if key != "id"}

    await use_anthropic(answering(lambda prompt: ANSWERS[asked_in(prompt)]), use)


def asked_in(prompt: str) -> str:
    """Get the last message of the user from a prompt."""
    return prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


CALLS: dict[str, Any] = {"tools": [WEATHER], "messages": [{"role": "user", "content": "a call"}]}


async def test_why_it_stopped() -> None:
    cases: list[tuple[dict[str, Any], str, str | None]] = [
        ({}, "end_turn", None),
        ({"stop_sequences": ["x", " y", ""]}, "stop_sequence", " y"),
        ({"max_tokens": 5}, "max_tokens", None),
        (CALLS, "tool_use", None),
        (CALLS | {"max_tokens": 70}, "max_tokens", None),
        (CALLS | {"tools": []}, "end_turn", None),
    ]

    def use(client: anthropic.Anthropic) -> None:
        for fields, reason, word in cases:
            asked = ASK | fields
            with client.messages.stream(**asked) as stream:
                streamed = stream.get_final_message()
            for message in (client.messages.create(**asked), streamed):
                assert (message.stop_reason, message.stop_sequence) == (reason, word), fields

    await use_anthropic(answering(lambda prompt: ANSWERS.get(asked_in(prompt), "Hello you")), use)


# -- the SDK


async def test_the_sdk() -> None:
    def use(client: anthropic.Anthropic) -> None:
        message = client.messages.create(**ASK, system="Be brief.", metadata={"user_id": "me"})
        assert message.content[0].text == "Hello you"
        with client.messages.stream(**ASK) as stream:
            assert "".join(stream.text_stream) == stream.get_final_text() == "Hello you"
            assert stream.request_id
        beta = client.beta.messages.create(**ASK, betas=["context-1m-2025-08-07"])
        assert beta.content[0].text == "Hello you"

    await use_anthropic(answering("Hello you"), use)


async def test_errors_as_the_sdk_raises_them() -> None:
    def use(client: anthropic.Anthropic) -> None:
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.create(**ASK | {"messages": []})
        assert caught.value.type == "invalid_request_error"
        assert caught.value.request_id
        assert caught.value.body["request_id"] == caught.value.request_id  # type: ignore[index]
        with pytest.raises(anthropic.NotFoundError):
            client.messages.batches.retrieve("b1")
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="wrong").messages.create(**ASK)

    await use_anthropic(answering("Hi"), use, api_keys=("secret",))


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
    assert data["content"] == [{"type": "text", "text": '{"a": 1}', "citations": None}]


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
            unasked = client.messages.create(**ASK, extra_body={"temperature": 0})
        assert [block.type for block in unasked.content] == ["text"]
        for message in (whole, streamed):
            thought, block = message.content
            assert 0 < len(thought.thinking.split()) <= 3
            assert (block.type, block.name) == ("tool_use", "weather")
            assert block.input["city"] == "Rome"
            assert message.stop_reason == "tool_use"
        assert whole.content[0].thinking == streamed.content[0].thinking
        assert whole.content[1].input == streamed.content[1].input

    app = create_app(Config(parallel=1, ctx_size=2048, threads=1))
    async with serving(app) as url:
        await app.extensions["trioserve"].wait_loaded()
        await trio.to_thread.run_sync(use, url)


async def test_no_tokens_only_fill_the_cache_and_the_context_ends_a_message() -> None:
    backend = ScriptedBackend(lambda prompt: "Hello " * 99, n_ctx=256, chat_template=TEMPLATE)
    async with client_of(backend) as client:
        none, full = [
            (await client.post("/v1/messages", json=ASK | {"max_tokens": n})).json()
            for n in (0, -1)
        ]
    assert (none["content"], none["stop_reason"]) == ([], "max_tokens")
    assert none["usage"]["output_tokens"] == 0
    assert full["stop_reason"] == "model_context_window_exceeded"
    counts = ("input_tokens", "cache_read_input_tokens", "output_tokens")
    assert sum(full["usage"][name] for name in counts) == 256


async def test_a_local_page_may_use_the_sdk() -> None:
    """The SDK sends ``anthropic-version`` and other headers that need CORS."""
    async with client_of(answering("Hi")) as client:
        headers = {"Origin": "http://localhost:3000"}
        answer = await client.options("/v1/messages", headers=headers)
    allowed = answer.headers["Access-Control-Allow-Headers"].split(", ")
    assert {"Authorization", "X-Api-Key", "*"} <= set(allowed)
    assert "Request-Id" in answer.headers["Access-Control-Expose-Headers"]


async def test_the_sdk_lists_models_in_its_form() -> None:
    backend = answering("Hi")
    wanted = {"type", "id", "display_name", "created_at", "max_input_tokens", "max_tokens"}

    def use(client: anthropic.Anthropic) -> None:
        page = client.models.list(limit=20)
        assert (page.has_more, page.first_id, page.last_id) == (False, "scripted", "scripted")
        (model,) = page.data
        assert model.to_dict().keys() == wanted
        assert client.models.retrieve("scripted").to_dict() == model.to_dict()
        with pytest.raises(anthropic.NotFoundError, match="no model 'other'"):
            client.models.retrieve("other")

    await use_anthropic(backend, use)
    async with client_of(backend) as client:
        assert "object" in (await client.get("/v1/models")).json()


# -- the prompt


FUNCTION = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather",
        "parameters": WEATHER["input_schema"],
    },
}
CALLED = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
RAIN = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Rain"}]}
BEGUN = [*HI, {"role": "assistant", "content": "Well, "}]
#: Requests for a message, and the requests for a chat that have the same prompt.
SAME_PROMPT: list[tuple[dict[str, Any], dict[str, Any]]] = [
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
                {"role": "assistant", "content": [THOUGHT, {"type": "text", "text": "Wait."}, USE]},
                {"role": "user", "content": [RAIN, {"type": "text", "text": "And now?"}]},
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
    ({"messages": BEGUN}, {"messages": BEGUN}),
]


async def test_a_prompt_is_that_of_the_same_chat() -> None:
    backend, prompts = noting("Yes")
    unasked = {"chat_template_kwargs": {"enable_thinking": False}}
    async with client_of(backend) as client:
        for theirs, ours in SAME_PROMPT:
            for path, body in (
                ("/v1/messages", ASK | theirs),
                ("/v1/chat/completions", unasked | ours),
            ):
                answer = await client.post(path, json=body)
                assert answer.status_code == 200, answer.text
            assert prompts[-2] == prompts[-1], theirs
    assert len(prompts) == 2 * len(SAME_PROMPT)
