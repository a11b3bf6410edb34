"""The Responses API on the wire: Hypercorn, httpx and OpenAI's SDK."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseInputParam, ResponseStreamEvent

from tests.support.clients import client_of, use_openai
from tests.support.http_server import serving
from tests.support.scripts import answering, noting
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.errors import DecodeError
from trioserve.testing import ScriptedBackend

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TEXT = f"<think>\nHm, é.\n</think>\n\nWell. {CALL}"


def events_in(text: str) -> list[dict[str, Any]]:
    """Parse a stream strictly: names, numbers and types are as OpenAI's SDK has them."""
    types = pydantic.TypeAdapter(ResponseStreamEvent)
    *written, rest = text.split("\n\n")
    assert rest == ""
    events = []
    for number, event in enumerate(written):
        name, data = event.split("\n")
        fields = json.loads(data.removeprefix("data: "))
        assert name == f"event: {fields['type']}"
        assert fields["sequence_number"] == number
        types.validate_python(fields)
        events.append(fields)
    return events


def stable(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs each time."""
    kept = {k: v for k, v in response.items() if k not in ("id", "created_at", "completed_at")}
    kept["output"] = [
        {k: v for k, v in item.items() if k not in ("id", "call_id")} for item in kept["output"]
    ]
    kept["usage"] = {**kept["usage"], "input_tokens_details": None}  # the second finds a cache
    return kept


# -- the forms


async def test_a_whole_response() -> None:
    body = {
        "model": "any",
        "input": "Hi",
        "instructions": "Be kind.",
        "metadata": {"a": "b"},
        "store": True,
        "temperature": 0.5,
        "max_output_tokens": 99,
    }
    async with client_of(answering("Hello")) as client:
        answer = await client.post("/v1/responses", json=body)
        other = await client.post("/responses", json=body)
        counts = [
            (await client.post(f"{path}/input_tokens", json=body)).json()
            for path in ("/v1/responses", "/responses")
        ]
    data = answer.json()
    assert stable(other.json()) == stable(data)
    Response.model_validate(data)
    item = data["output"][0]
    assert item == {
        "id": item["id"],
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "annotations": [], "logprobs": [], "text": "Hello"}],
    }
    n_prompt = data["usage"]["input_tokens"]
    assert counts == [{"object": "response.input_tokens", "input_tokens": n_prompt}] * 2
    assert data == {
        "id": data["id"],
        "object": "response",
        "created_at": data["created_at"],
        "completed_at": data["completed_at"],
        "model": "scripted",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "output": [item],
        "usage": {
            "input_tokens": n_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": n_prompt},
            "output_tokens": 6,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": n_prompt + 6,
        },
        "background": False,
        "conversation": None,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "instructions": "Be kind.",
        "max_output_tokens": 99,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": pytest.approx(0.95),
        "truncation": "disabled",
        "user": None,
    }


async def test_a_streamed_response_equals_a_whole_one() -> None:
    body = {
        "input": "Hi",
        "tools": [WEATHER],
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
    }
    async with client_of(answering(TEXT)) as client:
        whole = await client.post("/v1/responses", json=body)
        streamed = await client.post("/v1/responses", json={**body, "stream": True})
    assert streamed.headers["Content-Type"] == "text/event-stream"
    Response.model_validate(whole.json())
    first, second, *_, last = events = events_in(streamed.text)
    assert [first["type"], second["type"]] == ["response.created", "response.in_progress"]
    assert first["response"]["output"] == []
    assert last["type"] == "response.completed"
    assert last["timings"]["predicted_n"] == len(TEXT.encode()) + 1
    assert stable(last["response"]) == stable(whole.json())
    assert [item["type"] for item in last["response"]["output"]] == [
        "reasoning",
        "message",
        "function_call",
    ]
    assert last["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 7}
    told = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert told == last["response"]["output"]


async def test_progress_and_timings() -> None:
    body = {"input": "Hi", "stream": True, "return_progress": True, "timings_per_token": True}
    async with client_of(answering("Yo")) as client:
        answer = await client.post("/v1/responses", json=body)
    events = events_in(answer.text)
    progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert progress[-1]["processed"] == progress[-1]["total"]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert all("timings" in event for event in deltas)


async def test_an_answer_continues_the_last_message() -> None:
    backend, prompts = noting(" upon a time")
    items = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "Once"}]
    async with client_of(backend) as client:
        whole = (await client.post("/v1/responses", json={"input": items})).json()
        streamed = await client.post("/v1/responses", json={"input": items, "stream": True})
        bare = (await client.post("/v1/responses", json={"input": items, "echo": False})).json()
    assert prompts[0].endswith("Once")
    assert whole["output"][0]["content"][0]["text"] == "Once upon a time"
    assert stable(events_in(streamed.text)[-1]["response"]) == stable(whole)
    assert "Once" not in bare["output"][0]["content"][0]["text"]


# -- errors


ID = {"X-Request-Id": "r1"}
FAILED = "The inference engine failed. The log has more, under r1."


def failing_at(letter: str, text: str) -> ScriptedBackend:
    """A backend that breaks down when it has said a letter."""
    backend = answering(text)

    def on_decode(backend: ScriptedBackend) -> None:
        if [row[0] for row in backend.batch.rows] == [ord(letter)]:
            backend.fail_next = DecodeError("The batch is cursed.")

    backend.on_decode = on_decode
    return backend


async def test_a_failure_in_the_middle_ends_the_stream() -> None:
    async with client_of(failing_at("o", "Hello you")) as client:
        body = {"input": "Hi"}
        answer = await client.post("/v1/responses", json=body | {"stream": True}, headers=ID)
        whole = await client.post("/v1/responses", json=body, headers=ID)
    *_, failed, error = events_in(answer.text)
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": FAILED}
    assert failed["response"]["output"][0]["status"] == "incomplete"
    body = {"code": 500, "message": FAILED, "type": "server_error", "param": None}
    assert error == {
        "type": "error",
        "sequence_number": error["sequence_number"],
        "code": "server_error",
        "message": FAILED,
        "param": None,
        "error": body,
    }
    assert (whole.status_code, whole.json()) == (500, {"error": body})


# -- OpenAI's SDK


async def test_the_sdk_makes_responses() -> None:
    def use(client: openai.OpenAI) -> None:
        made = client.responses.create(model="any", input="Hi", tools=[WEATHER])
        assert made.status == "completed"
        assert made.output_text == "Well. "
        assert made.output[-1].type == "function_call"
        with client.responses.create(model="any", input="Hi", stream=True) as events:
            texts = [e.delta for e in events if e.type == "response.output_text.delta"]
        assert "".join(texts).startswith("Well. ")
        with client.responses.stream(model="any", input="Hi", tools=[WEATHER]) as stream:
            seen = [event.type for event in stream]
            final = stream.get_final_response()
        assert seen[-1] == "response.completed"
        assert final.output_text == "Well. "
        counted = client.responses.input_tokens.count(model="any", input="Hi", tools=[WEATHER])
        assert made.usage is not None
        assert counted.input_tokens == made.usage.input_tokens

    await use_openai(answering(TEXT), use)


class Place(pydantic.BaseModel):
    city: str
    size: int


async def test_the_sdk_parses_a_structured_answer() -> None:
    def use(client: openai.OpenAI) -> None:
        parsed = client.responses.parse(model="any", input="Where?", text_format=Place)
        assert parsed.output_parsed == Place(city="Paris", size=2)
        with client.responses.stream(model="any", input="Where?", text_format=Place) as stream:
            done = [e for e in stream if e.type == "response.output_text.done"]
            assert stream.get_final_response().output_parsed == Place(city="Paris", size=2)
        assert done[0].parsed == Place(city="Paris", size=2)

    await use_openai(answering('{"city": "Paris", "size": 2}'), use)


async def test_the_sdk_goes_round_with_tools() -> None:
    prompts: list[str] = []

    def script(prompt: str) -> str:
        prompts.append(prompt)
        return "It is sunny." if "<tool_response>" in prompt else TEXT

    def use(client: openai.OpenAI) -> None:
        items: ResponseInputParam = [{"role": "user", "content": "Weather?"}]
        first = client.responses.create(model="any", input=items, tools=[WEATHER])
        items += [item.to_dict() for item in first.output]  # type: ignore[misc]
        for call in first.output:
            if call.type == "function_call":
                assert json.loads(call.arguments) == {"city": "Paris"}
                output = {"call_id": call.call_id, "output": "sunny"}
                items.append({"type": "function_call_output", **output})
        second = client.responses.create(model="any", input=items, tools=[WEATHER])
        assert second.output_text == "It is sunny."

    await use_openai(answering(script), use)
    history = prompts[1].removeprefix(prompts[0])
    assert history == (
        f"<think>\nHm, é.\n</think>\n\nWell. \n{CALL}<|im_end|>\n"
        "<|im_start|>tool\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


# -- the bundled model


@asynccontextmanager
async def bundled() -> AsyncIterator[httpx.AsyncClient]:
    # Without the cache: a prompt in other batches has other logits, in the last digits.
    app = create_app(Config(threads=1, ctx_size=512, parallel=1, cache_prompt=False))
    async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        await app.extensions["trioserve"].wait_loaded()
        yield client


async def test_the_bundled_model_answers_and_calls_the_chosen_tool() -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
    name = {"type": "function", "name": "weather"}
    tools = [{"type": "function", "name": "time"}, {**name, "parameters": schema}]
    asked = {"input": "Hi", "temperature": 0, "max_output_tokens": 99}
    choices: list[Any] = [name, {"type": "allowed_tools", "mode": "required", "tools": [name]}]
    async with bundled() as client:

        async def ask(**fields: Any) -> httpx.Response:
            return await client.post("/v1/responses", json={**asked, **fields})

        include = ["message.output_text.logprobs"]
        whole = (await ask(include=include, top_logprobs=2, max_output_tokens=24)).json()
        Response.model_validate(whole)
        [[part]] = [item["content"] for item in whole["output"]]
        assert part["text"]
        assert "".join(one["token"] for one in part["logprobs"]) == part["text"]
        assert {len(one["top_logprobs"]) for one in part["logprobs"]} == {2}
        assert whole["usage"]["input_tokens"] == 26  # as many as llama-server counts
        for choice in choices:
            data = (await ask(tools=tools, tool_choice=choice)).json()
            Response.model_validate(data)
            [call] = [item for item in data["output"] if item["type"] == "function_call"]
            assert call["name"] == "weather"
            assert json.loads(call["arguments"])["city"] == "Paris"
            assert data["tool_choice"] == choice
        unknown = await ask(tools=tools, tool_choice={"type": "function", "name": "none such"})
        integer = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        format = {"type": "json_schema", "name": "n", "schema": integer, "strict": True}
        answer = await ask(text={"format": format})
        format["schema"] = {"type": "nonsense"}
        refused = await ask(text={"format": format})
    [*_, item] = answer.json()["output"]
    assert isinstance(json.loads(item["content"][0]["text"])["a"], int)
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "tool_choice")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text.format")
