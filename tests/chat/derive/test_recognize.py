"""The format of a template: of its family, derived, or plain."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import structlog
from hypothesis import given, settings, strategies as st

from tests.support.message_writers import DERIVED, Pattern, Writer, template_of
from trioserve.chat.derive.probes import ARGUMENTS, NAMES, Answer
from trioserve.chat.formats.families import HERMES, PLAIN, THINK
from trioserve.chat.formats.syntax import JsonCall, Reasoning, described
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


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("<|header_start|>", "llama-4"),
        ("call as functools[...]<|end|>", "phi-4-mini"),
        ("<|startoftext|><|extra_0|>", "hunyuan-a13b"),
    ],
)
def test_models_that_write_otherwise_than_their_templates(source: str, name: str) -> None:
    """Here the templates write calls that could be derived."""
    calls = "{% for m in messages if m.tool_calls %}{{ m.tool_calls | tojson }}{% endfor %}"
    template = ChatTemplate(SHOWS_TOOLS + source + calls)
    assert template.capabilities.supports_tool_calls
    assert template.recognized.name == name


@pytest.mark.parametrize("name", sorted(DERIVED))
def test_findings_name_what_was_compared(name: str) -> None:
    writer = DERIVED[name]
    found = dict(ChatTemplate(template_of(writer)).recognized.findings)
    assert described(writer.format.tool_calls) in found.values()
    if writer.reasoning:
        assert found["reasoning_written"] == described(writer.format.reasoning)


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


FRAGMENTS = [
    *"<>[]{}()= :,\n'x", "<a>", "</a>", "<b=", "NAME", "INPUT", "KEY", "VALUE", "NUMBER", "[ARGS]",
    "functions.", ":0", "</think>", ' type="TYPE"', '"arguments": ', '"',
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=9).map("".join)


@settings(max_examples=40, deadline=None)
@given(
    call=TEXTS,
    argument=TEXTS,
    join=TEXTS,
    around=st.tuples(TEXTS, TEXTS),
    reasoning=st.tuples(TEXTS, TEXTS),
)
def test_any_template_has_a_format(
    call: str, argument: str, join: str, around: tuple[str, str], reasoning: tuple[str, str]
) -> None:
    pattern = Pattern(
        f"{call}NAME{join}INPUT",
        argument,
        join=join,
        around="{}".join(one.replace("{}", "") for one in around),
        types=("a", "b"),
    )
    thinking = "{}".join(one.replace("{}", "") for one in reasoning)
    writer = Writer(format=PLAIN, write_calls=pattern, reasoning=thinking, prompt="<c>")
    found = ChatTemplate(template_of(writer)).recognized
    assert found.format.tool_calls is not None


@pytest.mark.parametrize("text", ["{" * 8000, "[" * 8000, "<" * 8000, "</think" * 9000])
def test_templates_that_write_a_lot(text: str) -> None:
    """Texts that would take the square of their length are short."""
    source = SHOWS_TOOLS + "{% for m in messages %}{% if m.tool_calls %}"
    source += f"{{{{ {text!r} }}}}{{{{ m.tool_calls | tojson }}}}{{% endif %}}{{% endfor %}}"
    template = ChatTemplate(source)
    assert template.capabilities.supports_tool_calls
    assert template.recognized.name == "plain"
    called = Answer(calls=((NAMES[0], ARGUMENTS),))
    assert bool(template.probes.written(called)) is (len(text) < 8192)


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


def test_findings_say_what_is_not_as_usual() -> None:
    calls = dict(ChatTemplate(template_of(DERIVED["hermes"])).recognized.findings)["call_as_json"]
    assert calls == (
        "ToolCalls(starts=('<tool_call>'), call=(JsonCall(ignored_keys=('type', 'id'))), "
        "closing=('</tool_call>'))"
    )
