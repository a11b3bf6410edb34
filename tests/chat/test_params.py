"""The choice of the tools that may be called."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.tool_grammars import REQUIRED, TOOLS, tool
from trioserve.chat.params import ToolChoice, choose, parse_tool_choice
from trioserve.errors import InvalidRequestError


def test_choices() -> None:
    assert choose("auto", []) == ToolChoice("auto")
    assert choose("none", TOOLS) == ToolChoice("none")
    assert choose("required", TOOLS) == REQUIRED
    assert choose("stop", TOOLS) == ToolChoice("required", ("stop",))
    odd = ToolChoice("required", ("auto",))
    assert choose(odd, [tool("auto")]) == odd


@pytest.mark.parametrize(
    ("choice", "tools", "problem"),
    [
        ("nope", TOOLS, "'nope', which is not in 'tools'"),
        ("nope", [], "which is not in 'tools'"),
        (ToolChoice("auto", ("stop", "x")), TOOLS, "'x', which is not"),
        ("required", [], "there are no 'tools'"),
    ],
)
def test_choices_that_make_no_sense(choice: Any, tools: Any, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        choose(choice, tools)
    assert caught.value.param == "tool_choice"


F = {"type": "function", "function": {"name": "f"}}
G = {"type": "function", "function": {"name": "g"}}


def allowed(mode: Any, tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("value", "choice"),
    [
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        (F, ToolChoice("required", ("f",))),
        (allowed("auto", [F, G]), ToolChoice("auto", ("f", "g"))),
        (allowed("required", [F]), ToolChoice("required", ("f",))),
    ],
)
def test_a_choice(value: Any, choice: ToolChoice) -> None:
    assert parse_tool_choice(value) == choice


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("any", "tool_choice"),
        (5, "tool_choice"),
        ({}, "tool_choice"),
        ({"type": "custom"}, "tool_choice.custom.name"),
        ({"type": "other"}, "tool_choice"),
        ({"type": "function"}, "tool_choice.function.name"),
        ({"type": "function", "function": {"name": 5}}, "tool_choice.function.name"),
        ({"type": "allowed_tools"}, "tool_choice"),
        (allowed("none", [F]), "tool_choice.allowed_tools.mode"),
        (allowed("auto", {}), "tool_choice.allowed_tools.tools"),
        (allowed("auto", []), "tool_choice.allowed_tools.tools"),
        (allowed("auto", [F, {}]), "tool_choice.allowed_tools.tools[1].function.name"),
    ],
)
def test_a_fault_is_named(value: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_tool_choice(value)
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message
