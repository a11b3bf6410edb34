"""Rendering of messages: how they are adapted to a template, and what errors say."""

from __future__ import annotations

import json
import threading
from datetime import datetime

import pytest

from trioserve.chat.formats.families import GENERIC_CALLS, HERMES
from trioserve.chat.template.builtin import CHATML
from trioserve.chat.template.render import ChatTemplate
from trioserve.errors import InvalidRequestError, TemplateError

USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "3 degrees"}

#: Takes everything, in every form.
FULL = """\
{%- if tools %}{{ tools|tojson }}{% endif -%}
{%- for m in messages -%}
[{{ m.role }}]
{%- if m.reasoning_content %}({{ m.reasoning_content }}){% endif -%}
{%- if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif -%}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments|tojson }}
{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt %}[assistant]{% if enable_thinking %}<think>{% endif %}{% endif -%}
"""
#: Knows text, and the roles user and assistant.
BARE = """\
{%- for m in messages -%}
{%- if m.role not in ('user', 'assistant') %}{{ raise_exception('no ' + m.role) }}{% endif -%}
[{{ m.role }}]{{ m.content + '' }}
{%- endfor -%}
"""


def text_calls(source: str) -> str:
    return source.replace("arguments|tojson", "arguments + ''")


def test_parts_are_kept_where_the_template_takes_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts}
    assert ChatTemplate(FULL).render([message]) == "[user]<a><b>[assistant]"
    assert ChatTemplate(BARE).render([message]) == "[user]a\nb"


def test_text_becomes_a_part_where_the_template_wants_parts() -> None:
    source = (
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    template = ChatTemplate(source)
    assert template.render([USER]) == "Hi"
    assert not template.capabilities.supports_string_content


def test_a_system_message_joins_the_users_where_there_is_no_place_for_it() -> None:
    template = ChatTemplate(BARE)
    assert template.render([SYSTEM, USER]) == "[user]Be brief.\nHi"
    assert template.render([{**SYSTEM, "role": "developer"}, USER]) == "[user]Be brief.\nHi"
    assert template.render([SYSTEM]) == "[user]Be brief."


@pytest.mark.parametrize("role", ["developer", "document"])
def test_roles_that_a_template_knows_by_name(role: str) -> None:
    assert f"[{role}]text" in ChatTemplate(FULL + f"{{# '{role}' #}}").render(
        [{"role": role, "content": "text"}, USER]
    )


def test_roles_of_a_models_own() -> None:
    message = {"role": "document", "content": "text"}
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(FULL).render([message])
    assert caught.value.param == "messages[0].role"
    assert "[system]text" in ChatTemplate(FULL).render([{**message, "role": "developer"}, USER])


def test_arguments_become_an_object_where_the_template_wants_one() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    prompt = ChatTemplate(FULL).render([USER, called, RESULT], tools=[TOOL])
    assert 'get_weather{"city": "Oslo"}' in prompt
    assert "[tool]3 degrees" in prompt
    template = ChatTemplate(text_calls(FULL))
    assert not template.capabilities.supports_object_arguments
    assert 'get_weather{"city": "Oslo"}' in template.render([USER, called, RESULT], tools=[TOOL])


@pytest.mark.parametrize("arguments", ['{"city": "Os', "[1]", '"text"'])
def test_arguments_that_are_no_object(arguments: str) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}]
    assert json.dumps(arguments) in ChatTemplate(FULL).render(messages)
    assert arguments in ChatTemplate(text_calls(FULL)).render(messages)


def test_tools_are_told_by_text_where_the_template_has_no_place_for_them() -> None:
    template = ChatTemplate(BARE)
    called = {"role": "assistant", "content": "Look:", "tool_calls": [CALL, CALL]}
    prompt = template.render([SYSTEM, USER, called, RESULT, RESULT, USER], tools=[TOOL])
    call = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
    result = '{"tool_response": {"result": "3 degrees", "tool_call_id": "call_1"}}'
    system, _, rest = prompt.partition("\nHi[assistant]")
    assert system.startswith("[user]Be brief.\n\nYou can call these functions:\n{")
    assert json.dumps(TOOL["function"]) in system
    calls = f'{{"tool_calls": [{call}, {call}]}}'
    assert rest == f"Look:\n\n{calls}[user]{result}\n\n{result}[user]Hi"
    alone = template.render([USER], tools=[TOOL])
    assert alone.startswith("[user]You can call")
    assert alone.endswith("\nHi")
    assert template.render([USER], tools=[]) == "[user]Hi"


def test_an_error_names_the_message_after_one_was_added() -> None:
    picky = BARE + "{% for m in messages %}{% if m.content == 'x' %}{{ nothing.x }}{% endif %}"
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(picky + "{% endfor %}").render([USER, {**USER, "content": "x"}], tools=[TOOL])
    assert caught.value.param == "messages[1]"


