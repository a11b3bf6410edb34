"""Bodies of requests in which any one value is another: each is read, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tests.support.scripts import HI
from trioserve.api.anthropic.request import MessagesRequest
from trioserve.api.base.chat_request import ChatRequest
from trioserve.api.llama.completion import LlamaCompletionRequest
from trioserve.api.ollama.request import OllamaChatRequest, OllamaGenerateRequest
from trioserve.api.openai.responses.request import ResponsesRequest
from trioserve.chat.messages import parse_messages, parse_tools
from trioserve.errors import InvalidRequestError

VALUES: list[Any] = [
    None, True, -1, 10**30, 1e308, "", "\0", "none", "function", "9" * 5000, [], [[]], [None], [1],
    {}, {"type": {}}, {"type": []}, {"type": "text"}, [{"type": "function"}], {"a": {"b": [{}]}},
    {"$ref": "#"}, {"$ref": f"#/a/{'9' * 5000}"},
]  # fmt: skip

SCHEMA = {
    "type": "object",
    "properties": {"a": {"allOf": [{"type": "string", "pattern": "a"}], "enum": ["a"]}},
    "required": ["a"],
}
FUNCTION = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True},
}
CHAT = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "b"},
    ],
    "tools": [FUNCTION],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "logit_bias": {"1": 1},
    "stop": ["a"],
    "stream_options": {"include_usage": True},
    "trioserve_run_tools": {"tools": ["a"]},
    "chat_template_kwargs": {"a": 1},
    "lora": [{"id": 0, "scale": 1}],
    "samplers": ["top_k"],
    "dry_sequence_breakers": ["a"],
    "max_tokens": 1,
}
RESPONSES = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "a",
            "output": [{"type": "input_text", "text": "b"}],
        },
        {"type": "custom_tool_call", "call_id": "b", "name": "c", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "x"},
        {
            "type": "local_shell_call",
            "call_id": "c",
            "action": {
                "type": "exec",
                "command": ["ls"],
                "env": {"A": "b"},
                "timeout_ms": 1,
                "working_directory": "/",
            },
        },
        {"type": "local_shell_call_output", "id": "c", "output": "x"},
        {"type": "shell_call", "call_id": "d", "action": {"commands": ["ls"], "timeout_ms": 1}},
        {
            "type": "shell_call_output",
            "call_id": "d",
            "output": [{"stdout": "a", "stderr": "b", "outcome": {"type": "exit", "exit_code": 0}}],
        },
        {
            "type": "apply_patch_call",
            "call_id": "e",
            "operation": {"type": "update_file", "path": "a", "diff": "d"},
        },
        {"type": "apply_patch_call_output", "call_id": "e", "status": "completed", "output": "x"},
        {
            "type": "tool_search_call",
            "call_id": "f",
            "execution": "client",
            "arguments": {"query": "a"},
        },
        {
            "type": "tool_search_output",
            "call_id": "f",
            "execution": "client",
            "tools": [
                {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]}
            ],
        },
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "a"}],
            "content": [{"type": "reasoning_text", "text": "a"}],
        },
        {"type": "mcp_call", "id": "g", "name": "f", "arguments": "{}", "output": "x"},
        {"type": "additional_tools", "tools": [{"type": "function", "name": "h"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "a", "annotations": []}],
        },
    ],
    "tools": [
        {"type": "function", "name": "f", "parameters": SCHEMA},
        {
            "type": "custom",
            "name": "c",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"},
        },
        {"type": "shell", "environment": {"type": "local"}},
        {"type": "tool_search", "execution": "client", "description": "d", "parameters": {}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]},
    ],
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "f"}],
    },
    "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "stream_options": {},
}
MESSAGES = {
    "model": "m",
    "max_tokens": 1,
    "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {
                    "type": "document",
                    "source": {"type": "text", "media_type": "text/plain", "data": "d"},
                    "citations": {"enabled": False},
                },
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"},
                },
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "a", "signature": "s"},
                {"type": "tool_use", "id": "a", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "a",
                    "content": [{"type": "text", "text": "b"}],
                    "is_error": False,
                }
            ],
        },
    ],
    "tools": [
        {"name": "f", "description": "d", "input_schema": SCHEMA, "input_examples": [{}]},
        {"type": "bash_20250124", "name": "bash"},
    ],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "stop_sequences": ["a"],
    "metadata": {"user_id": "a"},
    "output_config": {"effort": "low"},
    "context_management": {"edits": []},
}
OLLAMA = {
    "model": "m",
    "messages": [
        {"role": "user", "content": "a", "images": ["aaaa"]},
        {
            "role": "assistant",
            "content": "",
            "thinking": "a",
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}, "id": "a"}],
        },
        {"role": "tool", "content": "b", "tool_name": "f"},
    ],
    "tools": [FUNCTION],
    "format": SCHEMA,
    "options": {"num_predict": 1, "stop": ["a"], "num_ctx": 10},
    "keep_alive": "5m",
    "think": "low",
}
GENERATE = {
    "model": "m",
    "prompt": "a",
    "system": "b",
    "images": ["aaaa"],
    "format": "json",
    "options": {"num_predict": 1},
    "keep_alive": "1h2m",
}
COMPLETION = {
    "prompt": ["a", 1],
    "stop": ["a"],
    "logit_bias": [[1, 1]],
    "json_schema": SCHEMA,
    "samplers": ["top_k"],
    "lora": [{"id": 0, "scale": 1}],
    "response_fields": ["a/b"],
    "n_probs": 1,
}

REQUESTS: Mapping[str, tuple[Callable[[dict[str, Any]], object], dict[str, Any]]] = {
    "chat": (ChatRequest.parse, CHAT),
    "responses": (ResponsesRequest.parse, RESPONSES),
    "messages": (MessagesRequest.parse, MESSAGES),
    "ollama": (OllamaChatRequest.parse, OLLAMA),
    "generate": (OllamaGenerateRequest.parse, GENERATE),
    "completion": (LlamaCompletionRequest.parse, COMPLETION),
}


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values inside of a value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in pairs:
        yield (*place, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*place, key))


def changed(body: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    whole = copy.deepcopy(body)
    inner: Any = whole
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = copy.deepcopy(value)
    return whole


@pytest.mark.parametrize("name", REQUESTS)
def test_a_body_with_another_value_is_read_or_refused(name: str) -> None:
    parse, body = REQUESTS[name]
    parse(copy.deepcopy(body))
    failed = []
    for place in places(body):
        for value in VALUES:
            try:
                request: Any = parse(changed(body, place, value))
                if name != "completion":  # `Server` finds nothing wrong with its form
                    parse_messages(getattr(request, "messages", HI) or HI)
                    parse_tools(getattr(request, "tools", ()))
            except InvalidRequestError as error:
                if error.param is None or error.param not in error.message:
                    failed.append((place, value, repr(error)))
            except Exception as error:
                failed.append((place, value, repr(error)))
    assert failed == []
