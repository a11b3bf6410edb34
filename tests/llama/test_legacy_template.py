"""llama.cpp's built-in chat templates."""

from __future__ import annotations

import pytest

from trioserve.chat.template.builtin import CHATML, LegacyTemplate, template_named
from trioserve.chat.template.render import ChatTemplate
from trioserve.errors import InvalidRequestError, TemplateError
from trioserve.llama.model import apply_chat_template

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi there"},
    {"role": "user", "content": "Who are you?"},
]


@pytest.mark.parametrize(
    ("name", "ask"), [("chatml", False), ("llama3", True), ("gemma", True), ("command-r", False)]
)
def test_built_in_templates_write_what_their_jinja_writes(name: str, ask: bool) -> None:
    legacy, jinja = LegacyTemplate(name, apply_chat_template), ChatTemplate(template_named(name))
    wanted = jinja.render(CHAT, add_generation_prompt=ask)
    assert legacy.render(CHAT, add_generation_prompt=ask) == wanted


def test_a_built_in_template_is_found_by_the_jinja_that_it_is_like() -> None:
    assert LegacyTemplate(CHATML, apply_chat_template).render(CHAT) == LegacyTemplate(
        "chatml", apply_chat_template
    ).render(CHAT)


def test_a_text_longer_than_expected_is_whole() -> None:
    text = "é" * 5000
    chat = [{"role": "user", "content": text}]
    assert text in LegacyTemplate("bailing2", apply_chat_template).render(chat)
    assert apply_chat_template("vicuna-orca", [("user", "x")] * 500, True) is not None


def test_parts_of_a_message_are_lines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    prompt = LegacyTemplate("chatml", apply_chat_template).render(
        [{"role": "user", "content": parts}]
    )
    assert "user\none\ntwo<|im_end|>" in prompt


def test_jinja_that_is_like_no_built_in_template() -> None:
    with pytest.raises(TemplateError, match="no built-in template like this one"):
        LegacyTemplate("{{ messages }}", apply_chat_template)


@pytest.mark.parametrize(("text", "why"), [("a\0b", "null character"), ("\ud800", "surrogate")])
def test_text_that_is_no_c_string_is_refused(text: str, why: str) -> None:
    template = LegacyTemplate("chatml", apply_chat_template)
    with pytest.raises(InvalidRequestError, match=why) as raised:
        template.render([*CHAT, {"role": "user", "content": text}])
    assert raised.value.param == "messages[4]"


def test_tools_are_refused() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(InvalidRequestError, match="--no-jinja"):
        LegacyTemplate("chatml", apply_chat_template).render(CHAT, tools=[tool])


def test_messages_are_checked() -> None:
    with pytest.raises(InvalidRequestError):
        LegacyTemplate("chatml", apply_chat_template).render([{"role": "user"}])
