"""Every history that OpenAI's API takes, on every template: all of its texts, in their order."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tests.chat.template.histories import HISTORIES, History
from tests.support.vocabularies import chat_templates
from trioserve.chat.template.builtin import NAMES, template_named
from trioserve.chat.template.continuation import render_continued
from trioserve.chat.template.render import ChatTemplate
from trioserve.types.task import shared_length

_BUNDLED = Path(__file__).parents[3] / "examples" / "bundled_model" / "template.jinja"


def prompt_of(template: ChatTemplate, history: History) -> str:
    """Render a history as a server does."""
    last = history.messages[-1]
    if last["role"] == "assistant" and "tool_calls" not in last:
        return render_continued(
            template, template.format, history.messages, "auto", tools=history.tools
        )
    return template.render(history.messages, tools=history.tools)


def problems(template: ChatTemplate, history: History) -> list[str]:
    """Find what a prompt lacks."""
    prompt = prompt_of(template, history)
    names = [tool["function"]["name"] for tool in history.tools or ()]
    found = [f"lost: {text}" for text in (*history.texts, *names) if text not in prompt]
    at = 0
    for text in history.texts if history.is_ordered else ():
        place = prompt.find(text, at)
        if place < 0 and not found:
            found.append(f"moved: {text}")
        at = max(at, place)
    return found


def changes(template: ChatTemplate, history: History) -> list[str]:
    """Find the turns whose prompt does not begin with that of the turn before."""
    prompt = prompt_of(template, history)
    found = []
    roles = [message["role"] for message in history.messages]
    for n, (before, role) in enumerate(itertools.pairwise(roles), 1):
        if role != "assistant" or before == "assistant":
            continue
        begun = template.render(
            history.messages[:n], tools=history.tools, add_generation_prompt=False
        )
        ends = [begun.rfind(text) + len(text) for text in history.texts if text in begun]
        if ends and shared_length(begun, prompt) < max(ends):
            found.append(f"changed: the prompt of the first {n} messages")
    return found


#: Turns as every template takes them. Where their prefix changes, the template is why.
_LOOP = History().with_tools().say("user").call("weather", ids=["abcdefgh1"]).results()
_LOOP.say("assistant", "user")


def check(template: ChatTemplate) -> None:
    """Check all histories on a template."""
    wrong = {}
    for name, history in HISTORIES.items():
        found = problems(template, history)
        if not history.thoughts and not changes(template, _LOOP):
            found += changes(template, history)
        if found:
            wrong[name] = found
    assert not wrong


def template_of(name: str) -> ChatTemplate:
    """The bundled template, one of those by name, or one of llama.cpp's."""
    if name == "bundled":
        source = _BUNDLED.read_text("utf-8")
    else:
        source = (
            template_named(name) if name in NAMES else chat_templates()[name].read_text("utf-8")
        )
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


#: One of each kind: it takes everything; no roles but text; no system message; turns alternate.
FEW = ("bundled", "chatml", "gemma", "mistral-v1")
needs_sources = pytest.mark.needs("LLAMA_CPP_SDIST")


@pytest.mark.parametrize("name", FEW)
def test_histories(name: str) -> None:
    check(template_of(name))


@needs_sources
@pytest.mark.parametrize("name", sorted({*NAMES, *chat_templates()} - {*FEW}))
def test_histories_on_all_templates(name: str) -> None:
    check(template_of(name))


# -- mixtures

_ARGUMENTS = st.sampled_from([None, "", "{", "null", "[1]", '{"city": "x', '{"city": null}', "{}"])
_IDS = st.sampled_from([None, "x", "call_Ab1Cd2Ef3Gh4", "abcdefgh1"])


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Make a history of any messages, in any order."""
    made = History()
    if draw(st.booleans()):
        made.with_tools()
    for step in draw(st.lists(st.integers(0, 5), min_size=1, max_size=8)):
        if step < 3:
            made.say(("user", "assistant", "system")[step])
        elif step == 3:
            role = draw(st.sampled_from(["developer", "user", "assistant", "system"]))
            made.parts(role, draw(st.integers(1, 3)))
        else:
            names = draw(st.lists(st.sampled_from(["weather", "clock"]), min_size=1, max_size=3))
            ids = [draw(_IDS) for _ in names]
            given_ = [draw(_ARGUMENTS) for _ in names] if step == 4 else None
            content = made.text() if draw(st.booleans()) else None
            made.call(*names, content=content, arguments=given_, ids=ids)
            n_results = draw(st.integers(0, len(names)))
            if n_results:
                made.results(range(n_results))
    if "tool_calls" in made.messages[-1]:
        made.say("user")
    return made


def check_mixture(template: ChatTemplate, history: History) -> None:
    assert not problems(template, history), json.dumps(history.messages)


@pytest.mark.parametrize("name", FEW)
@settings(max_examples=25, deadline=None)
@given(history=histories())
def test_mixtures(name: str, history: History) -> None:
    check_mixture(_template(name), history)


@needs_sources
@pytest.mark.parametrize("name", sorted(chat_templates()))
@settings(max_examples=50, deadline=None)
@given(history=histories())
def test_mixtures_on_all_templates(name: str, history: History) -> None:
    check_mixture(_template(name), history)


_template = cache(template_of)