def test_the_format_is_the_one_that_the_model_is_told() -> None:
    assert ChatTemplate(BARE).format.tool_calls is GENERIC_CALLS
    assert ChatTemplate(BARE + "{# <tool_call> #}").format.tool_calls is GENERIC_CALLS
    assert ChatTemplate(FULL + "{# <tool_call> #}").format.tool_calls is HERMES.tool_calls


def test_variables_of_the_date_and_in_place_of_tools() -> None:
    source = "{{ functions }}|{{ date_string }}|{{ datetime }}"
    template = ChatTemplate(source, now=lambda: datetime(2025, 3, 1))
    functions, *dates = template.render([USER], tools=[TOOL]).split("|")
    assert (json.loads(functions), dates) == ([TOOL], ["01 Mar 2025", "Mar 01 2025"])
    assert template.render([USER], kwargs={"date_string": "today"}) == "[]|today|Mar 01 2025"


def test_reasoning_goes_where_the_template_looks_for_it() -> None:
    said = {"role": "assistant", "content": "Hello", "reasoning_content": "Hm"}
    assert "(Hm)" in ChatTemplate(FULL).render([USER, said, USER])
    other = FULL.replace("reasoning_content", "thinking")
    assert "(Hm)" in ChatTemplate(other).render([USER, said, USER])


def test_thinking_is_up_to_the_template_unless_given() -> None:
    template = ChatTemplate(FULL)
    assert template.render([USER]).endswith("[assistant]")
    on = {"enable_thinking": True}
    assert template.render([USER], kwargs=on).endswith("<think>")
    other = ChatTemplate(FULL.replace("enable_thinking", "thinking"))
    assert other.render([USER], kwargs=on).endswith("<think>")


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_variables_that_are_ours(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(FULL).render([USER], kwargs={name: 1})
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_variables_must_be_json() -> None:
    for value in (object(), {1: 2}, 2**100, json.loads("[" * 95 + "]" * 95)):
        with pytest.raises(TemplateError):
            ChatTemplate(FULL).render([USER], kwargs={"x": value})


def test_an_error_names_the_message() -> None:
    source = (
        "{% for message in messages %}{{ message.content + '' }}{% for x in [1] %}{% endfor %}"
        "{% if message.content == 'bad' %}{{ raise_exception('It is bad') }}{% endif %}{% endfor %}"
        "{% if fail %}{{ missing.x }}{% endif %}"
    )
    template = ChatTemplate(source)
    bad = {"role": "user", "content": "bad"}
    with pytest.raises(TemplateError) as caught:
        template.render([USER, bad])
    assert caught.value.param == "messages[1]"
    assert caught.value.message == (
        "messages[1]: The chat template refuses the messages: It is bad"
    )
    with pytest.raises(TemplateError) as caught:
        template.render([USER, USER], kwargs={"fail": True})
    assert caught.value.param == "messages"


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(CHATML).render([{"role": "user", "content": "\ud800"}])
    assert caught.value.param == "messages"


def test_tools_are_none_unless_that_breaks_the_template() -> None:
    assert ChatTemplate("{{ tools is none }}").render([USER]) == "True"
    assert ChatTemplate("{% for t in tools %}{% endfor %}x").render([USER]) == "x"


def test_messages_are_not_changed() -> None:
    messages = [SYSTEM, USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT]
    before = json.dumps(messages)
    ChatTemplate(FULL).render(messages, tools=[TOOL])
    assert json.dumps(messages) == before


def test_threads_do_not_share_a_meter() -> None:
    template = ChatTemplate(FULL)
    wanted = template.render([USER])
    seen: list[str] = []
    threads = [
        threading.Thread(target=lambda: seen.append(template.render([USER]))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [wanted] * 8


def test_capabilities() -> None:
    flags = ChatTemplate(FULL).capabilities.as_flags()
    assert flags == {
        "supports_string_content": True,
        "supports_typed_content": True,
        "supports_tools": True,
        "supports_tool_calls": True,
        "supports_parallel_tool_calls": True,
        "supports_system_role": True,
        "supports_preserve_reasoning": True,
        "supports_reasoning_effort": False,
        "supports_object_arguments": True,
        "supports_tool_results": True,
        "supports_enable_thinking": True,
    }
    bare = ChatTemplate(BARE).capabilities.as_flags()
    assert {name for name, has in bare.items() if has} == {"supports_string_content"}


def test_a_list_that_is_only_printed_is_not_taken() -> None:
    source = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    capabilities = ChatTemplate(source).capabilities
    assert capabilities.supports_string_content
    assert not capabilities.supports_typed_content


def test_a_template_that_fails_always_can_do_nothing() -> None:
    template = ChatTemplate("{{ missing.x }}")
    assert not any(template.capabilities.as_flags().values())
    with pytest.raises(TemplateError):
        template.render([USER])


# -- the bundled model's template


def test_an_empty_content_where_parts_are_needed() -> None:
    source = (
        "{% for m in messages %}[{{ m.content[0].type }}]"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    messages = [{"role": "user", "content": []}, {"role": "user", "content": "Hi"}]
    assert ChatTemplate(source).render(messages) == "[text][text]Hi"
