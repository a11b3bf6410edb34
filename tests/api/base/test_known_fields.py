"""Fields that clients know: each has an effect, or is taken without, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from tests.support.clients import client_of, error_body, events_in
from tests.support.scripts import HI
from trioserve.api.base.chat_request import ChatRequest
from trioserve.api.base.fields import fields_of
from trioserve.api.base.generation_request import ACCEPTED, UNSUPPORTED, UNSUPPORTED_IN_CHAT
from trioserve.api.openai.chat import CompletionRequest
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
        (ChatRequest, chat_create_params.CompletionCreateParamsBase, UNSUPPORTED_IN_CHAT),
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase, UNSUPPORTED),
    ],
)
def test_every_field_of_openai_s_client_is_known(cls: Any, theirs: Any, neutral: Any) -> None:
    assert set(theirs.__annotations__) - names_of(cls) - {*neutral} - {*ACCEPTED} == set()


NOT_SUPPORTED: dict[str, Any] = {
    "best_of": 2,
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "moderation": {"model": "omni"},
    "suffix": "b",
    "image_data": [{"data": "aGk=", "id": 1}],
}


async def test_fields_without_effect_are_refused() -> None:
    async with client_of(ScriptedBackend(chat_template=TEMPLATE)) as client:
        for name, value in NOT_SUPPORTED.items():
            answer = await client.post("/v1/chat/completions", json={"messages": HI, name: value})
            message = f"'{name}' is not supported with this value; leave it out."
            assert (answer.status_code, answer.json()) == (400, error_body(message, name))
        body = {"messages": HI, **dict.fromkeys(NOT_SUPPORTED)}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


async def test_fields_of_hosted_services_are_accepted() -> None:
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
        "web_search_options": {},
        "backend_sampling": True,
        "n_cache_reuse": 5,
        "seed": 2**63 + 7,
        "top_logprobs": 0,
        "tool_choice": {"type": "auto"},
        "nobody_knows_this": 1,
    }
    async with client_of(ScriptedBackend(chat_template=TEMPLATE)) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["model"] == "scripted"


async def test_the_template_reads_the_levels() -> None:
    async with client_of(ScriptedBackend(chat_template=TEMPLATE)) as client:
        for fields, prompt in (
            ({}, "Hi||||"),
            ({"verbosity": "low"}, "Hi|low||"),
            ({"reasoning_effort": "high"}, "Hi||high|"),
            ({"reasoning_effort": "none"}, "Hi|||False"),
        ):
            body = {"messages": HI} | fields
            rendered = (await client.post("/apply-template", json=body)).json()["prompt"]
            counted = await client.post("/v1/chat/completions/input_tokens", json=body)
            said = await client.post("/v1/chat/completions", json=body)
            assert rendered.split("|")[:3] == prompt.split("|")[:3]
            assert said.json()["choices"][0]["message"]["content"] == rendered.upper()
            wanted = {"input_tokens": len(rendered), "object": "response.input_tokens"}
            assert counted.json() == wanted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_token_ids", [5]),
        ("bad_words", ["no"]),
        ("include_stop_str_in_output", True),
        ("return_token_ids", True),
        ("return_tokens_as_token_ids", True),
        ("stop_token_ids", [5]),
        ("truncate_prompt_tokens", 5),
        ("use_beam_search", True),
    ],
)
async def test_vllm_s_fields_that_would_change_the_answer(name: str, value: Any) -> None:
    async with client_of(ScriptedBackend()) as client:
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": HI}),
        ):
            answer = await client.post(path, json=body | {name: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


async def test_a_chat_may_ask_for_candidates_as_llama_server_has_it() -> None:
    async with client_of(ScriptedBackend(chat_template=TEMPLATE)) as client:
        body = {"messages": HI, "n_probs": 1, "max_tokens": 2}
        choice = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert [each["token"] for each in choice["logprobs"]["content"]] == ["H", "I"]
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 1


async def test_a_continued_message_is_echoed() -> None:
    backend = ScriptedBackend(lambda prompt: "HI", chat_template=TEMPLATE)
    begun = {"messages": [*HI, {"role": "assistant", "content": "So "}]}
    async with client_of(backend) as client:
        for fields, expected in (
            ({}, "So HI"),
            ({"echo": False}, "HI"),
            ({"continue_final_message": True}, "HI"),
            ({"continue_final_message": True, "echo": True}, "So HI"),
        ):
            body = begun | fields
            whole = (await client.post("/v1/chat/completions", json=body)).json()
            assert whole["choices"][0]["message"]["content"] == expected
            answer = await client.post("/v1/chat/completions", json=body | {"stream": True})
            deltas = [event["choices"][0]["delta"] for event in events_in(answer.text)]
            assert "".join(delta.get("content") or "" for delta in deltas) == expected


async def test_no_tokens_are_made_when_none_are_wanted() -> None:
    async with client_of(ScriptedBackend(chat_template=TEMPLATE)) as client:
        data = (await client.post("/completion", json={"prompt": "ab", "n_predict": 0})).json()
    assert (data["content"], data["tokens_predicted"], data["stop_type"]) == ("", 0, "limit")
