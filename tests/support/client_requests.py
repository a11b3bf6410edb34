"""Requests in the shape in which programs send them, by program: what a server has to answer.

A request is its path, its body (none: a GET), and what its answer must have, if anything.
"""

from __future__ import annotations

from typing import Any

import attrs

from tests.support.custom_tools import APPLY_PATCH, PATCH, namespace


@attrs.frozen
class ClientRequest:
    """A request of a program, and what it is."""

    program: str
    name: str
    path: str
    body: dict[str, Any] | None = None
    headers: dict[str, str] = attrs.field(factory=dict)

    def __str__(self) -> str:
        return f"{self.program}: {self.name}"


USER = {"role": "user", "content": "Hi"}
#: A request for JSON. A script answers it with `FILLED`.
FILL = {"role": "user", "content": "Fill in the form."}
FILLED = '{"title": "A", "tags": null}'
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"

OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string", "description": "A path."}},
    "required": ["path"],
    "additionalProperties": False,
}
#: As generators of schemas write one, with what only describes it.
GENERATED = {**OBJECT, "$schema": "http://json-schema.org/draft-07/schema#", "title": "ReadArgs"}
#: As a form of a page has it.
FORM: dict[str, Any] = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "tags": {"type": ["array", "null"]}},
    "required": ["title", "tags"],
    "additionalProperties": False,
}


def function(name: str, parameters: Any = OBJECT, **more: Any) -> dict[str, Any]:
    """A function of a chat."""
    inner = {"name": name, "description": f"Runs {name}.", "parameters": parameters, **more}
    return {"type": "function", "function": inner}


def flat(name: str, **more: Any) -> dict[str, Any]:
    """A function of the Responses API."""
    return {
        "type": "function",
        "name": name,
        "description": f"Runs {name}.",
        "strict": False,
        "parameters": OBJECT,
        **more,
    }


def anthropic(name: str, **more: Any) -> dict[str, Any]:
    """A function of Anthropic's API."""
    return {"name": name, "description": f"Runs {name}.", "input_schema": GENERATED, **more}


def said(text: str, kind: str = "input_text", role: str = "user") -> dict[str, Any]:
    """A message of the Responses API."""
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def called(content: str | None = None) -> list[dict[str, Any]]:
    """A chat whose model has called a tool, as clients send it back."""
    call = {"name": "read", "arguments": '{"path": "a.py"}'}
    assistant = {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
    }
    return [USER, assistant, {"role": "tool", "tool_call_id": "call_1", "content": "print(1)"}]


# -- Codex


