"""The reasoning in an answer: grammars after it, and control tokens of its markers."""

from __future__ import annotations

import attrs
import pytest

from tests.support import families
from trioserve.chat.formats.syntax import ChatFormat
from trioserve.chat.grammar.answer import after_thinking
from trioserve.chat.parse.parser import preserved_tokens, thinking_of
from trioserve.chat.template.render import ChatTemplate
from trioserve.types import Grammar, Thinking

JSON = Grammar("json_object")
THINK = Thinking(start="<think>", end="</think>")
BEGUN = attrs.evolve(THINK, begun=True)


@pytest.mark.parametrize(
    ("tail", "may_begin", "thinking"),
    [
        ("<|im_start|>assistant\n", True, THINK),
        ("<|im_start|>assistant\n", False, None),
        ("assistant\n<think>\n", True, BEGUN),
        ("assistant\n<think>", False, BEGUN),
        ("assistant\n<think>\n\n</think>\n\n", True, None),
        ("", True, THINK),
    ],
)
def test_the_end_of_the_prompt_tells(tail: str, may_begin: bool, thinking: Thinking | None) -> None:
    assert thinking_of(families.HERMES_THINK, tail, may_begin=may_begin) == thinking


def test_formats_without_reasoning_and_with_channels() -> None:
    assert thinking_of(families.HERMES, "<think>", may_begin=True) is None
    thinking = thinking_of(families.HARMONY, "<|start|>assistant", may_begin=True)
    assert thinking == Thinking(start="<|channel|>analysis<|message|>", end="<|end|>")


CALL = Grammar("tools", "{}", triggers=(("<tool_call>",),))
KNOWS = attrs.evolve(JSON, triggers=(("</think>",), ("<tool_call>",)))


@pytest.mark.parametrize(
    ("grammar", "thinking", "reasoning_format", "later"),
    [
        (JSON, None, "auto", None),
        (JSON, THINK, "auto", THINK),
        (JSON, BEGUN, "auto", BEGUN),
        (JSON, THINK, "none", None),  # all of it is content
        (JSON, BEGUN, "none", BEGUN),
        (CALL, THINK, "none", THINK),
        (KNOWS, BEGUN, "auto", None),
    ],
)
def test_a_grammar_begins_after_reasoning(
    grammar: Grammar, thinking: Thinking | None, reasoning_format: str, later: Thinking | None
) -> None:
    made = after_thinking(grammar, families.HERMES_THINK, thinking, reasoning_format)
    assert made == attrs.evolve(grammar, thinking=later)


def test_channels_say_where_the_answer_begins() -> None:
    harmony = after_thinking(JSON, families.HARMONY, None, "auto")
    assert harmony.triggers == (("<|channel|>final",), ("<|message|>",))
    assert harmony.required
    call = Grammar("tools", "{}", required=True)
    thinking = thinking_of(families.HARMONY, "<|start|>assistant", may_begin=True)
    later = after_thinking(call, families.HARMONY, thinking, "auto")
    assert later == attrs.evolve(call, thinking=thinking)
    functionary = after_thinking(JSON, families.FUNCTIONARY_3_2, None, "auto")
    assert functionary.triggers == (("all\n",),)


# -- control tokens


def test_control_tokens_in_the_markers_are_visible() -> None:
    names = [b"<s>", b"[TOOL_CALLS]", b"[INST]", b"a", b"", b"[ARGS]", b"<unk>"]
    control = [0, 1, 2, 6]
    assert preserved_tokens(families.MISTRAL, control, names) == {1}
    assert preserved_tokens(families.PLAIN, control, names) == frozenset()


@pytest.mark.parametrize(
    ("format", "names"),
    [
        (families.HARMONY, ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>"]),
        (families.HERMES_THINK, ["<think>", "</think>", "<tool_call>", "</tool_call>"]),
        (families.COMMAND_R7B, ["<|START_THINKING|>", "<|START_ACTION|>", "<|START_RESPONSE|>"]),
        (families.KIMI_K2, ["<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"]),
        (families.MISTRAL_THINK, ["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"]),
    ],
)
def test_markers_of_real_models(format: ChatFormat, names: list[str]) -> None:
    table = [name.encode() for name in names]
    assert preserved_tokens(format, range(len(names)), table) == set(range(len(names)))


# -- the variables of the template


def test_llama_servers_variables() -> None:
    template = ChatTemplate(
        "{{ reasoning_strength }} {{ preserve_thinking }} {{ clear_thinking }}"
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    kwargs = {"reasoning_effort": "low", "preserve_reasoning": True}
    messages = [{"role": "user", "content": "Hi"}]
    assert template.render(messages, kwargs=kwargs) == "low True FalseHi"
    kwargs = {"reasoning_strength": "x", "preserve_reasoning": False}
    assert template.render(messages, kwargs=kwargs) == "x False TrueHi"
