"""What a chat says about which tools may be called."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.tool_grammars import REQUIRED, TOOLS, tool
from trioserve.chat.tool_choice import ToolChoice, choose
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
