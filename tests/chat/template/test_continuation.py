"""Prompts that continue a message, and where prompts diverge."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from tests.support.families import HARMONY, PLAIN, PLAIN_THINK
from tests.support.parsing import parse
from trioserve.chat.deltas import Message
from trioserve.chat.formats.syntax import ChatFormat
from trioserve.chat.template.builtin import CHATML
from trioserve.chat.template.continuation import (
    ContinueFinalMessage,
    continued_prompt_tail,
    find_divergence_points,
    render_continued,
)
from trioserve.chat.template.render import ChatTemplate
from trioserve.errors import InvalidRequestError, UnsupportedFieldError

USER = {"role": "user", "content": "Hi <think>"}
HEAD = "<|im_start|>user\nHi <think><|im_end|>\n<|im_start|>assistant\n"

#: Begins the reasoning, or ends it at once when there is to be none.
THINKING = CHATML + (
    "{%- if add_generation_prompt -%}{{- '<think>\\n' -}}"
    "{%- if enable_thinking is false -%}{{- '\\n</think>\\n\\n' -}}{%- endif -%}{%- endif -%}"
)


def said(content: Any = "", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def render(
    *messages: dict[str, Any],
    part: ContinueFinalMessage = "auto",
    source: str = CHATML,
    format: ChatFormat = PLAIN,
    **kwargs: Any,
) -> str:
    return render_continued(ChatTemplate(source), format, messages, part, kwargs=kwargs)


def test_the_prompt_ends_with_the_final_message() -> None:
    assert render(USER, said("The answer")) == HEAD + "The answer"
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "ill"}]
    assert render(USER, said(parts)) == HEAD + "Wh\n\nill"
    assert render(USER, said("")) == HEAD


def test_a_template_that_begins_the_answer_to_the_final_message() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' or not loop.last %}"
        "[{{ m.role }}]{{ m.content }};{% endif %}{% endfor %}[assistant]"
    )
    assert (
        render(USER, said("The answer"), source=source) == "[user]Hi <think>;[assistant]The answer"
    )
    prompt = render(said("A"), said("b"), source=source)
    assert prompt == "[user]Hello.;[assistant]A;[assistant]b"


@pytest.mark.parametrize(
    ("source", "kwargs"), [(CHATML, {}), (THINKING, {}), (THINKING, {"enable_thinking": False})]
)
def test_reasoning_is_written_anew(source: str, kwargs: dict[str, Any]) -> None:
    def prompt(last: dict[str, Any], part: ContinueFinalMessage = "auto") -> str:
        return render(USER, last, part=part, source=source, format=PLAIN_THINK, **kwargs)

    assert prompt(said("A")) == HEAD + "A"
    assert prompt(said("A", reasoning_content="so")) == HEAD + "<think>so</think>A"
    assert prompt(said(reasoning_content="so")) == HEAD + "<think>so"
    assert prompt(said(reasoning_content="so"), "content") == HEAD + "<think>so</think>"
    assert prompt(said("A", reasoning_content="so"), "reasoning_content") == HEAD + "<think>so"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([USER], "messages[0].role"),
        ([], "messages"),
        ([USER, said("A", tool_calls=[{"function": {"name": "f"}}])], "messages[1].tool_calls"),
        ([USER, said(5)], "messages[1].content"),
    ],
)
@pytest.mark.parametrize("part", get_args(ContinueFinalMessage))
def test_what_cannot_be_continued(
    messages: list[Any], param: str, part: ContinueFinalMessage
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(*messages, part=part)
    assert caught.value.param == param


def test_reasoning_is_content_of_a_model_that_writes_none() -> None:
    assert render(USER, said(reasoning_content="so")).endswith("so")
    with pytest.raises(UnsupportedFieldError) as caught:
        render(USER, said(reasoning_content="so"), part="reasoning_content")
    assert caught.value.param == "messages[1].reasoning_content"


HARMONIC = """\
{%- for m in messages -%}
{%- if m.role == 'assistant' and loop.last and m.thinking -%}
<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>
{%- endif -%}
<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif -%}
<|message|>{{ m.content }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}
"""


def test_a_message_in_a_channel_is_continued() -> None:
    head = "<|start|>user<|message|>Hi <think><|end|><|start|>assistant"
    said_so = said("A", reasoning_content="so")
    thought = "<|channel|>analysis<|message|>so"
    final = "<|channel|>final<|message|>A"

    def prompt(last: dict[str, Any]) -> str:
        return render(USER, last, source=HARMONIC, format=HARMONY)

    assert prompt(said("A")) == head + final
    assert prompt(said_so) == f"{head}{thought}<|end|><|start|>assistant{final}"
    assert prompt(said(reasoning_content="so")) == head + thought
    for last, message in (
        (said_so, Message(content=" x")),
        (said(reasoning_content="so"), Message(content="x", reasoning_content=" y")),
    ):
        tail = continued_prompt_tail([USER, last], "auto", HARMONY)
        text = " x" if message.content == " x" else f" y<|end|><|start|>assistant{final[:-1]}x"
        assert parse([text], HARMONY, parse_tools=False, prompt_tail=tail) == message


def test_reasoning_that_the_template_has_begun_is_closed() -> None:
    source = CHATML.replace("+ message.content", "+ '<think>\\n' + message.content")

    def prompt(last: dict[str, Any]) -> str:
        return render(last, source=source, format=PLAIN_THINK)

    head = "<|im_start|>assistant\n<think>"
    assert prompt(said("A")) == head + "\n</think>A"
    assert prompt(said("A", reasoning_content="so")) == head + "so</think>A"
    assert prompt(said(reasoning_content="so")) == head + "so"


def parsed(text: str, last: dict[str, Any]) -> Message:
    tail = continued_prompt_tail([USER, last], "auto", PLAIN_THINK)
    return parse([text], PLAIN_THINK, parse_tools=False, prompt_tail=tail)


def test_the_answer_is_what_is_added() -> None:
    message = parsed(" I see</think>\nYes", said(reasoning_content="so"))
    assert (message.reasoning_content, message.content) == (" I see", "Yes")
    message = parsed("\n2. <think>", said("1. Look for <think>"))
    assert (message.reasoning_content, message.content) == ("", "\n2. <think>")


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


PARTS = [{"type": "text", "text": "Hello"}, {"type": "text", "text": " you"}]


@pytest.mark.parametrize(
    ("messages", "source", "expected"),
    [
        ([SYSTEM, user("Hello")], CHATML, ["Hello<|im_end|>", "<|im_start|>"]),
        ([user(PARTS)], CHATML, ["Hello\n you<|im_e", "<|im_start|>"]),
        (
            [SYSTEM, user("one"), said("two"), user("three")],
            CHATML,
            ["one<|im_end|>\n", "three<|im_end|>", "<|im_start|>"],
        ),
        (
            [SYSTEM, user("one"), said("calling"), {"role": "tool", "content": "sunny"}],
            FORGETS,
            ["one<assistant>c", "<assistant>"],
        ),
        ([SYSTEM], CHATML, ["<|im_start|>"]),
        # A variant that the template refuses is left out.
        ([SYSTEM, user("Hello")], STRICT, ["Hello<|im_end|>"]),
        # The end of the text is not a place.
        ([user("xyz")], "{{ messages[-1].content }}", []),
    ],
)
def test_places_at_which_prompts_diverge(
    messages: list[dict[str, Any]], source: str, expected: list[str]
) -> None:
    template = ChatTemplate(source)
    text = template.render(messages)
    places = find_divergence_points(template, text, messages)
    assert [text[place:][: len(one)] for place, one in zip(places, expected, strict=True)] == (
        expected
    )


@pytest.mark.parametrize("content", ["apple", "  and", "b", "\n", "", "a"])
def test_whatever_the_question_begins_with(content: str) -> None:
    template, messages = ChatTemplate(CHATML), [SYSTEM, user(content)]
    text = template.render(messages)
    places = find_divergence_points(template, text, messages)
    assert any(text[:place].endswith("|im_start|>user\n") for place in places)