CODEX_TOOLS = [
    flat("exec_command"),
    flat("write_stdin"),
    flat("update_plan"),
    flat("request_user_input"),
    flat("view_image"),
    namespace("multi_agent_v1", "spawn_agent", "send_input", "wait_agent", "close_agent"),
    {"type": "web_search", "external_web_access": False},
]
CODEX: dict[str, Any] = {
    "model": "gpt-5.5-codex",
    "instructions": "You are a coding agent.",
    "input": [said("<permissions instructions>", role="developer"), said("Fix the bug.")],
    "tools": CODEX_TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0197e2",
    "client_metadata": {"x-codex-installation-id": "1"},
}
KNOWN_MODEL = [
    *CODEX_TOOLS[:3],
    APPLY_PATCH,
    {"type": "local_shell"},
    {
        "type": "tool_search",
        "execution": "client",
        "description": "Searches deferred tools.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}, "limit": {"type": "number"}},
            "required": ["query"],
            "additionalProperties": False,
        },
    },
    {"type": "image_generation", "output_format": "png"},
]
CODEX_TURN = [
    said("Fix the bug."),
    {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAAB"},
    said("I look.", "output_text", "assistant"),
    {
        "type": "function_call",
        "name": "spawn_agent",
        "namespace": "multi_agent_v1",
        "arguments": '{"a": "look"}',
        "call_id": "call_1",
    },
    {"type": "function_call_output", "call_id": "call_1", "output": "done"},
    {"type": "custom_tool_call", "call_id": "call_2", "name": "apply_patch", "input": PATCH},
    {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Success."},
    {
        "type": "local_shell_call",
        "id": "lsh_1",
        "call_id": "call_3",
        "status": "completed",
        "action": {"type": "exec", "command": ["ls"], "env": None, "timeout_ms": None},
    },
    {"type": "function_call_output", "call_id": "call_3", "output": "a.py"},
    {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
    {
        "type": "tool_search_call",
        "call_id": "call_4",
        "execution": "client",
        "arguments": {"query": "calendar"},
        "status": "completed",
    },
    {
        "type": "tool_search_output",
        "call_id": "call_4",
        "execution": "client",
        "status": "completed",
        "tools": [namespace("mcp__calendar", "create_event")],
    },
]
LITE = {
    **{name: value for name, value in CODEX.items() if name not in ("tools", "instructions")},
    "input": [
        {
            "type": "additional_tools",
            "role": "developer",
            "tools": [
                {**namespace("functions", "exec"), "tools": [flat("exec"), APPLY_PATCH]},
                {"type": "web_search"},
            ],
        },
        said("You are a coding agent.", role="developer"),
        said("Fix the bug."),
    ],
    "parallel_tool_calls": False,
}

# -- Claude Code


CLAUDE_SYSTEM = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=12345;"},
    {
        "type": "text",
        "text": "You are Claude Code.",
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
    },
]
CLAUDE: dict[str, Any] = {
    "model": "claude-opus-4-8",
    "max_tokens": 32000,
    "system": CLAUDE_SYSTEM,
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Today.</system-reminder>"},
                {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}},
            ],
        }
    ],
    "tools": [
        anthropic("Bash"),
        anthropic("Read", eager_input_streaming=True),
        anthropic("Edit", cache_control={"type": "ephemeral"}),
    ],
    "metadata": {"user_id": '{"device_id":"1","session_id":"2"}'},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "temperature": 1,
    "stream": True,
}
BETA = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    "x-app": "cli",
}
CLAUDE_TURN = [
    USER,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "", "signature": "EqQBCgIYAhIM"},
            {"type": "text", "text": "I read it."},
            {
                "type": "tool_use",
                "id": "toolu_1",
                "name": "Read",
                "input": {"path": "a"},
                "caller": {"type": "direct"},
            },
            {"type": "tool_use", "id": "toolu_2", "name": "Bash", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": [{"type": "text", "text": "1"}],
            },
            {
                "type": "tool_result",
                "tool_use_id": "toolu_2",
                "content": "no",
                "is_error": True,
                "cache_control": {"type": "ephemeral"},
            },
        ],
    },
]
SEARCHED = [
    USER,
    {
        "role": "assistant",
        "content": [
            {
                "type": "server_tool_use",
                "id": "srvtoolu_1",
                "name": "web_search",
                "input": {"query": "x"},
            },
            {
                "type": "web_search_tool_result",
                "tool_use_id": "srvtoolu_1",
                "content": [
                    {
                        "type": "web_search_result",
                        "url": "https://example.org",
                        "title": "X",
                        "encrypted_content": "Eq",
                        "page_age": None,
                    }
                ],
            },
            {
                "type": "text",
                "text": "It is X.",
                "citations": [{"type": "web_search_result_location", "url": "https://example.org"}],
            },
        ],
    },
    USER,
]
DEFERRED = [
    USER,
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "1", "name": "ToolSearch", "input": {}}],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "1",
                "content": [{"type": "tool_reference", "tool_name": "Read"}],
            }
        ],
    },
]

# -- Ollama


