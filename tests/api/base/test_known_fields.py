"""Fields that clients know: each has an effect, or is taken without, or is refused."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from tests.support.clients import client_of
from tests.support.scripts import HI
from trioserve.api.base.chat_request import ChatRequest
from trioserve.api.base.fields import fields_of
from trioserve.api.base.neutral import ACCEPTED, NEUTRAL, NEUTRAL_IN_CHAT
from trioserve.api.openai.request import CompletionRequest
from trioserve.testing import ScriptedBackend
from trioserve.types import GenerationParams, SamplingParams

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "|{{ verbosity }}|{{ reasoning_effort }}|{{ enable_thinking }}"
)


def names_of(cls: Any) -> set[str]:
    """The fields that a request class reads, by their names in JSON."""
    names = {name for field in fields_of(cls) for name in field.names}
    scalars = {*GenerationParams.__annotations__, *SamplingParams.__annotations__}
    whole = {"response_format", "add_generation_prompt", "continue_final_message", "echo"}
    return names | scalars | whole


@pytest.mark.parametrize(
    ("cls", "theirs", "neutral"),
    [
        (ChatRequest, chat_create_params.CompletionCreateParamsBase, NEUTRAL_IN_CHAT),
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase, NEUTRAL),
    ],
)
def test_every_field_of_openai_s_client_is_known(cls: Any, theirs: Any, neutral: Any) -> None:
    assert set(theirs.__annotations__) - names_of(cls) - {*neutral} - {*ACCEPTED} == set()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("best_of", 2),
        ("function_call", {"name": "f"}),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("moderation", {"model": "omni"}),
        ("suffix", "b"),
        ("web_search_options", {}),
        ("backend_sampling", True),
        ("n_cache_reuse", 5),
        ("image_data", [{"data": "aGk=", "id": 1}]),
    ],
)
async def test_what_would_have_no_effect_is_refused(name: str, value: Any) -> None:
    async with client_of(ScriptedBackend(chat_template=TEMPLATE)) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": HI, name: value})
        null = await client.post("/v1/chat/completions", json={"messages": HI, name: None})
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "code": 400,
        "message": f"'{name}' is not supported with this value; leave it out.",
        "type": "invalid_request_error",
        "param": name,
    }
    assert null.status_code == 200


async def test_what_one_machine_has_no_use_for_is_taken() -> None:
    body = {
        "messages": HI,
        "metadata": {"a": "b"},
        "model": "gpt-9",
        "prediction": {"type": "content", "content": "Hi"},
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "safety_identifier": "s",
        "service_tier": "flex",
        "store": True,
        "user": "u",
        "modalities": ["text"],
        "nobody_knows_this": 1,
    }
    async with client_of(ScriptedBackend(chat_template=TEMPLATE)) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["model"] == "scripted"


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "Hi||||"),
        ({"verbosity": "low"}, "Hi|low||"),
        ({"reasoning_effort": "high"}, "Hi||high|"),
        ({"reasoning_effort": "none"}, "Hi|||False"),
    ],
)
async def test_the_template_reads_the_levels(fields: dict[str, Any], prompt: str) -> None:
    backend = ScriptedBackend(chat_template=TEMPLATE)
    async with client_of(backend) as client:
        answer = await client.post("/apply-template", json={"messages": HI} | fields)
        counted = await client.post(
            "/v1/chat/completions/input_tokens", json={"messages": HI} | fields
        )
        rendered = answer.json()["prompt"]
        said = await client.post("/v1/chat/completions", json={"messages": HI} | fields)
    assert rendered.split("|")[:3] == prompt.split("|")[:3]
    assert said.json()["choices"][0]["message"]["content"] == rendered.upper()
    assert counted.json() == {
        "input_tokens": len(rendered),
        "object": "response.input_tokens",
    }


async def test_a_chat_may_ask_for_candidates_as_llama_server_has_it() -> None:
    async with client_of(ScriptedBackend(chat_template=TEMPLATE)) as client:
        body = {"messages": HI, "n_probs": 1, "max_tokens": 2}
        choice = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert [each["token"] for each in choice["logprobs"]["content"]] == ["H", "I"]
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "So HI"),
        ({"echo": False}, "HI"),
        ({"continue_final_message": True}, "HI"),
        ({"continue_final_message": True, "echo": True}, "So HI"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_what_was_begun_is_echoed(
    fields: dict[str, Any], expected: str, stream: bool
) -> None:
    backend = ScriptedBackend(lambda prompt: "HI", chat_template=TEMPLATE)
    body = {"messages": [*HI, {"role": "assistant", "content": "So "}], "stream": stream} | fields
    async with client_of(backend) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    if not stream:
        assert answer.json()["choices"][0]["message"]["content"] == expected
        return
    text = ""
    for event in answer.text.split("\n\n")[:-2]:
        (choice,) = httpx.Response(200, text=event.removeprefix("data: ")).json()["choices"]
        text += choice["delta"].get("content") or ""
    assert text == expected


async def test_no_tokens_are_made_when_none_are_wanted() -> None:
    async with client_of(ScriptedBackend(chat_template=TEMPLATE)) as client:
        data = (await client.post("/completion", json={"prompt": "ab", "n_predict": 0})).json()
    assert (data["content"], data["tokens_predicted"], data["stop_type"]) == ("", 0, "limit")
