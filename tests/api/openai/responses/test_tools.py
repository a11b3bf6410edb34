"""Tools that are no functions: namespaces, custom tools, tools known by their type, hosted ones."""

from __future__ import annotations

import itertools
import json
from typing import Any

import openai
import pytest
from hypothesis import given, strategies as st

from tests.api.openai.responses.test_routes import events_in
from tests.support.clients import client_of, use_openai
from tests.support.custom_tools import APPLY_PATCH, PATCH, namespace
from tests.support.scripts import answering, noting
from tests.support.tool_calls import calls
from trioserve.api.base.custom_tools import TextArgument
from trioserve.api.openai.responses.request import ResponsesRequest
from trioserve.chat.params import ToolChoice
from trioserve.errors import InvalidRequestError
from trioserve.testing import ScriptedBackend
from trioserve.types import MediaSource

FREE = {"type": "custom", "name": "say"}


async def output_of(text: str, *tools: Any, **body: Any) -> list[dict[str, Any]]:
    """The output of a response, which its stream must agree with."""
    async with client_of(answering(text)) as client:
        asked = {"input": "Hi", "tools": tools, **body}
        whole = (await client.post("/v1/responses", json=asked)).json()["output"]
        stream = await client.post("/v1/responses", json={**asked, "stream": True})
    events = events_in(stream.text)
    done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    added = [each["item"] for each in events if each["type"] == "response.output_item.added"]
    assert [each["id"] for each in added] == [each["id"] for each in done]
    assert [stable(each) for each in whole] == [stable(each) for each in done]
    return done


def stable(item: dict[str, Any]) -> dict[str, Any]:
    """An item without its ids."""
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def chat_of(*tools: Any, **body: Any) -> tuple[ResponsesRequest, Any]:
    request = ResponsesRequest.parse({"input": "Hi", "tools": [*tools], **body})
    return request, request.chat


# -- namespaces


async def test_a_call_names_its_namespace() -> None:
    agents = namespace("multi_agent_v1", "spawn", "wait")
    text = calls(("spawn", {"a": "x"}), ("plain", {}))
    first, second = await output_of(text, agents, {"type": "function", "name": "plain"})
    assert stable(first) == {
        "type": "function_call",
        "name": "spawn",
        "namespace": "multi_agent_v1",
        "arguments": '{"a": "x"}',
        "status": "completed",
    }
    assert (second["name"], "namespace" in second) == ("plain", False)


async def test_functions_of_one_name_in_two_namespaces() -> None:
    tools = [namespace("a", "read", "list"), namespace("b", "read")]
    said = [
        {"type": "function_call", "namespace": "b", "name": "read", "call_id": "1", "arguments": ""}
    ]
    _, chat = chat_of(*tools, input=said)
    assert chat.tool_names == ["a__read", "list", "b__read"]
    assert chat.messages[0]["tool_calls"][0]["function"]["name"] == "b__read"
    (item,) = await output_of(calls(("b__read", {"a": "x"})), *tools)
    assert (item["namespace"], item["name"]) == ("b", "read")


def test_errors_name_the_tool_within_its_namespace() -> None:
    agents = namespace("a", "f", "g")
    agents["tools"][1]["parameters"] = 5
    with pytest.raises(InvalidRequestError) as caught:
        chat_of({"type": "web_search"}, agents)
    assert caught.value.param == "tools[1].tools[1].parameters"


# -- custom tools


@pytest.mark.parametrize("tool", [APPLY_PATCH, {**FREE, "name": "apply_patch"}])
async def test_a_custom_tool_takes_a_text(tool: Any) -> None:
    (item,) = await output_of(calls(("apply_patch", {"input": PATCH})), tool)
    assert stable(item) == {
        "type": "custom_tool_call",
        "name": "apply_patch",
        "input": PATCH,
        "status": "completed",
    }


async def test_the_sdk_reads_the_stream_of_a_custom_tool() -> None:
    def use(client: openai.OpenAI) -> None:
        with client.responses.stream(
            model="any", input="Hi", tools=[{"type": "custom", "name": "say"}]
        ) as stream:
            events = list(stream)
        deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == PATCH
        (done,) = [e for e in events if e.type == "response.custom_tool_call_input.done"]
        assert done.input == PATCH
        assert events[-1].response.output[0].input == PATCH

    await use_openai(answering(calls(("say", {"input": PATCH}))), use)


def test_the_grammar_of_a_custom_tool_constrains_its_text() -> None:
    _, chat = chat_of(APPLY_PATCH, FREE)
    patched, free = (tool["function"] for tool in chat.tools)
    (argument,) = patched["parameters"]["properties"].values()
    assert argument["pattern"].startswith(r"^(?:\*\*\* Begin Patch\n")
    assert "begin_patch hunk+ end_patch" in patched["description"]
    assert free["parameters"]["properties"] == {"input": {"type": "string"}}