OLLAMA_OPTIONS = {
    "num_ctx": 131072,
    "num_gpu": 99,
    "num_thread": 8,
    "num_batch": 1024,
    "use_mmap": False,
    "use_mlock": True,
    "numa": True,
    "main_gpu": 1,
    "low_vram": True,
    "f16_kv": True,
    "penalize_newline": False,
    "tfs_z": 0.5,
    "seed": 2**63 - 1,
    "temperature": 0.7,
    "top_k": 40,
    "repeat_last_n": 64,
}

# -- Open WebUI


#: Fields that the page sends with a chat, and that a server may get.
OPEN_WEBUI_PAGE: dict[str, Any] = {
    "chat_id": "0f8b",
    "id": "9a1c",
    "session_id": "k3",
    "files": [{"type": "file", "id": "f1", "name": "a.txt"}],
    "tool_ids": ["server:0"],
    "tool_servers": [],
    "filter_ids": [],
    "features": {
        "voice": False,
        "image_generation": False,
        "code_interpreter": False,
        "web_search": False,
        "memory": False,
    },
    "variables": {"{{USER_NAME}}": "Ada", "{{CURRENT_DATE}}": "2026-01-01"},
    "model_item": {"id": "local", "object": "model", "owned_by": "openai", "openai": {}},
    "background_tasks": {
        "title_generation": True,
        "tags_generation": True,
        "follow_up_generation": True,
    },
    "metadata": {"user_id": "u", "chat_id": "0f8b", "message_id": "9a1c", "variables": {}},
}


def open_webui_task(name: str) -> tuple[str, str, Any]:
    """A request of Open WebUI to the model beside the chat: titles, tags, and the like."""
    metadata = {"task": f"{name}_generation", "task_body": {"model": "local"}, "chat_id": "0f8b"}
    said = [{"role": "user", "content": f"### Task:\nGenerate {name} for the chat as JSON."}]
    task = {"model": "local", "messages": said, "stream": False, "metadata": metadata}
    return name.replace("_", " "), CHAT, {**task, "max_completion_tokens": 1000}


# -- all of them


