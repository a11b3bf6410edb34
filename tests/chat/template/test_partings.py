"""Where a rendered chat and the prompt after it part."""

from __future__ import annotations

from typing import Any

import pytest

from trioserve.chat.template.partings import find_partings
from trioserve.chat.template.render import CHATML, ChatTemplate

#: Refuses a chat that does not end with an answer that is begun.
STRICT = "{%- if not add_generation_prompt -%}{{ raise_exception('no') }}{%- endif -%}" + CHATML

#: Shows the reasoning of the last answer only.
FORGETS = (
    "{%- for message in messages -%}{{- '<' + message.role + '>' -}}"
    "{%- if message.reasoning_content and loop.last -%}{{- message.reasoning_content -}}"
    "{%- endif -%}{{- message.content -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}"
)

SYSTEM = {"role": "system", "content": "Be brief."}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def heads(messages: list[dict[str, Any]], source: str = CHATML, **options: Any) -> list[str]:
    """What comes before each place: the last letters of it."""
    template = ChatTemplate(source)
    text = template.render(messages, **options)
    return [text[:place][-16:] for place in find_partings(template, text, messages, **options)]


def test_a_first_question() -> None:
    assert heads([SYSTEM, user("Hello")]) == ["|im_start|>user\n", "Hello<|im_end|>\n"]


@pytest.mark.parametrize("content", ["apple", "  and", "b", "\n", "", "a"])
def test_whatever_the_question_begins_with(content: str) -> None:
    assert "|im_start|>user\n" in heads([SYSTEM, user(content)])


def test_a_question_in_parts() -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": " you"}]
    assert heads([user(parts)])[0] == "|im_start|>user\n"


def test_a_later_turn() -> None:
    template = ChatTemplate(CHATML)
    messages = [SYSTEM, user("one"), said("two"), user("three")]
    text = template.render(messages)
    first, last, end = find_partings(template, text, messages)
    assert text[first:].startswith("one<")
    assert text[last:].startswith("three<")
    assert text[end:] == "<|im_start|>assistant\n"


def test_a_tool_result_at_the_end() -> None:
    template = ChatTemplate(FORGETS)
    messages = [SYSTEM, user("one"), said("calling"), {"role": "tool", "content": "sunny"}]
    text = template.render(messages)
    places = find_partings(template, text, messages)
    assert [text[place:] for place in places][-1] == "<assistant>"
    assert any(text[place:].startswith("one") for place in places)


def test_without_a_user() -> None:
    assert heads([SYSTEM]) == ["rief.<|im_end|>\n"]


def test_a_variant_that_the_template_refuses_is_left_out() -> None:
    assert heads([SYSTEM, user("Hello")], STRICT) == ["|im_start|>user\n"]


def test_no_place_is_at_an_end() -> None:
    template = ChatTemplate("{{ messages[-1].content }}")
    assert find_partings(template, "xyz", [user("xyz")]) == []
