"""The format of a template: of its family, derived, or plain."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import structlog

from tests.support.message_writers import DERIVED, Pattern, Writer, template_of
from trioserve.chat.formats.families import HERMES, PLAIN, THINK
from trioserve.chat.formats.syntax import JsonCall, Reasoning
from trioserve.chat.template.render import ChatTemplate

SHOWS_TOOLS = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "expected", "reasoning"),
    [
        ("{{ '<tool_call>' }}{{ '</think>' }}", HERMES, THINK),
        ("{{ '<tool_call>' }}", HERMES, None),
        ("{{ '<tool_call><function=' }}{{ '</think>' }}", PLAIN, THINK),
        ("{{ '[/THINK]' }}", PLAIN, Reasoning("[THINK]", "[/THINK]")),
        ("", PLAIN, None),
    ],
)
def test_a_template_without_calls(source: str, expected: Any, reasoning: Any) -> None:
    found = ChatTemplate(SHOWS_TOOLS + source).format
    assert (found.tool_calls, found.reasoning) == (expected.tool_calls, reasoning)


@pytest.mark.parametrize("name", sorted(DERIVED))
def test_findings_name_what_was_compared(name: str) -> None:
    writer = DERIVED[name]
    found = dict(ChatTemplate(template_of(writer)).recognized.findings)
    assert str(writer.format.tool_calls) in found.values()
    if writer.reasoning:
        assert found["reasoning_written"] == str(writer.format.reasoning)


def test_what_does_not_read_back_is_discarded() -> None:
    calls = DERIVED["glm-4"].write_calls
    assert isinstance(calls, Pattern)
    lossy = attrs.evolve(calls, value_in_jinja="(v if v is string else v | tojson)[-8:]")
    writer = attrs.evolve(DERIVED["glm-4"], write_calls=lossy)
    with structlog.testing.capture_logs() as logs:
        found = ChatTemplate(template_of(writer)).recognized
    assert (found.name, found.format.tool_calls) == ("plain", PLAIN.tool_calls)
    assert "are read as" in dict(found.findings)["discarded"]
    assert [line["event"] for line in logs] == ["derived format is discarded"]


def test_members_of_calls_have_any_names() -> None:
    pattern = Pattern(
        '{"kind": "function", "tool": "NAME", "input": INPUT, "at": 0}', around="<call>{}</call>"
    )
    found = ChatTemplate(template_of(Writer(format=PLAIN, write_calls=pattern))).format
    assert found.tool_calls is not None
    assert found.tool_calls.call == (
        JsonCall(
            name_keys=("tool",),
            arguments_keys=("input",),
            ignored_keys=("type", "id", "kind", "at"),
        ),
    )
