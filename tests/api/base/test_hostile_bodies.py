"""Bodies that are meant to hold up other clients: what is too much, and what has to wait."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.clients import client_of, error_body
from tests.support.scripts import BASE, CHAT, HI, answering
from trioserve.api.anthropic.request import MessagesRequest
from trioserve.api.base import limits
from trioserve.api.base.chat_request import ChatRequest
from trioserve.api.base.fields import structure
from trioserve.api.llama.completion import (
    LlamaCompletionRequest,
    TokenizeRequest,
)
from trioserve.api.ollama.request import OllamaChatRequest
from trioserve.api.openai.responses.request import ResponsesRequest
from trioserve.chat.messages import MAX_ARGUMENTS, MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from trioserve.config import Config
from trioserve.errors import ConfigError, InvalidRequestError

PART = {"type": "text", "text": "a"}
CALL = {"type": "function", "function": {"name": "f"}}
TOOL = {"type": "function", "function": {"name": "f"}}
THEIR_TOOL = {"name": "f", "input_schema": {}}
OUR_ITEM = {"role": "user", "content": "Hi"}


def parse(cls: Any, body: dict[str, Any]) -> Any:
    body = {**{name: BASE[name] for name in BASE if name in NEEDED[cls]}, **body}
    return cls.parse(body) if hasattr(cls, "parse") else structure(cls, body)


NEEDED: dict[Any, tuple[str, ...]] = {
    LlamaCompletionRequest: ("prompt",),
    TokenizeRequest: (),
    ChatRequest: ("messages",),
    MessagesRequest: ("messages", "max_tokens"),
    OllamaChatRequest: ("messages",),
    ResponsesRequest: ("input",),
}

#: A class, a field, what one of its lists may hold, and how many of them.
LISTS: list[tuple[Any, str, Any, int]] = [
    (LlamaCompletionRequest, "logit_bias", [5, 1], limits.MAX_BIASES),
    (LlamaCompletionRequest, "logit_bias", ["a", 1], limits.MAX_TEXT_BIASES),
    (ChatRequest, "messages", HI[0], MAX_MESSAGES),
    (MessagesRequest, "messages", HI[0], MAX_MESSAGES),
    (OllamaChatRequest, "messages", HI[0], MAX_MESSAGES),
    (ResponsesRequest, "input", OUR_ITEM, MAX_MESSAGES),
    (ChatRequest, "tools", TOOL, MAX_TOOLS),
    (OllamaChatRequest, "tools", TOOL, MAX_TOOLS),
    (MessagesRequest, "tools", THEIR_TOOL, MAX_TOOLS),
    (ResponsesRequest, "tools", {"type": "function", "name": "f"}, MAX_TOOLS),
]
BIAS, KWARGS = limits.MAX_BIAS_CHARS, limits.MAX_TEMPLATE_KWARGS
#: A class, a field, the most that it may hold, and one more than that.
BOUNDS: list[tuple[Any, str, Any, Any]] = [
    *((cls, name, [item] * n, [item] * (n + 1)) for cls, name, item, n in LISTS),
    (LlamaCompletionRequest, "logit_bias", {"a" * BIAS: 1}, {"a" * (BIAS + 1): 1}),
    (LlamaCompletionRequest, "sse_ping_interval", limits.MIN_PING_INTERVAL, 1e-9),
    (TokenizeRequest, "content", "a" * limits.MAX_TEXT, ["a" * limits.MAX_TEXT, 1, "a"]),
    (ChatRequest, "chat_template_kwargs", {"a": "b" * (KWARGS - 8)}, {"a": ["b"] * KWARGS}),
]


@pytest.mark.parametrize(
    ("cls", "name", "most", "more"), BOUNDS, ids=[f"{b[0].__name__}-{b[1]}" for b in BOUNDS]
)
def test_every_list_and_number_has_a_maximum(cls: Any, name: str, most: Any, more: Any) -> None:
    parse(cls, {name: most})
    with pytest.raises(InvalidRequestError) as caught:
        parse(cls, {name: more})
    assert caught.value.param in (name, f"{name}[1]")
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("cls", "name", "wrap"),
    [
        (ChatRequest, "messages", lambda n: [{"role": "user", "content": [PART] * n}]),
        (
            ChatRequest,
            "messages",
            lambda n: [*HI, {"role": "assistant", "tool_calls": [CALL] * n}, *HI],
        ),
        (MessagesRequest, "messages", lambda n: [{"role": "user", "content": [PART] * n}]),
        (
            ResponsesRequest,
            "input",
            lambda n: [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * n}],
        ),
    ],
)
def test_a_message_has_so_many_parts(cls: Any, name: str, wrap: Any) -> None:
    parse(cls, {name: wrap(MAX_PARTS)})
    with pytest.raises(InvalidRequestError, match=f"{MAX_PARTS} (are allowed|items)") as caught:
        parse(cls, {name: wrap(MAX_PARTS + 1)})
    assert (caught.value.param or "").startswith(f"{name}[")


def calling(n: int) -> dict[str, Any]:
    function = {"name": "f", "arguments": f'{{"a":"{"b" * (n - 8)}"}}'}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


def test_the_arguments_of_a_call_are_so_long() -> None:
    parse(ChatRequest, {"messages": [*HI, calling(MAX_ARGUMENTS), *HI]})
    with pytest.raises(InvalidRequestError, match=f"{MAX_ARGUMENTS} are allowed"):
        parse(ChatRequest, {"messages": [*HI, calling(MAX_ARGUMENTS + 1), *HI]})
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": " " * 2**21}
    with pytest.raises(InvalidRequestError, match=f"{MAX_ARGUMENTS} are allowed"):
        parse(ResponsesRequest, {"input": [OUR_ITEM, call]})


async def test_a_flag_says_how_many_logprobs_there_may_be() -> None:
    include = ["message.output_text.logprobs"]
    async with client_of(answering("Hello"), max_logprobs=5) as client:
        for path, fields, param in (
            ("/v1/completions", {"prompt": "a", "logprobs": 6}, "logprobs"),
            ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 6}, "top_logprobs"),
            ("/v1/chat/completions", {**CHAT, "n_probs": 6}, "n_probs"),
            (
                "/v1/responses",
                {"input": "a", "include": include, "top_logprobs": 6},
                "top_logprobs",
            ),
        ):
            answer = await client.post(path, json=fields)
            wanted = error_body(f"'{param}' must be at most 5, which --max-logprobs sets.", param)
            assert (answer.status_code, answer.json()) == (400, wanted)
            fewer = fields | {param: 5}
            assert (await client.post(path, json=fewer)).status_code == 200


async def test_other_routes_and_defaults_are_not_refused() -> None:
    async with client_of(answering("Hello"), max_logprobs=5) as client:
        answer = await client.post("/completion", json={"prompt": "a", "n_probs": 6})
        assert answer.status_code == 200
        answer = await client.post("/v1/chat/completions", json={**CHAT, "logprobs": True})
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["logprobs"]["content"]


def test_the_server_pings_no_more_often_than_a_request_may_ask() -> None:
    assert Config(sse_ping_interval=0.1).sse_ping_interval == 0.1
    assert Config(sse_ping_interval=-1).sse_ping_interval == -1
    with pytest.raises(ConfigError, match=r"at least 0\.1"):
        Config(sse_ping_interval=0.01)