def test_a_grammar_that_cannot_be_enforced_is_left_out() -> None:
    format = {"type": "grammar", "syntax": "regex", "definition": r"\bword"}
    _, chat = chat_of({**FREE, "format": format})
    assert chat.tools[0]["function"]["parameters"]["properties"] == {"input": {"type": "string"}}


def test_only_so_much_of_grammars_is_enforced() -> None:
    comment = "a" * 16_000
    format = {"type": "grammar", "syntax": "lark", "definition": f"start: /b/ //{comment}"}
    _, chat = chat_of(*({"type": "custom", "name": f"f{n}", "format": format} for n in range(6)))
    arguments = [tool["function"]["parameters"]["properties"]["input"] for tool in chat.tools]
    assert ["pattern" in one for one in arguments] == [True] * 4 + [False] * 2


@pytest.mark.parametrize("choice", ["auto", {"type": "allowed_tools", "mode": "auto"}])
def test_tools_in_namespaces_count(choice: Any) -> None:
    inner = [{"type": "function", "name": f"f{n}"} for n in range(40_000)]
    request: dict[str, Any] = {"tools": [{"type": "namespace", "name": "n", "tools": inner}]}
    if choice != "auto":
        request = {"tool_choice": {**choice, "tools": inner}}
    with pytest.raises(InvalidRequestError, match="and 1024 are allowed") as raised:
        ResponsesRequest.parse({"input": "Hi", **request})
    assert raised.value.param == ("tools" if choice == "auto" else "tool_choice.tools")


async def test_a_custom_call_comes_back_with_its_result() -> None:
    backend, prompts = noting("Done.")
    said = [
        {"role": "user", "content": "Edit."},
        {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": PATCH},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "Success."},
    ]
    await output_of_backend(backend, said, APPLY_PATCH)
    assert json.dumps({"input": PATCH}, ensure_ascii=False) in prompts[0]
    assert "Success." in prompts[0]


async def output_of_backend(backend: ScriptedBackend, said: Any, *tools: Any) -> Any:
    async with client_of(backend) as client:
        answer = await client.post("/v1/responses", json={"input": said, "tools": tools})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_call_that_is_cut_off() -> None:
    text = calls(("say", {"input": "aé\n😀 the rest"}))
    (item,) = await output_of(text, FREE, max_output_tokens=text.index("rest"))
    assert item["status"] == "incomplete"
    assert item["input"].startswith("aé\n")


@given(text=st.text(), ascii=st.booleans(), cuts=st.lists(st.integers(0, 200)))
def test_a_text_is_read_in_any_pieces(text: str, ascii: bool, cuts: list[int]) -> None:
    written = json.dumps({"input": text}, ensure_ascii=ascii)
    argument = TextArgument()
    places = [0, *sorted(min(cut, len(written)) for cut in cuts), len(written)]
    pieces = [written[i:j] for i, j in itertools.pairwise(places)]
    read = [argument.feed(piece) for piece in pieces]
    assert "".join(read) + argument.rest() == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\ud83d', "a"),
        ('{"input": "a\\ud83dx"}', "a\ufffdx"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "a\\', "a"),
        ('{"patch": "a"}', "a"),
        ('{"a": 1, "b": 2}', '{"a": 1, "b": 2}'),
        ("", ""),
    ],
)
def test_arguments_that_are_not_one_text(arguments: str, text: str) -> None:
    argument = TextArgument()
    assert argument.feed(arguments) + argument.rest() == text


# -- tools that are known by their type


CLICK = {"type": "click", "button": "left", "x": 5, "y": 7}
SCREEN = {"type": "computer_screenshot", "image_url": "https://example.org/screen.png"}
SHOWN = [
    {
        "type": "media",
        "media": MediaSource(
            kind="image", url=SCREEN["image_url"], param="input[1].output.image_url"
        ),
    }
]

