"""Chats as plain text, by what a vocabulary can write."""

from __future__ import annotations

import pytest

from trioserve.chat.template.builtin import CHATML, template_named
from trioserve.chat.template.plain import plain_for, turn_ends
from trioserve.chat.template.render import ChatTemplate
from trioserve.errors import TemplateError

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]},
    {"role": "assistant", "content": " Yo\n"},
    {"role": "user", "content": "Bye"},
]


@pytest.mark.parametrize(
    ("missing", "prompt", "end"),
    [
        (
            "",
            "System:\nBe brief.\n\nUser:\nHi\nyou\n\nAssistant:\nYo\n\nUser:\nBye\n\nAssistant:\n",
            "\n\nUser:",
        ),
        (
            "SUTA",
            "system:\nBe brief.\n\nuser:\nHi\nyou\n\nassistant:\nYo\n\nuser:\nBye\n\nassistant:\n",
            "\nuser:",
        ),
        (
            ":",
            "System\nBe brief.\n\nUser\nHi\nyou\n\nAssistant\nYo\n\nUser\nBye\n\nAssistant\n",
            "\nAssistant",
        ),
        (
            "\n",
            "System: Be brief.  User: Hi\nyou  Assistant: Yo  User: Bye  Assistant:",
            " User:",
        ),
    ],
)
def test_it_is_written_with_what_there_is(missing: str, prompt: str, end: str) -> None:
    source = plain_for(lambda text: not set(text) & set(missing))
    assert ChatTemplate(source).render(TALK) == prompt
    assert end in turn_ends(source)


def test_a_prompt_begins_with_the_one_before() -> None:
    template = ChatTemplate(template_named("plain"))
    before = template.render(TALK[:2]) + "Yo"
    assert template.render(TALK).startswith(before)
    assert template.render(TALK[:3], add_generation_prompt=False) == before


def test_other_templates_have_no_ends() -> None:
    assert turn_ends(CHATML) == ()
    with pytest.raises(TemplateError, match="no place for a critic"):
        ChatTemplate(template_named("plain") + "{# 'critic' #}").render(
            [{"role": "critic", "content": "No."}]
        )
