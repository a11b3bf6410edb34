"""Tools that Anthropic's models know by their type, and changes of tools in a conversation."""

from __future__ import annotations

from typing import Any, get_args

import anthropic
import pytest
from anthropic.types import BrowserMemberName, ComputerMemberName, browser_member_input
from anthropic.types.computer_member_input import ComputerMemberInput

from tests.support.anthropic_api import ASK, WEATHER
from tests.support.clients import use_anthropic
from tests.support.scripts import noting
from tests.support.tool_calls import calls
from trioserve.api.anthropic.client_tools import members_of
from trioserve.api.anthropic.request import MessagesRequest
from trioserve.chat.params import ToolChoice
from trioserve.errors import InvalidRequestError

COMPUTER = {"type": "computer_toolset_20260801"}
BROWSER = {"type": "browser_toolset_20260801"}
SCREEN = {"name": "computer", "display_width_px": 800, "display_height_px": 600}


def request_of(*tools: Any, **fields: Any) -> MessagesRequest:
    return MessagesRequest.parse(ASK | {"tools": [*tools], **fields})


def names_of(request: MessagesRequest) -> list[str]:
    return [tool["function"]["name"] for tool in request.tools]


@pytest.mark.parametrize(
    ("tool", "names", "inputs"),
    [
        (COMPUTER, ComputerMemberName, ComputerMemberInput),
        (BROWSER, BrowserMemberName, browser_member_input.BrowserMemberInput),
    ],
)
def test_members_of_toolsets_have_the_inputs_that_the_sdk_reads(
    tool: Any, names: Any, inputs: Any
) -> None:
    members = members_of(tool, "tools[0]")
    assert [each.name for each in members] == [*get_args(names)]
    functions = {each["function"]["name"]: each["function"] for each in request_of(tool).tools}
    for member, model in zip(members, get_args(inputs), strict=True):
        schema = functions[member.function]["parameters"]
        theirs = {each.alias or name: each for name, each in model.model_fields.items()}
        assert set(schema["properties"]) == set(theirs), member
        needed = {name for name, each in theirs.items() if each.is_required()}
        assert set(schema["required"]) == needed, member


@pytest.mark.parametrize(
    ("kind", "more", "has", "lacks"),
    [
        ("computer_20241022", {}, "left_click_drag", "scroll"),
        ("computer_20250124", {}, "scroll", "zoom"),
        ("computer_20251124", {"enable_zoom": True}, "zoom", "list_tabs"),
    ],
)
def test_the_older_tool_has_actions(kind: str, more: Any, has: str, lacks: str) -> None:
    (tool,) = request_of({"type": kind, **SCREEN, **more}).tools
    function = tool["function"]
    actions = function["parameters"]["properties"]["action"]["enum"]
    assert function["name"] == "computer" and "800 by 600 pixels" in function["description"]
    assert has in actions and lacks not in actions
    assert function["parameters"]["required"] == ["action"]
    with pytest.raises(InvalidRequestError, match=r"tools\[0\].display_width_px"):
        request_of({"type": kind, "name": "computer"})


def test_members_can_be_switched_off() -> None:
    configs = {"zoom": {"enabled": False}, "key": {"enabled": None, "defer_loading": True}}
    names = names_of(request_of(COMPUTER | {"configs": configs}))
    assert "computer_key" in names and "computer_zoom" not in names
    chosen = request_of(COMPUTER, WEATHER, tool_choice={"type": "tool", "name": "computer"})
    assert chosen.chat_params.tool_choice == ToolChoice("required", tuple(chosen.offer.members))
    # A tool of the client's with the name of a member is the client's.
    own = request_of(COMPUTER, WEATHER | {"name": "computer_key"})
    assert names_of(own).count("computer_key") == 1 and "computer_key" not in own.offer.members


async def test_the_sdk_runs_a_member_of_a_toolset() -> None:
    backend, seen = noting(
        calls(("computer_left_click", {"coordinate": [5, 7]})), n_ctx=2**16, n_ctx_seq=2**15
    )

    def use(client: anthropic.Anthropic) -> None:
        asked: dict[str, Any] = {**ASK, "tools": [COMPUTER, BROWSER]}
        answer = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        for message in (answer, streamed):
            (call,) = message.content
            assert call.type == "tool_use" and message.stop_reason == "tool_use"
            assert (call.name, call.toolset_name) == ("left_click", "computer")
            assert call.input == {"coordinate": [5, 7]}
        state = {
            "type": "browser_state",
            "tabs": [{"tab_id": "t1", "title": "Pandas", "url": "https://a.org", "active": True}],
            "state_changes": [{"type": "tab_opened", "tab_id": "t1"}],
        }
        result = {
            "type": "tool_result",
            "tool_use_id": answer.content[0].to_dict()["id"],
            "toolset_name": "computer",
            "content": [{"type": "text", "text": "Done."}, state],
        }
        turns = [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
        client.messages.create(**{**asked, "messages": [*ASK["messages"], *turns]})

    await use_anthropic(backend, use)
    assert "computer_left_click" in seen[-1]
    assert "Done.\nTabs:\n[t1] Pandas https://a.org (active)\ntab_opened (tab_id: t1)" in seen[-1]


def changed(*changes: tuple[str, Any]) -> list[dict[str, Any]]:
    blocks = [{"type": f"tool_{kind}", "tool": tool} for kind, tool in changes]
    return [*ASK["messages"], {"role": "system", "content": blocks}]


def test_a_conversation_changes_its_tools() -> None:
    reference = {"type": "tool_reference", "name": "weather"}
    more = {"type": "tool_definition", "definition": WEATHER | {"name": "more"}}
    gone = ("removal", reference)
    of_mcp = {"type": "mcp_toolset_reference", "server_name": "x"}
    for changes, names in (
        ([gone], []),
        ([gone, ("addition", reference)], ["weather"]),
        ([("addition", more), gone], ["more"]),
        ([("addition", reference), ("removal", of_mcp)], ["weather"]),
        ([("removal", {"type": "tool_reference", "name": "unknown"})], ["weather"]),
    ):
        request = request_of(WEATHER, messages=changed(*changes))
        assert names_of(request) == names and len(request.messages) == 1
    summary = {
        "type": "compaction",
        "content": "So far.",
        "tool_changes": changed(gone)[1]["content"],
    }
    turns = [*ASK["messages"], {"role": "assistant", "content": [summary]}, *ASK["messages"]]
    assert names_of(request_of(WEATHER, messages=turns)) == []
    with pytest.raises(InvalidRequestError) as caught:
        request_of(messages=changed(("addition", {"type": "tool_definition"})))
    assert caught.value.param == "messages[1].content[0].tool.definition"


@pytest.mark.parametrize("tool", [COMPUTER, WEATHER])
def test_tools_and_changes_are_bounded(tool: Any) -> None:
    """A toolset costs as much as all of its members, also where it is repeated."""
    more = ("addition", {"type": "tool_definition", "definition": tool})
    for fields, param in (
        ({"tools": [tool] * 1025}, "tools"),
        ({"messages": 2 * changed(*[more] * 600)}, "messages"),
    ):
        with pytest.raises(InvalidRequestError, match="1024 are allowed") as caught:
            MessagesRequest.parse(ASK | fields)
        assert caught.value.param == param


def test_thinking_between_tools_is_off() -> None:
    request = request_of(thinking={"type": "between_tools"})
    assert request.chat_params.template_kwargs["enable_thinking"] is False