CLIENT_CALLS: list[tuple[Any, Any, dict[str, Any], dict[str, Any], Any]] = [
    (
        {"type": "computer"},
        {"actions": [CLICK, {"type": "wait"}]},
        {
            "type": "computer_call",
            "actions": [CLICK, {"type": "wait"}],
            "pending_safety_checks": [],
        },
        {"output": SCREEN},
        SHOWN,
    ),
    (
        {
            "type": "computer_use_preview",
            "environment": "linux",
            "display_width": 800,
            "display_height": 600,
        },
        {"action": CLICK},
        {"type": "computer_call", "action": CLICK, "pending_safety_checks": []},
        {"output": SCREEN},
        SHOWN,
    ),
    (
        {"type": "local_shell"},
        {"command": ["ls", "-l"], "working_directory": "/tmp"},
        {
            "type": "local_shell_call",
            "action": {
                "type": "exec",
                "command": ["ls", "-l"],
                "env": {},
                "timeout_ms": None,
                "user": None,
                "working_directory": "/tmp",
            },
        },
        {"output": "a.py"},
        "a.py",
    ),
    (
        {"type": "shell", "environment": {"type": "local"}},
        {"commands": ["ls"]},
        {
            "type": "shell_call",
            "action": {"commands": ["ls"], "timeout_ms": None, "max_output_length": None},
            "environment": {"type": "local"},
        },
        {"output": [{"stdout": "a.py", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]},
        "a.py\n[exit code: 0]",
    ),
    (
        {"type": "apply_patch"},
        {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"},
        {
            "type": "apply_patch_call",
            "operation": {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"},
        },
        {"status": "failed", "output": "no such file"},
        "failed: no such file",
    ),
    (
        {"type": "tool_search", "execution": "client", "description": "Finds tools."},
        {"query": "calendar"},
        {"type": "tool_search_call", "execution": "client", "arguments": {"query": "calendar"}},
        {"execution": "client", "tools": [namespace("calendar", "create")]},
        '{"tools": ["create"]}',
    ),
]


@pytest.mark.parametrize(("tool", "arguments", "expected", "result", "told"), CLIENT_CALLS)
async def test_calls_of_tools_that_the_client_runs(
    tool: Any, arguments: Any, expected: dict[str, Any], result: dict[str, Any], told: Any
) -> None:
    name = "computer" if "computer" in tool["type"] else tool["type"]
    (item,) = await output_of(calls((name, arguments)), tool)
    assert stable(item) == {**expected, "status": "completed"}
    kind = "tool_search_output" if "search" in tool["type"] else f"{item['type']}_output"
    output = {"type": kind, "call_id": item["call_id"], **result}
    _, chat = chat_of(tool, input=[item, output])
    call, answer = chat.messages
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == arguments
    assert call["tool_calls"][0]["function"]["name"] == name
    assert (answer["content"], answer["tool_call_id"]) == (told, item["call_id"])


def test_the_id_of_a_local_shell_call_may_be_in_id() -> None:
    _, chat = chat_of(
        input=[
            {
                "type": "local_shell_call",
                "id": "1",
                "action": {"command": ["ls"], "env": {"A": "b"}},
            },
            {"type": "local_shell_call_output", "id": "1", "output": "x"},
        ]
    )
    call, answer = chat.messages
    assert call["tool_calls"][0]["id"] == answer["tool_call_id"] == "1"
    function = call["tool_calls"][0]["function"]
    assert json.loads(function["arguments"]) == {"command": ["ls"], "env": {"A": "b"}}


async def test_items_bring_tools() -> None:
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [namespace("a", "f"), FREE]},
        {"type": "tool_search_call", "execution": "client", "call_id": "1", "arguments": {}},
        {
            "type": "tool_search_output",
            "execution": "client",
            "call_id": "1",
            "tools": [{"type": "function", "name": "g", "defer_loading": True}],
        },
        {"role": "user", "content": "Hi"},
    ]
    _, chat = chat_of(input=items)
    assert chat.tool_names == ["f", "say", "g"]
    (item,) = await output_of(calls(("say", {"input": "x"})), input=items)
    assert item["type"] == "custom_tool_call"
    items[0]["tools"][1] = {**FREE, "format": {"type": "x"}}  # type: ignore[index]
    with pytest.raises(InvalidRequestError) as caught:
        chat_of(input=items)
    assert caught.value.param == "input[0].tools[1].format.type"


# -- tools that this server lacks


HOSTED = (
    "code_interpreter",
    "file_search",
    "image_generation",
    "mcp",
    "tool_search",
    "web_search",
    "web_search_preview",
)


async def test_hosted_tools_are_left_out() -> None:
    hosted = [{"type": kind, "server_label": "x"} for kind in HOSTED]
    container = {"type": "shell", "environment": {"type": "container_auto"}}
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    calls_of_them = [{"type": "web_search_call", "id": "1", "status": "completed"}]
    items = [*calls_of_them, {"role": "user", "content": "Hi"}]
    async with client_of(answering("Hello.")) as client:
        body = {"input": items, "tools": [*hosted, function, container]}
        answer = await client.post("/v1/responses", json=body)
    assert answer.status_code == 200
    assert answer.json()["tools"] == [{"description": None, "strict": False, **function}]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ToolChoice("auto")),
        ({"type": "custom", "name": "apply_patch"}, ToolChoice("required", ("apply_patch",))),
        ({"type": "function", "name": "f"}, ToolChoice("required", ("f",))),
        ({"type": "shell"}, ToolChoice("required", ("shell",))),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "file_search"}, {"type": "shell"}],
            },
            ToolChoice("auto", ("shell",)),
        ),
    ],
)
def test_a_choice_names_any_tool(choice: Any, expected: ToolChoice) -> None:
    tools = [APPLY_PATCH, namespace("a", "f"), {"type": "shell"}, {"type": "file_search"}]
    assert chat_of(*tools, tool_choice=choice)[1].tool_choice == expected
