"""Bodies of requests in which any one value is another: each is read, or refused by name."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.client_requests import REQUESTS
from tests.support.scripts import HI
from trioserve.app import create_app
from trioserve.chat.messages import parse_messages, parse_tools
from trioserve.errors import InvalidRequestError

VALUES: list[Any] = [
    None, True, -1, 10**30, 1e308, "", "\0", "none", "function", "9" * 5000, [], [[]], [None], [1],
    {}, {"type": {}}, {"type": []}, {"type": "text"}, [{"type": "function"}], {"a": {"b": [{}]}},
    {"$ref": "#"}, {"$ref": f"#/a/{'9' * 5000}"},
]  # fmt: skip

FUNCTION = {"type": "function", "name": "f"}

#: Bodies with fields that the programs do not send.
MORE: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "messages": HI,
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "logit_bias": {"1": 1},
            "stop": ["a"],
            "trioserve_run_tools": {"tools": ["a"]},
            "chat_template_kwargs": {"a": 1},
            "dry_sequence_breakers": ["a"],
        },
    ),
    (
        "/completion",
        {
            "prompt": ["a", 1],
            "logit_bias": [[1, 1]],
            "json_schema": {"enum": ["a"]},
            "samplers": ["top_k"],
            "lora": [{"id": 0, "scale": 1}],
            "response_fields": ["a/b"],
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"type": "local_shell_call_output", "id": "c", "output": "x"},
                {
                    "type": "shell_call",
                    "call_id": "d",
                    "action": {"commands": ["ls"], "timeout_ms": 1},
                },
                {
                    "type": "shell_call_output",
                    "call_id": "d",
                    "output": [
                        {
                            "stdout": "a",
                            "stderr": "b",
                            "outcome": {"type": "exit", "exit_code": 0},
                        }
                    ],
                },
                {
                    "type": "apply_patch_call",
                    "call_id": "e",
                    "operation": {"type": "update_file", "path": "a", "diff": "d"},
                },
                {"type": "apply_patch_call_output", "call_id": "e", "status": "completed"},
                {"type": "mcp_call", "id": "g", "name": "f", "arguments": "{}", "output": "x"},
            ],
            "tools": [FUNCTION, {"type": "namespace", "name": "n", "tools": [FUNCTION]}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION]},
        },
    ),
    ("/api/chat", {"messages": [{**HI[0], "images": ["aaaa"]}], "format": {"type": "object"}}),
    ("/api/generate", {"prompt": "a", "images": ["aaaa"], "keep_alive": "1h2m"}),
]


def bodies() -> dict[Any, list[dict[str, Any]]]:
    """The bodies of each request class."""
    classes = {one.path: one.takes for one in create_app().state.routes if one.method == "POST"}
    found = defaultdict(list)
    for path, body in [*((one.path, one.body) for one in REQUESTS), *MORE]:
        if body is not None and hasattr(classes.get(path), "parse"):
            found[classes[path]].append(body)
    return found


BODIES = {cls.__name__: (cls, some) for cls, some in bodies().items()}


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """The places of all values inside of a value, and a name that those of one kind share."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        kind = inner.get("type", "") if isinstance(inner, dict) else ""
        name = key if isinstance(key, str) else f"[{kind}]"
        yield (*place, key), name
        if isinstance(inner, dict | list):
            yield from ((below, f"{name}.{more}") for below, more in places(inner, (*place, key)))


def changed(body: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    whole = copy.deepcopy(body)
    inner: Any = whole
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = copy.deepcopy(value)
    return whole


@pytest.mark.parametrize("name", BODIES)
def test_a_body_with_another_value_is_read_or_refused(name: str) -> None:
    cls, some = BODIES[name]
    seen, failed = set(), []
    for body in some:
        cls.parse(copy.deepcopy(body))
        new = {kind: place for place, kind in places(body) if kind not in seen}
        seen |= new.keys()
        for place, value in ((place, value) for place in new.values() for value in VALUES):
            try:
                request: Any = cls.parse(changed(body, place, value))
                if hasattr(request, "chat_params"):  # `Server` finds nothing wrong with its form
                    parse_messages(request.messages or HI)
                    parse_tools(getattr(request, "tools", ()))
            except InvalidRequestError as error:
                if error.param is None or error.param not in error.message:
                    failed.append((place, value, repr(error)))
            except Exception as error:
                failed.append((place, value, repr(error)))
    assert failed == []
