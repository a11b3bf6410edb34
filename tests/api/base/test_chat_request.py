"""The fields of requests for a chat."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scripts import HI
from trioserve.api.base.chat_request import ChatRequest, Continuation, TemplateRequest
from trioserve.api.base.fields import structure
from trioserve.api.openai.chat import CompletionRequest
from trioserve.errors import InvalidRequestError


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.parse({"messages": HI, **fields})


def test_the_least_chat() -> None:
    parsed = chat()
    assert parsed.messages == (HI[0],)
    assert parsed.given_params() == {}
    assert not parsed.stream


def test_fields_that_were_set_become_parameters() -> None:
    parsed = chat(
        max_tokens=5,
        temperature=0,
        top_k=3.0,
        stop=["a", ""],
        samplers="kt",
        ignore_eos=True,
        cache_prompt=False,
        logprobs=True,
        top_logprobs=2,
        dry_base=0.5,
        t_max_predict_ms=-1,
        seed=None,
        **{"speculative.n_max": 4},
    )
    assert parsed.given_params() == {
        "max_tokens": 5,
        "draft_max": 4,
        "temperature": 0,
        "top_k": 3,
        "stop": ("a",),
        "samplers": ("top_k", "temperature"),
        "ignore_eos": True,
        "cache_prompt": False,
        "n_probs": 2,
        "t_max_predict_ms": 0,
    }


def test_n_predict_wins_over_its_aliases() -> None:
    assert chat(max_tokens=1, max_completion_tokens=2).max_tokens == 2
    assert chat(max_tokens=1, max_completion_tokens=2, n_predict=3).max_tokens == 3


def test_progress_is_asked_of_the_engine_only_for_streams() -> None:
    assert "return_progress" not in chat(return_progress=True).given_params()
    assert chat(return_progress=True, stream=True).given_params() == {"return_progress": True}
    assert chat(timings_per_token=True, stream=True).given_params() == {"return_progress": True}


BEGUN = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]


@pytest.mark.parametrize(
    ("fields", "continuation"),
    [
        ({}, Continuation(True, None)),
        ({"add_generation_prompt": False}, Continuation(False, None)),
        ({"messages": BEGUN}, Continuation(False, "auto", echo=True)),
        ({"messages": BEGUN, "echo": False}, Continuation(False, "auto")),
        (
            {"messages": BEGUN, "add_generation_prompt": True},
            Continuation(False, "auto", echo=True),
        ),
        ({"messages": BEGUN, "continue_final_message": False}, Continuation(True, None)),
        ({"messages": BEGUN, "continue_final_message": True}, Continuation(False, "auto")),
        ({"messages": BEGUN, "continue_final_message": "content"}, Continuation(False, "content")),
        (
            {"continue_final_message": "reasoning_content", "add_generation_prompt": False},
            Continuation(False, "reasoning_content"),
        ),
    ],
)
def test_how_a_prompt_ends(fields: dict[str, Any], continuation: Continuation) -> None:
    assert chat(**fields).continuation == continuation
    template = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    assert structure(TemplateRequest, template).continuation == continuation


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [*BEGUN, BEGUN[-1]]}, "messages"),
        (
            {"messages": BEGUN, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
    ],
)
def test_how_a_prompt_cannot_end(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**fields)
    assert caught.value.param == param


def test_values_that_change_nothing_are_fine() -> None:
    chat(
        grammar="",
        json_schema=None,
        response_format={"type": "text"},
        tool_choice="auto",
        n=1,
        lora=[],
        parallel_tool_calls=True,
        reasoning_budget_tokens=-1,
        add_generation_prompt=True,
    )
    CompletionRequest.parse({"prompt": "a", "suffix": "", "best_of": 1, "echo": True})


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([5], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "assistant"}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content[0].image_url",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    ],
)
def test_bad_messages(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatRequest.parse({"messages": messages})
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message


def test_messages_of_all_kinds() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": "Be"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
    ]
    system, _, _, result = messages
    assert ChatRequest.parse({"messages": messages}).messages == (
        system,
        {"role": "assistant", "content": [{"type": "text", "text": "No."}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        result,
    )


def test_tools() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    parameters = {"type": "object", "properties": {}}
    expected = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert chat(tools=[tool]).tools == (expected,)


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
    ],
)
def test_bad_tools(tools: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(tools=tools)
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message


def test_template_variables() -> None:
    assert chat(chat_template_kwargs={"x": 1}, verbosity="low").template_kwargs == {
        "x": 1,
        "verbosity": "low",
    }


def test_logprobs() -> None:
    assert chat().n_probs == 0
    assert chat(logprobs=True).n_probs == 20
    assert chat(logprobs=True, top_logprobs=0).n_probs == 1
    with pytest.raises(InvalidRequestError):
        chat(top_logprobs=3)
    assert CompletionRequest.parse({"prompt": "a", "logprobs": 3}).n_probs == 3