_ALL: dict[str, list[tuple[str, str, Any]]] = {
    "Codex": [
        ("default", RESPONSES, CODEX),
        ("a known model", RESPONSES, {**CODEX, "tools": KNOWN_MODEL, "text": {"verbosity": "low"}}),
        ("the turn after calls", RESPONSES, {**CODEX, "input": CODEX_TURN, "tools": KNOWN_MODEL}),
        ("a newer model's tools", RESPONSES, LITE),
        ("a detailed summary", RESPONSES, {**CODEX, "reasoning": {"summary": "detailed"}}),
        ("no reasoning", RESPONSES, {**CODEX, "reasoning": None, "include": []}),
        (
            "a form of the answer",
            RESPONSES,
            {
                **CODEX,
                "input": [said(FILL["content"])],
                "tools": [],
                "text": {
                    "format": {
                        "type": "json_schema",
                        "strict": True,
                        "schema": FORM,
                        "name": "codex_output_schema",
                    }
                },
            },
        ),
    ],
    "Codex --oss": [
        ("the version", "/api/version", None),
        ("the models", "/api/tags", None),
        ("a chat", RESPONSES, {**CODEX, "model": "gpt-oss:20b", "reasoning": {"effort": "low"}}),
    ],
    "Claude Code": [
        ("a chat", MESSAGES + "?beta=true", CLAUDE),
        ("the turn after calls", MESSAGES, {**CLAUDE, "messages": CLAUDE_TURN}),
        ("after a search", MESSAGES, {**CLAUDE, "messages": SEARCHED}),
        (
            "deferred tools",
            MESSAGES,
            {
                **CLAUDE,
                "messages": DEFERRED,
                "tools": [anthropic("ToolSearch"), anthropic("Read", defer_loading=True)],
            },
        ),
        (
            "a search of the web",
            MESSAGES,
            {
                **CLAUDE,
                "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
                "thinking": {"type": "disabled"},
            },
        ),
        (
            "a title",
            MESSAGES,
            {
                "model": "claude-haiku-4-5",
                "max_tokens": 512,
                "messages": [FILL],
                "output_config": {"format": {"type": "json_schema", "schema": FORM}},
                "temperature": 1,
                "stream": True,
                "system": [{"type": "text", "text": "Make a title."}],
                "tools": [],
            },
        ),
        (
            "counting",
            MESSAGES + "/count_tokens?beta=true",
            {"model": "claude-opus-4-8", "messages": CLAUDE_TURN, "tools": CLAUDE["tools"]},
        ),
        (
            "the speed of a subscription",
            MESSAGES,
            {
                **CLAUDE,
                "speed": "fast",
                "service_tier": "auto",
                "container": {"skills": []},
                "mcp_servers": [{"type": "url", "url": "https://example.org", "name": "x"}],
            },
        ),
    ],
    "Anthropic's SDK": [
        (
            "client tools",
            MESSAGES,
            {
                "model": "claude-opus-4-8",
                "max_tokens": 1024,
                "messages": [USER],
                "tools": [
                    {"type": "bash_20250124", "name": "bash"},
                    {
                        "type": "text_editor_20250728",
                        "name": "str_replace_based_edit_tool",
                        "max_characters": 10000,
                    },
                    {"type": "memory_20250818", "name": "memory"},
                ],
            },
        ),
        (
            "older client tools",
            MESSAGES,
            {
                "model": "claude-3-7-sonnet",
                "max_tokens": 1024,
                "messages": [USER],
                "tools": [
                    {"type": "bash_20241022", "name": "bash"},
                    {"type": "text_editor_20250124", "name": "str_replace_editor"},
                ],
                "tool_choice": {"type": "tool", "name": "bash"},
            },
        ),
        (
            "examples of input",
            MESSAGES,
            {
                "model": "claude-opus-4-8",
                "max_tokens": 1024,
                "messages": [USER],
                "tools": [
                    anthropic("f", input_examples=[{"path": "a.py"}], strict=True),
                    {"type": "code_execution_20250825", "name": "code_execution"},
                    anthropic("g", allowed_callers=["code_execution_20250825"]),
                ],
            },
        ),
        (
            "a cited document",
            MESSAGES,
            {
                "model": "claude-opus-4-8",
                "max_tokens": 1024,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "document",
                                "source": {
                                    "type": "text",
                                    "media_type": "text/plain",
                                    "data": "The sky is blue.",
                                },
                                "citations": {"enabled": True},
                            },
                            {"type": "text", "text": "Which color?"},
                        ],
                    }
                ],
            },
        ),
    ],
    "opencode": [
        (
            "a chat",
            CHAT,
            {
                "model": "local",
                "max_tokens": 32000,
                "messages": [{"role": "system", "content": "You are opencode."}, USER],
                "tools": [function("bash"), function("edit", GENERATED)],
                "tool_choice": "auto",
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        ),
        (
            "the turn after calls",
            CHAT,
            {
                "messages": called(),
                "tools": [function("read")],
                "stream": True,
                "reasoning_effort": "high",
                "textVerbosity": "low",
            },
        ),
    ],
    "Qwen Code": [
        (
            "a chat",
            CHAT,
            {
                "model": "qwen3-coder-plus",
                "messages": [
                    {
                        "role": "system",
                        "content": [
                            {
                                "type": "text",
                                "text": "You are Qwen Code.",
                                "cache_control": {"type": "ephemeral"},
                            }
                        ],
                    },
                    USER,
                ],
                "tools": [function("read_file"), function("todo_write")],
                "stream": True,
                "stream_options": {"include_usage": True},
                "metadata": {"sessionId": "1", "promptId": "2"},
                "vl_high_resolution_images": True,
                "temperature": 0,
                "top_p": 1,
            },
        ),
        ("the turn after calls", CHAT, {"messages": called(""), "tools": [function("read")]}),
    ],
    "Cline": [
        (
            "a chat",
            CHAT,
            {
                "model": "local",
                "messages": [{"role": "system", "content": "You are Cline."}, USER],
                "temperature": 0,
                "max_tokens": -1,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        ),
        (
            "native calls",
            CHAT,
            {
                "model": "local",
                "messages": [
                    {"role": "developer", "content": "You are Cline."},
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "<task>Hi</task>"},
                            {"type": "text", "text": "<environment_details>"},
                        ],
                    },
                ],
                "tools": [function("execute_command", OBJECT, strict=True)],
                "tool_choice": "auto",
                "parallel_tool_calls": False,
                "reasoning_effort": "medium",
                "max_completion_tokens": 4096,
                "stream": True,
            },
        ),
    ],
    "Continue": [
        (
            "a chat",
            CHAT,
            {
                "messages": [USER],
                "model": "local",
                "max_tokens": 2048,
                "temperature": 0.5,
                "stream": True,
                "stop": ["<|im_end|>"],
                "parallel_tool_calls": False,
            },
        ),
        (
            "an edit with a prediction",
            CHAT,
            {
                "messages": [USER],
                "model": "local",
                "prediction": {"type": "content", "content": "def f(): pass"},
                "stream": True,
            },
        ),
        (
            "autocompletion",
            "/v1/completions",
            {
                "model": "local",
                "prompt": "def f(",
                "max_tokens": 32,
                "temperature": 0.01,
                "stop": ["\n\n", "/src/"],
                "stream": True,
                "frequency_penalty": None,
                "parallel_tool_calls": False,
            },
        ),
        (
            "autocompletion by Ollama",
            "/api/generate",
            {
                "model": "local",
                "prompt": "def f(",
                "raw": True,
                "keep_alive": 1800,
                "options": {"num_predict": 32, "num_ctx": 8192, "num_gpu": -1, "stop": ["\n\n"]},
            },
        ),
    ],
    "pi": [
        (
            "a chat",
            CHAT,
            {
                "model": "local",
                "messages": [{"role": "developer", "content": "You are pi."}, USER],
                "stream": True,
                "stream_options": {"include_usage": True},
                "store": False,
                "max_completion_tokens": 16384,
                "tools": [function("bash", OBJECT, strict=False)],
                "reasoning_effort": "minimal",
                "prompt_cache_key": "s",
                "prompt_cache_retention": "24h",
            },
        ),
        (
            "responses",
            RESPONSES,
            {
                "model": "local",
                "input": [
                    {"role": "developer", "content": "You are pi."},
                    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                ],
                "stream": True,
                "store": False,
                "tools": [flat("bash", strict=None)],
                "reasoning": {"effort": "medium", "summary": "concise"},
                "include": ["reasoning.encrypted_content"],
                "service_tier": "flex",
            },
        ),
    ],
    "aider": [
        (
            "a chat",
            CHAT,
            {
                "model": "local",
                "messages": [
                    {"role": "system", "content": "Act as an expert."},
                    USER,
                    {"role": "assistant", "content": "Ok."},
                    USER,
                ],
                "temperature": 0,
                "stream": True,
            },
        ),
        (
            "by Ollama",
            "/api/chat",
            {
                "model": "local",
                "messages": [USER],
                "options": {"temperature": 0, "num_ctx": 65536},
                "stream": True,
            },
        ),
    ],
    "gptme": [
        (
            "a chat",
            CHAT,
            {
                "model": "local",
                "messages": [
                    {"role": "system", "content": [{"type": "text", "text": "You are gptme."}]},
                    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                ],
                "temperature": 0,
                "top_p": 0.1,
                "stream": True,
                "tools": [function("shell", OBJECT, strict=True)],
                "max_completion_tokens": None,
                "stream_options": {"include_usage": True},
            },
        ),
    ],
    "AI SDK": [
        (
            "responses",
            RESPONSES,
            {
                "model": "local",
                "input": [
                    {"role": "developer", "content": "Be kind."},
                    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                    {
                        "type": "reasoning",
                        "id": "rs_1",
                        "encrypted_content": None,
                        "summary": [{"type": "summary_text", "text": "Hm."}],
                    },
                    {
                        "role": "assistant",
                        "content": [{"type": "output_text", "text": "Well."}],
                        "id": "msg_1",
                    },
                    {"role": "user", "content": [{"type": "input_text", "text": "And?"}]},
                ],
                "tools": [flat("f"), {"type": "web_search_preview", "search_context_size": "low"}],
                "tool_choice": "auto",
                "include": ["web_search_call.action.sources", "code_interpreter_call.outputs"],
                "store": False,
                "truncation": "auto",
                "stream": True,
            },
        ),
        (
            "a chat",
            CHAT,
            {
                "model": "local",
                "messages": called("I read it."),
                "tools": [function("read", OBJECT, strict=True)],
                "tool_choice": {"type": "auto"},
                "seed": 4611686018427387904,
                "user": "u",
                "logit_bias": {},
                "verbosity": "low",
                "service_tier": "auto",
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        ),
        (
            "an object",
            CHAT,
            {
                "model": "local",
                "messages": [FILL],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": FORM, "strict": True, "name": "response"},
                },
            },
        ),
        (
            "Anthropic's provider",
            MESSAGES,
            {
                "model": "local",
                "max_tokens": 4096,
                "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
                "tools": [
                    anthropic("f"),
                    {"type": "web_fetch_20250910", "name": "web_fetch", "max_uses": 1},
                ],
                "tool_choice": {"type": "auto"},
                "stream": True,
            },
        ),
        (
            "Ollama's provider",
            "/api/chat",
            {
                "model": "local",
                "messages": [USER],
                "options": {"num_ctx": 32768, "temperature": 0},
                "think": False,
                "truncate": True,
                "shift": True,
                "stream": True,
                "tools": [function("f")],
            },
        ),
    ],
    "LangChain": [
        (
            "a chat",
            CHAT,
            {
                "model": "local",
                "messages": [{"content": "Hi", "role": "user"}, *called()[1:]],
                "tools": [function("read")],
                "tool_choice": "required",
                "parallel_tool_calls": False,
                "n": 1,
                "seed": 20251124235959123,
                "top_logprobs": 0,
                "store": None,
                "stream": False,
            },
        ),
        (
            "responses",
            RESPONSES,
            {
                "model": "local",
                "input": [{"role": "user", "content": "Hi"}],
                "tools": [flat("f"), {"type": "file_search", "vector_store_ids": ["vs_1"]}],
                "include": ["file_search_call.results"],
                "truncation": "auto",
                "stream": False,
            },
        ),
        (
            "ChatOllama",
            "/api/chat",
            {
                "model": "local",
                "messages": [{"role": "user", "content": "Hi", "images": []}],
                "options": OLLAMA_OPTIONS,
                "format": None,
                "keep_alive": None,
                "think": None,
                "stream": True,
            },
        ),
        (
            "ChatAnthropic",
            MESSAGES,
            {
                "model": "local",
                "max_tokens": 1024,
                "messages": [{"role": "user", "content": "Hi"}],
                "tools": [anthropic("f", input_examples=[{"path": "a"}])],
                "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            },
        ),
    ],
    "LlamaIndex": [
        (
            "a chat",
            CHAT,
            {
                "model": "local",
                "messages": [{"role": "system", "content": None}, *called()],
                "tools": [function("read", {**OBJECT, "type": "object"})],
                "tool_choice": "auto",
                "stream": False,
            },
        ),
        (
            "Ollama",
            "/api/chat",
            {
                "model": "local",
                "messages": [USER],
                "options": {"temperature": 0.75, "num_ctx": 262144},
                "keep_alive": "5m",
                "stream": False,
            },
        ),
    ],
    "pydantic-ai": [
        (
            "a chat",
            CHAT,
            {
                "model": "local",
                "messages": [{"role": "system", "content": "Be kind."}, USER],
                "tools": [function("f", OBJECT, strict=True), function("final_result", FORM)],
                "tool_choice": "required",
                "n": 1,
                "stream": False,
            },
        ),
        (
            "responses",
            RESPONSES,
            {
                "model": "local",
                "input": [{"role": "user", "content": "Hi"}],
                "tools": [flat("final_result", strict=True), {"type": "code_interpreter"}],
                "tool_choice": "auto",
                "instructions": "Be kind.",
                "include": ["code_interpreter_call.outputs", "reasoning.encrypted_content"],
                "reasoning": {"summary": "detailed"},
                "stream": True,
            },
        ),
    ],
    "smolagents": [
        (
            "a chat",
            CHAT,
            {
                "model": "local",
                "messages": [
                    {"role": "system", "content": [{"type": "text", "text": "Solve tasks."}]},
                    {"role": "user", "content": [{"type": "text", "text": "New task: Hi"}]},
                ],
                "stop": ["Observation:", "Calling tools:"],
                "tools": [function("final_answer", {**OBJECT, "required": []})],
                "tool_choice": "required",
            },
        ),
    ],
    "DSPy": [
        (
            "a chat",
            CHAT,
            {
                "model": "local",
                "messages": [{"role": "system", "content": "Your fields."}, FILL],
                "temperature": 0.0,
                "max_tokens": 4000,
                "response_format": {"type": "json_object"},
                "web_search_options": {"search_context_size": "low"},
            },
        ),
    ],
    "instructor": [
        (
            "a tool",
            CHAT,
            {
                "model": "local",
                "messages": [USER],
                "tools": [function("Form", FORM)],
                "tool_choice": {"type": "function", "function": {"name": "Form"}},
                "metadata": {"a": "b"},
            },
        ),
        (
            "a schema",
            CHAT,
            {
                "model": "local",
                "messages": [FILL],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "Form", "schema": FORM},
                },
            },
        ),
    ],
    "guidance": [
        (
            "a chat",
            CHAT,
            {
                "model": "local",
                "messages": [USER, {"role": "assistant", "content": None}],
                "logprobs": True,
                "top_logprobs": 1,
                "stream": True,
                "stream_options": {"include_usage": True},
                "add_generation_prompt": True,
                "continue_final_message": False,
            },
        ),
    ],
    "LiteLLM": [
        (
            "a chat",
            CHAT,
            {
                "model": "local",
                "messages": [USER],
                "user": "u",
                "safety_identifier": "s",
                "web_search_options": {},
                "modalities": ["text"],
                "seed": -9007199254740993,
                "extra_headers": {},
                "tools": [{"type": "web_search_preview"}, function("f")],
            },
        ),
        (
            "Anthropic's messages",
            MESSAGES,
            {
                "model": "local",
                "max_tokens": 100,
                "messages": [USER],
                "metadata": {"user_id": "u"},
                "inference_geo": "us",
            },
        ),
    ],
    "lm-eval": [
        (
            "a chat",
            CHAT,
            {
                "messages": [{"role": "user", "content": "Q", "type": "text"}],
                "model": "local",
                "max_tokens": 16,
                "temperature": 0,
                "stop": ["\n\n"],
                "seed": 1234,
            },
        ),
        (
            "a completion",
            "/v1/completions",
            {
                "prompt": ["Question:"],
                "model": "local",
                "max_tokens": 16,
                "temperature": 0,
                "stop": ["Question:"],
                "seed": 1234,
                "logprobs": 1,
            },
        ),
    ],
    "Open WebUI": [
        (
            "a chat",
            CHAT,
            {
                "stream": True,
                "model": "local",
                "messages": [{"role": "user", "content": "Hi"}],
                "metadata": {"chat_id": "1"},
                "params": {},
                "logit_bias": {},
                "function_calling": "native",
            },
        ),
        (
            "a chat by Ollama",
            "/api/chat",
            {
                "model": "local:latest",
                "messages": [USER],
                "options": {"num_ctx": 2048, "num_keep": 24, "num_thread": 4, "seed": 1},
                "keep_alive": "10m",
                "stream": True,
            },
        ),
        (
            "a chat of the page",
            CHAT,
            {
                "model": "local",
                "messages": [{"role": "system", "content": "Be kind."}, USER],
                "stream": True,
                "stream_options": {"include_usage": True},
                "params": {},
                **OPEN_WEBUI_PAGE,
            },
        ),
        open_webui_task("title"),
        open_webui_task("tags"),
        open_webui_task("follow_up"),
        ("the models", "/v1/models", None),
        ("the version", "/api/version", None),
        ("the models by Ollama", "/api/tags", None),
        ("the loaded models", "/api/ps", None),
        (
            "a chat of the page by Ollama",
            "/api/chat",
            {
                "model": "local:latest",
                "messages": [{"role": "user", "content": "Hi", "images": []}],
                "options": {
                    "temperature": 0.8,
                    "mirostat": 0,
                    "mirostat_eta": 0.1,
                    "mirostat_tau": 5.0,
                    "num_ctx": 4096,
                    "num_predict": 128,
                    "repeat_penalty": 1.1,
                    "stop": ["\n\n\n"],
                },
                "format": None,
                "think": False,
                "stream": True,
                **OPEN_WEBUI_PAGE,
            },
        ),
        (
            "a title by Ollama",
            "/api/chat",
            {
                "model": "local:latest",
                "messages": [{"role": "user", "content": "### Task:\nGenerate a title."}],
                "stream": False,
                "options": {"num_predict": 1000},
                "metadata": {"task": "title_generation"},
            },
        ),
    ],
    "Ollama": [
        (
            "the command's chat",
            "/api/chat",
            {
                "model": "local",
                "messages": [USER],
                "stream": True,
                "format": "",
                "options": {},
                "keep_alive": None,
                "think": None,
                "truncate": None,
            },
        ),
        (
            "a text with all options",
            "/api/generate",
            {
                "model": "local",
                "prompt": "Hi",
                "options": OLLAMA_OPTIONS,
                "context": [],
                "stream": False,
            },
        ),
        (
            "calls and results",
            "/api/chat",
            {
                "model": "local",
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [
                            {"function": {"index": 0, "name": "f", "arguments": {"path": "a"}}}
                        ],
                    },
                    {"role": "tool", "tool_name": "f", "content": "1"},
                ],
                "tools": [function("f")],
                "stream": False,
            },
        ),
    ],
    "OpenAI's SDK": [
        (
            "the Agents SDK",
            RESPONSES,
            {
                "model": "local",
                "input": [{"content": "Hi", "role": "user"}],
                "include": ["computer_call_output.output.image_url"],
                "instructions": "Be kind.",
                "tools": [
                    flat("f", strict=True),
                    {"type": "shell", "environment": {"type": "local"}},
                    {"type": "apply_patch"},
                    {
                        "type": "mcp",
                        "server_label": "x",
                        "server_url": "https://example.org",
                        "require_approval": "never",
                    },
                ],
                "stream": True,
            },
        ),
        (
            "streamed candidates",
            CHAT,
            {"messages": [USER], "logprobs": True, "top_logprobs": 2, "stream": True, "n": 2},
        ),
    ],
    "MCP clients": [
        (
            "tools of a server",
            CHAT,
            {
                "messages": [USER],
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "mcp__files__read",
                            "description": None,
                            "parameters": GENERATED,
                            "strict": None,
                        },
                        "annotations": {"readOnlyHint": True},
                    }
                ],
            },
        ),
    ],
}

REQUESTS: list[ClientRequest] = [
    ClientRequest(program, name, path, body, BETA if path.startswith(MESSAGES) else {})
    for program, requests in _ALL.items()
    for name, path, body in requests
]
