"""Repairs of conversations: which a template needs, and what is changed."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from tests.chat.template.histories import History, tool
from trioserve.chat.messages import parse_messages
from trioserve.chat.template.builtin import CHATML
from trioserve.chat.template.render import ChatTemplate
from trioserve.chat.template.repairs import REPAIRS
from trioserve.chat.template.turns import FILLER, Turns

#: Takes calls whose results have the same ids, of nine characters; one call a message.
STRICT = """\
{%- for t in tools or [] %}{{ t.function.name }}{{ t.function.description + '' }}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('too late') }}{% endif -%}
[{{ m.role }}]{{ m.content + '' }}
{%- for call in m.tool_calls or [] -%}
{%- if loop.index > 1 or call.id | length != 9 %}{{ raise_exception('no') }}{% endif -%}
{{ call.function.name }}{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }}
{%- endfor -%}
{%- endfor -%}
{%- endfor -%}
"""
#: Writes an id where the name of the function belongs.
KIMI = """\
{{ tools }}{%- for m in messages -%}[{{ m.role }}]{{ m.content + '' }}
{%- for call in m.tool_calls or [] -%}<{{ call.id }}>{{ call.function.arguments | string }}
{%- endfor -%}
{%- endfor -%}
"""
#: Writes the name of a result.
NAMED = """\
{{ tools }}{%- for m in messages -%}[{{ m.role }}]{{ m.content + '' }}
{%- if m.role == 'tool' -%}({{ m.name + '' }}){%- endif -%}
{%- for call in m.tool_calls or [] -%}{{ call.function | string }}{% endfor -%}
{%- endfor -%}
"""
#: Reads the parameters of tools.
PARAMETERS = (
    CHATML
    + """\
{%- for t in tools or [] %}{{ t.function.name }}
{%- for name in t.function.parameters.properties.keys() -%}
{{ name in t.function.parameters.required }}
{%- endfor -%}
{%- endfor -%}
"""
)
#: Shows the system message in the last message.
LAST = """\
{%- set ns = namespace(system='') -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{%- set ns.system = m.content + '\\n\\n' -%}
{%- else -%}[{{ m.role }}]{{ ns.system if loop.last }}{{ m.content }}{%- endif -%}
{%- endfor -%}
"""


def needs(source: str) -> list[str]:
    return [repair.name for repair in ChatTemplate(source).repairs]


def test_a_template_gets_what_its_probes_tell() -> None:
    assert needs(CHATML) == []
    assert needs(STRICT) == [
        "ids-of-their-own",
        "ids-of-nine",
        "one-call-each",
        "arguments-in-objects",
        "one-system-message",
        "later-system-messages",
        "described-tools",
    ]
    assert needs(KIMI) == ["ids-with-names"]
    assert needs(NAMED) == ["named-results", "results-alone"]
    assert needs(PARAMETERS) == ["tools-without-nulls", "completed-tools"]
    assert needs("{{ missing.x }}") == []


def test_probes_of_a_template_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert needs("{{ 'q7text0 q7text1 ' * 60000 }}") == []
    clock = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))  # a probe takes a second
    template = ChatTemplate(CHATML)
    n_probes = 0
    run = template._run

    def count(*args: Any) -> str:
        nonlocal n_probes
        n_probes += 1
        return run(*args)

    monkeypatch.setattr(template, "_run", count)
    assert not template.capabilities.supports_tools
    assert template.repairs == ()
    assert template.format is not None
    assert n_probes < 20


def test_a_system_message_stays_as_the_template_shows_it_at_first() -> None:
    template = ChatTemplate(LAST)
    assert template.render(History().say("system", "user").messages) == "[user]text00x\n\ntext01x"
    later = template.render(History().say("system", "user", "assistant", "user").messages)
    assert later == "[user]text00x\n\ntext01x[assistant]text02x[user]text03x"


def test_what_tools_have_is_left_alone() -> None:
    city = {"type": "array", "pattern": None, "description": ""}
    made = tool("weather", description=None, parameters={"properties": {"city": city}})
    shown = (
        "{% for t in tools or [] %}{{ t.function.description + '' }}{{ t | tojson }}{% endfor %}"
    )
    prompt = ChatTemplate(CHATML + shown).render(History().say("user").messages, tools=[made])
    assert (
        '"parameters": {"properties": {"city": {"type": "array", "pattern": null, "descr' in prompt
    )


def test_what_a_strict_template_is_given() -> None:
    made = History().with_tools(tool("weather", description=None)).say("system", "user")
    made.call("weather", "clock", ids=["one", "two"], arguments=['{"city": "Os', "{}"])
    made.results([1, 0]).say("developer", "user")
    assert ChatTemplate(STRICT).render(made.messages, tools=made.tools) == (
        'weather[system]text00x[user]text01x[assistant]weatherarguments={"city": "Os[tool]text03x'
        "[assistant]clock[tool]text02x[user]<system-reminder>\ntext04x\n</system-reminder>"
        "[user]text05x"
    )


def test_ids_that_tell_the_function() -> None:
    made = History().say("user").call("weather", ids=["x"]).results().call("clock").results()
    prompt = ChatTemplate(KIMI).render(made.messages)
    assert "<functions.weather:0>" in prompt
    assert "<functions.clock:1>" in prompt


def test_results_have_the_name_of_their_function() -> None:
    made = History().call("weather", ids=["x"]).call("clock", ids=["y"])
    for id_ in ("x", "y", "z"):
        made.add("tool", tool_call_id=id_, content="found")
    prompt = ChatTemplate(NAMED).render(made.messages)
    assert prompt.endswith(
        "[tool]found(weather)[tool]found(clock)[user]<tool-result>\nfound\n</tool-result>"
    )


def test_results_of_calls_in_two_messages() -> None:
    made = History().call("weather", ids=["x"]).call("clock", ids=["x"]).messages
    made += [{"role": "tool", "tool_call_id": "x", "content": "found"}] * 2
    turns = [message for _, message in repaired("ids-of-their-own", made)]
    called = [message["tool_calls"][0]["id"] for message in turns[:2]]
    assert [message["tool_call_id"] for message in turns[2:]] == called == ["x", "call00000"]


_BY_NAME = {repair.name: repair for repair in REPAIRS}


def repaired(name: str, messages: list[dict[str, Any]]) -> Turns:
    change = _BY_NAME[name].messages
    assert change is not None
    return change(list(enumerate(parse_messages(messages))))


@pytest.mark.parametrize("ids", [["x", "y"], ["x", "x"], [None, None], ["abcdefgh1", None]])
def test_ids_of_nine_are_stable(ids: list[str | None]) -> None:
    made = History().say("user").call("f", ids=ids[:1]).results().call("g", ids=ids[1:]).results()
    turns = repaired("ids-of-nine", made.messages)
    called = [turns[i][1]["tool_calls"][0]["id"] for i in (1, 3)]
    assert [turns[i][1]["tool_call_id"] for i in (2, 4)] == called
    assert all(len(id_) == 9 and id_.isalnum() for id_ in called)
    assert (called[0] == called[1]) == (ids == ["x", "x"])
    assert repaired("ids-of-nine", made.messages[:3]) == turns[:3]


def test_turns_that_alternate() -> None:
    made = History().say("system", "assistant", "user", "user").call("f").results().say("user")
    made.say("assistant", "assistant").call("f").say("user")
    turns = [message for _, message in repaired("alternating", made.messages)]
    assert [message["role"] for message in turns] == [
        *("system", "user", "assistant", "user", "assistant", "tool", "assistant", "user"),
        *("assistant", "tool"),
    ]
    assert [message["content"] for message in turns] == [
        *("text00x", FILLER, "text01x", "text02x\n\ntext03x", ""),
        "text05x\n\n<user>\ntext06x\n</user>",
        *("text07x\n\ntext08x", FILLER, "", "<user>\ntext10x\n</user>"),
    ]


def test_a_reminder_after_a_result_is_tagged_once() -> None:
    made = History().say("user").call("f").results().say("system").messages
    reminded = [message for _, message in repaired("later-system-messages", made)]
    (*_, (_, result)) = repaired("alternating", reminded)
    assert result["content"] == "text02x\n\n<system-reminder>\ntext03x\n</system-reminder>"


def test_places_are_those_of_the_request() -> None:
    made = History().say("system", "developer", "user", "system")
    assert [place for place, _ in repaired("one-system-message", made.messages)] == [0, 2, 3]
    assert [place for place, _ in repaired("later-system-messages", made.messages)] == [0, 1, 2, 3]
