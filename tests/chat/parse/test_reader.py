"""Single formats: the stream of a call, its end, and texts that look like calls."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support import families
from tests.support.parsing import built, deltas_of, make_parser
from trioserve.chat.deltas import (
    ContentDelta,
    Delta,
    Message,
    ReasoningDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
)
from trioserve.chat.formats.syntax import ChatFormat
from trioserve.chat.parse.parser import message_parser


def parse(text: str, format: ChatFormat, **kwargs: Any) -> Message:
    """Parse a text in one piece and character by character, which must not differ."""
    whole = built(deltas_of([text], format, **kwargs))
    assert built(deltas_of(text, format, **kwargs)) == whole
    return whole


def call(name: str, arguments: str, index: int = 0) -> ToolCall:
    return ToolCall(f"call_{index}", name, arguments)


def qwen(value: str) -> str:
    parameter = f"<parameter=a>\n{value}\n</parameter>"
    return f"<tool_call>\n<function=f>\n{parameter}\n</function>\n</tool_call>"


def tool(**properties: Any) -> dict[str, Any]:
    return {"function": {"name": "f", "parameters": {"properties": properties}}}


# -- each argument between markers


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        (None, "Oslo", "Oslo"),
        (None, "12", 12),
        (None, "-1.5e3", -1500.0),
        (None, "true", True),
        (None, "True", True),
        (None, "None", None),
        (None, "[1, 2]", [1, 2]),
        (None, '{"b": "c"}', {"b": "c"}),
        (None, '{"b": ', '{"b": '),
        (None, "{b}", "{b}"),
        (None, "12 apples", "12 apples"),
        (None, "007", "007"),
        (None, "NaN", "NaN"),
        (None, '"quoted"', '"quoted"'),
        (None, "", ""),
        (None, "\nlines\n\n", "\nlines\n\n"),
        (None, "a </parameter> b", "a </parameter> b"),
        (None, "</function>", "</function>"),
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, "true", "true"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": "1"}, "1", "1"),
        ({"anyOf": [{"type": "string"}, {"const": "x"}]}, "1", "1"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "x", "x"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "1", 1),
        ({"type": "integer"}, "one", "one"),
        ({"type": "object"}, "{}", {}),
        ({}, "1", 1),
        (True, "1", 1),
    ],
)
def test_a_schema_or_the_value_tells_what_is_text(
    schema: object, value: str, expected: object
) -> None:
    tools = [] if schema is None else [tool(a=schema)]
    message = parse(qwen(value), families.QWEN3_CODER, tools=tools)
    assert message.content == ""
    assert json.loads(message.tool_calls[0].arguments) == {"a": expected}


def test_tools_without_schemas() -> None:
    for tools in ([{}], [{"function": {"name": "f"}}], [{"function": {"parameters": 1}}]):
        assert parse(qwen("1"), families.QWEN3_CODER, tools=tools).tool_calls[0].arguments


def test_the_outer_marker_may_be_missing() -> None:
    text = qwen("x").removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert parse(f"So:\n{text}", families.QWEN3_CODER) == Message(
        "So:", "", (call("f", '{"a": "x"}'),)
    )
    text = text.removesuffix("</function>") + "</tool_call>"
    assert parse(text, families.QWEN3_CODER) == Message("", "", (call("f", '{"a": "x"}'),))


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<tool_call><function=f>", ""),
        ("<tool_call><function=f><param", "{"),
        ("<tool_call><function=f><parameter=a>x", '{"a": "x'),
        ("<tool_call><function=f><parameter=a>12", '{"a": 12'),
        ("<tool_call><function=f><parameter=a>x\n</para", '{"a": "x\\n</para'),
        ("<tool_call><function=f><parameter=a>x</parameter>", '{"a": "x"'),
    ],
)
def test_a_call_that_is_cut_off_keeps_what_has_come(text: str, arguments: str) -> None:
    assert parse(text, families.QWEN3_CODER) == Message("", "", (call("f", arguments),))


def test_what_goes_wrong_after_the_name_is_content() -> None:
    text = "<tool_call>f\n<arg_key>a</arg_key>oh no<arg_value>1</arg_value></tool_call>"
    message = parse(text, families.GLM)
    assert message.tool_calls == (call("f", '{"a": '),)
    assert message.content == "oh no<arg_value>1</arg_value></tool_call>"


def nested(tag: str, depth: int, inner: str = "1") -> str:
    return f"#<{tag}>" * depth + inner + f"#</{tag}>" * depth


@pytest.mark.parametrize(
    ("inner", "arguments"),
    [
        ("#<s>#</s>#<e>#</e>", '{"s": "", "e": ""}'),
        (
            "#<l>#<item>1#</item>#<item>#<k>true#</k>#</item>#</l>#<s> x#</s>",
            '{"l": [1, {"k": true}], "s": " x"}',
        ),
        ("#<s>1 <b>#<s>#</s>", '{"s": "1 <b>]<]minimax[>[<s>"}'),
        ("#<ü>1#</ü>", '{"ü": 1}'),
        ("#<a>\n#<item>x#</item>\n#</a>", '{"a": ["x"]}'),
        (nested("a", 100), '{"a": ' * 100 + "1" + "}" * 100),
        (f"#<{'t' * 400}>1#</{'t' * 400}>", f'{{"{"t" * 400}": 1}}'),
    ],
)
def test_elements_become_json(inner: str, arguments: str) -> None:
    text = f'#<tool_call>\n#<invoke name="f">{inner}#</invoke>\n#</tool_call>'
    text = text.replace("#", "]<]minimax[>[")
    message = parse(text, families.MINIMAX_M3, tools=[tool(s={"type": "string"})])
    assert message == Message("", "", (call("f", arguments),))


@pytest.mark.parametrize(
    ("inner", "arguments", "rest"),
    [
        ("#<>1#</>", "{", ">1#</>"),
        ("#</a>", "{", "/a>"),
        ("#<a>#<item>1#</item>#<b>2#</b>#</a>", '{"a": [1', "2#</b>#</a>"),
        (nested("a", 101), '{"a": ' * 101, "1" + "#</a>" * 101),
        (f"#<{'t' * 401}>1", "{", f"{'t' * 401}>1"),
        (f"#<{'t' * 500}", "{", "t" * 500),
    ],
)
def test_elements_that_are_none_are_content(inner: str, arguments: str, rest: str) -> None:
    mark = "]<]minimax[>["
    text = f'#<tool_call>\n#<invoke name="f">{inner}'.replace("#", mark)
    message = parse(text, families.MINIMAX_M3)
    assert message.tool_calls == (call("f", arguments),)
    assert message.content.endswith(rest.replace("#", mark))
    assert make_parser(families.MINIMAX_M3).feed(text)[2:] == [ContentDelta(message.content)]


def test_a_call_may_be_a_name_and_what_is_none_is_content() -> None:
    assert parse("<tool_call>f</tool_call>", families.GLM) == Message("", "", (call("f", "{}"),))
    for text in (f"<tool_call>{name}</tool_call>" for name in ("", "two words", "x" * 1000)):
        assert parse(text, families.GLM) == Message(text)


# -- JSON


def test_llama_calls_need_no_marker() -> None:
    text = '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'
    calls = (call("f", '{"a": 1}'), call("g", "{}", 1))
    assert parse(text, families.LLAMA3) == Message("", "", calls)
    assert parse(f"<|python_tag|>{text}", families.LLAMA3) == Message("", "", calls)
    assert parse(f"So: {text}", families.LLAMA3) == Message(f"So: {text}")


def test_llama_calls_of_built_in_tools() -> None:
    text = '<|python_tag|>brave_search.call(query="a \\"b\\"")'
    message = parse(text, families.LLAMA3)
    assert message == Message("", "", (call("brave_search", '{"query": "a \\"b\\""}'),))
    assert parse("<|python_tag|>print(1)", families.LLAMA3) == Message("<|python_tag|>print(1)")


@pytest.mark.parametrize(
    "text", ['{"a": 1}', "{", " {}", '{"name": "f"', '{"name": 1}', "{ not JSON }"]
)
def test_other_json_is_content(text: str) -> None:
    assert parse(text, families.PLAIN) == Message(text)
    if '"f"' not in text:
        assert parse(text, families.LLAMA3) == Message(text)


def test_generic_calls() -> None:
    one = '{"name": "f", "arguments": {"a": 1}}'
    expected = Message("", "", (call("f", '{"a": 1}'),))
    assert parse(f'{{"tool_call": {one}}}', families.PLAIN) == expected
    assert parse(f' {{ "tool_calls": [{one}]\n}}\n', families.PLAIN) == expected


@pytest.mark.parametrize(
    ("written", "content"),
    [
        ('"Hi\\n\\u00e9 \\ud83d\\ude00"', "Hi\né 😀"),
        ('"\\ud83d x"', "� x"),
        ('"\\\\ud83d"', "\\ud83d"),
        ('""', ""),
        ("1", '{"response": 1}'),
    ],
)
def test_generic_answers(written: str, content: str) -> None:
    assert parse(f'{{"response": {written}}}', families.PLAIN) == Message(content)
    assert parse('{"response": "cut', families.PLAIN) == Message("cut")


def test_an_array_of_calls() -> None:
    text = '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abc"}, {"name": "g"}] Done.'
    message = parse(text, families.MISTRAL_OLD)
    assert message == Message("Done.", "", (call("f", "{}"), call("g", "{}", 1)))
    broken = '[TOOL_CALLS][{"name": "f"}, 5]'
    assert parse(broken, families.MISTRAL_OLD) == Message(", 5]", "", (call("f", "{}"),))


def test_ids_are_as_the_template_wants_them() -> None:
    for format in (families.MISTRAL, families.MISTRAL_OLD):
        parser = message_parser(format, parse_tools=True)
        deltas = parser.feed('[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS][{"name": "f"}]')
        (start,) = [delta for delta in deltas if isinstance(delta, ToolCallStart)]
        assert re.fullmatch(r"[a-zA-Z0-9]{9}", start.id)
    parser = message_parser(families.HARMONY, parse_tools=True, prompt_tail="<|start|>assistant")
    (start,) = parser.feed(" to=functions.f<|message|>")
    assert start.id.startswith("call_")


@pytest.mark.parametrize(
    ("first", "arguments"), [('[CALL_ID]abcdefghi[ARGS]{"a": 1}', '{"a": 1}'), ("[ARGS]", "{}")]
)
def test_mistral_may_write_an_id_and_no_arguments(first: str, arguments: str) -> None:
    calls = (call("f", arguments), call("g", "{}", 1))
    text = f"Hm[TOOL_CALLS]f{first}[TOOL_CALLS]g[ARGS]{{}}"
    assert parse(text, families.MISTRAL) == Message("Hm", "", calls)


def test_a_name_in_quotes() -> None:
    text = '<|tools_prefix|>[{"f\\u0067": {"a": 1}}, {"g":{}}]<|tools_suffix|>'
    calls = (call("fg", '{"a": 1}'), call("g", "{}", 1))
    assert parse(text, families.APERTUS) == Message("", "", calls)
    for broken in ("[{f: {}}]", '[{"": {}}]', r'[{"\ud800": {}}]', '[{"f'):
        text = f"<|tools_prefix|>{broken}"
        assert parse(text, families.APERTUS) == Message(text)


# -- literals


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("", {}),
        ("a=1,", {"a": 1}),
        ("a=-1.5e3, b=True, c=None, d=false", {"a": -1500.0, "b": True, "c": None, "d": False}),
        ("a=[1, [2], {'k': 'v', \"l\": []},]", {"a": [1, [2], {"k": "v", "l": []}]}),
        (r"a='it\'s \x41\u00e9\U0001f600\n\d'", {"a": "it's Aé😀\n\\d"}),
        ('a="it\'s"', {"a": "it's"}),
        ("a={1.b-c: 1, 'd': 2,}, b=2", {"a": {"1.b-c": 1, "d": 2}, "b": 2}),
        (r"a='\\\"\/\r\b\f\t\0\U0010ffff'", {"a": '\\"/\r\b\f\t\0\U0010ffff'}),
        ("a=" + "[" * 100 + "]" * 100, {"a": json.loads("[" * 100 + "]" * 100)}),
        ("a=" + "{k:" * 99 + "1" + "}" * 99, json.loads('{"a":' + '{"k":' * 99 + "1" + "}" * 100)),
        ("k" * 400 + "=" + "1" * 400, {"k" * 400: int("1" * 400)}),
    ],
)
def test_literals_become_json(written: str, expected: object) -> None:
    text = f"<|tool_call_start|>[f({written})]<|tool_call_end|>"
    message = parse(text, families.LFM2)
    assert message.content == ""
    assert json.loads(message.tool_calls[0].arguments) == expected


@pytest.mark.parametrize(
    ("escape", "expected"),
    [(r"\ud7ff", "\ud7ff"), (r"\ud800", r"\ud800"), (r"\udfff", r"\udfff"), (r"\ue000", "\ue000")],
)
def test_only_half_a_pair_stays_an_escape(escape: str, expected: str) -> None:
    message = parse(f"<|tool_call_start|>[f(a='{escape}')]<|tool_call_end|>", families.LFM2)
    assert message.tool_calls[0].arguments == f'{{"a": "{expected}"}}'


@pytest.mark.parametrize(
    "written",
    [
        *("1", "a=b", "a=f()", "a=01", r"a='\xg1'", r"a='\u00g9'", r"a='\U00110000'"),
        *("a=1 b=2", "a=[1 2]", "a={k: 1 j: 2}", "a={k=1}", "=1"),
        *("a=" + "[" * 101 + "]" * 101, "a=" + "{k:" * 100 + "1" + "}" * 100),
        *("k" * 401 + "=1", "a=" + "1" * 401),
    ],
)
def test_what_is_no_literal_is_content(written: str) -> None:
    text = f"<|tool_call_start|>[f({written})]<|tool_call_end|>"
    message = parse(text, families.LFM2)
    assert message.content.endswith(")]<|tool_call_end|>")
    assert message.tool_calls[0].name == "f"


@pytest.mark.parametrize(
    ("format", "text", "arguments", "content"),
    [
        (families.LFM2, "<|tool_call_start|>[f(a=1, b='x", '{"a": 1, "b": "x', ""),
        (families.LFM2, r"<|tool_call_start|>[f(a='\x41", '{"a": "A', ""),
        (families.LFM2, r"<|tool_call_start|>[f(a='\x4", '{"a": "', r"\x4"),
        (families.LFM2, "<|tool_call_start|>[f(a=[1,", '{"a": [1', ""),
        (families.LFM2, "<|tool_call_start|>[f('a", '{"a', ""),
        (families.GEMMA4, '<|tool_call>call:f{a:<|"|>x<|', '{"a": "x<|', ""),
        (families.GEMMA4, r'<|tool_call>call:f{a:<|"|>x\n', r'{"a": "x\\n', ""),
        (families.MINIMAX_M3, "<s>ab", '{"s": "ab', ""),
        (families.MINIMAX_M3, "<s>ab#</", '{"s": "ab]<]minimax[>[</', ""),
        (families.MINIMAX_M3, "<e>12", '{"e": 12', ""),
        (families.MINIMAX_M3, "<e>#<k>1", '{"e": {"k": 1', ""),
        (families.MINIMAX_M3, "<e>#<item>1#</item>\n", '{"e": [1', ""),
    ],
)
def test_other_arguments_that_are_cut_off(
    format: ChatFormat, text: str, arguments: str, content: str
) -> None:
    if format is families.MINIMAX_M3:
        text = f'#<tool_call>\n#<invoke name="f">#{text}'.replace("#", "]<]minimax[>[")
    message = parse(text, format, tools=[tool(s={"type": "string"})])
    assert message == Message(content, "", (call("f", arguments),))


# -- rows of messages


def test_harmony() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Look:<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    )
    message = parse(text, families.HARMONY, prompt_tail="<|end|><|start|>assistant")
    assert message == Message("Look:", "Hm", (call("f", '{"a": 1}'),))
    raw = parse(text, families.HARMONY, prompt_tail="<|start|>assistant", reasoning_format="none")
    assert raw.content == "<|channel|>analysis<|message|>Hm<|end|>Look:"


def test_only_the_final_channel_of_harmony_is_an_answer_in_a_format() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary<|message|>"
        'Look:<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>{"a": 1}'
    )
    kwargs = {"prompt_tail": "<|start|>assistant", "is_formatted": True}
    assert parse(text, families.HARMONY, **kwargs) == Message('{"a": 1}', "HmLook:")
    call = " to=functions.f<|channel|>commentary json<|message|>{}"
    assert parse(call, families.HARMONY, **kwargs).tool_calls[0].name == "f"


def test_harmony_that_the_prompt_has_begun() -> None:
    tail = "<|start|>assistant<|channel|>{}<|message|>Well"
    thought = parse(" so<|end|>", families.HARMONY, prompt_tail=tail.format("analysis"))
    said = parse(" so<|return|>", families.HARMONY, prompt_tail=tail.format("final"))
    assert (thought, said) == (Message("", " so"), Message(" so"))
    parser = make_parser(families.HARMONY, prompt_tail="<|start|><|message|>")
    assert parser.feed("Hi") == [ContentDelta("Hi")]


@pytest.mark.parametrize("blanks", ["", "\n\n"])
@pytest.mark.parametrize("start", ["", "<|start|>assistant"])
def test_harmony_needs_no_start_marker_after_reasoning(start: str, blanks: str) -> None:
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
    text = f"<|channel|>analysis<|message|>Hm<|end|>{blanks}{start}{call}"
    message = parse(text, families.HARMONY, prompt_tail="<|start|>assistant")
    assert message.reasoning_content == "Hm"
    assert [(each.name, each.arguments) for each in message.tool_calls] == [("f", "{}")]
    said = f"<|channel|>analysis<|message|>Hm<|end|>{blanks}<|chan"
    message = parse(said, families.HARMONY, prompt_tail="<|start|>assistant")
    assert message == Message(f"{blanks}<|chan", "Hm")


FINAL = "<|channel|>final<|message|>"


def test_harmony_without_channels_is_content() -> None:
    tail = "<|start|>assistant"
    for text in ("Hello", "Hello " * 200, "<|channel|>odd<|message|>Hi"):
        assert parse(text, families.HARMONY, prompt_tail=tail) == Message(text)
    for junk in ("junk<|end|>", "junk", "x" * 501 + "<|message|>"):
        message = parse(f"{FINAL}Hi<|start|>{junk}", families.HARMONY, prompt_tail=tail)
        assert message == Message(f"Hi<|start|>{junk.removesuffix('<|end|>')}")


def test_a_header_of_harmony_has_an_end() -> None:
    header = FINAL.removesuffix("<|message|>")
    for length, is_header in ((500, True), (501, False)):
        text = f"{header:{length}}<|message|>Hi"
        message = parse(text, families.HARMONY, prompt_tail="<|start|>assistant")
        assert message == Message("Hi" if is_header else text)


def test_what_follows_a_call_in_a_channel_is_content() -> None:
    header = " to=functions.f<|channel|>commentary json<|message|>"
    tail = "<|start|>assistant"
    for text, arguments, rest in (('{"a": 1} \n x', '{"a": 1}', "x"), ('{"a": oh', '{"a": ', "oh")):
        message = parse(header + text, families.HARMONY, prompt_tail=tail)
        assert message == Message(rest, "", (call("f", arguments),))


def test_calls_in_channels_are_content_unless_asked_for() -> None:
    text = " to=functions.f<|channel|>commentary json<|message|>{}"
    settings = {"prompt_tail": "<|start|>assistant", "parse_tools": False}
    assert parse(f"{text}<|call|>", families.HARMONY, **settings) == Message(text)


def test_functionary() -> None:
    text = 'all\nLook:>>>f\n{"a": 1}\n>>>g\n{}'
    message = parse(text, families.FUNCTIONARY_3_2, prompt_tail="<|end_header_id|>\n\n>>>")
    assert message == Message("Look:", "", (call("f", '{"a": 1}'), call("g", "{}", 1)))
    text = "all\n>>> print(1)\nDone"
    message = parse(text, families.FUNCTIONARY_3_2, prompt_tail=">>>")
    assert message == Message(">>> print(1)\nDone")


# -- what the engine needs to know


F, G = call("f", '{"a": "x", "b": 1}'), call("g", "{}", 1)


@pytest.mark.parametrize(
    ("format", "text", "calls"),
    [
        (families.LLAMA4, '<|python_start|>[f(a="x", b=1), g()]<|python_end|>', (F, G)),
        (families.LLAMA4, '[f(a="x", b=1), g()]', (F, G)),
        (families.LLAMA4, '{"name": "f", "parameters": {"a": "x", "b": 1}}', (F,)),
        (
            families.LLAMA4,
            '<|python_start|>{"name": "f", "parameters": {"a": "x", "b": 1}}<|python_end|>',
            (F,),
        ),
        (families.LFM2, "[f(a='x', b=1), g()]", (F, G)),
        (families.LFM2, "<|tool_call_start|>[f(a='x', b=1)]<|tool_call_end|>", (F,)),
        (
            families.PHI4_MINI_GENERIC,
            'functools[{"name": "f", "arguments": {"a": "x", "b": 1}}, {"name": "g"}]',
            (F, G),
        ),
        (
            families.PHI4_MINI_GENERIC,
            '<|tool_call|>[{"name": "f", "arguments": {"a": "x", "b": 1}}]<|/tool_call|>',
            (F,),
        ),
        (families.PHI4_MINI_GENERIC, '[{"name": "f", "parameters": {"a": "x", "b": 1}}]', (F,)),
    ],
)
def test_models_that_write_calls_in_several_ways(
    format: ChatFormat, text: str, calls: tuple[ToolCall, ...]
) -> None:
    assert parse(text, format) == Message(tool_calls=calls)
    assert parse("[1] is [a](b).", format).content == "[1] is [a](b)."


@pytest.mark.parametrize(
    ("value", "arguments"),
    [
        ("{'a': [1, 'b', None], 'c': True}", '{"a": {"a": [1, "b", null], "c": true}}'),
        ('{"a": [1]}', '{"a": {"a": [1]}}'),
        ("{'a': 1}}", '{"a": "{\'a\': 1}}"}'),
        ("{'a': f(1)}", '{"a": "{\'a\': f(1)}"}'),
        ("{'a': 1", '{"a": "{\'a\': 1"}'),
    ],
)
def test_an_object_may_be_written_as_in_python(value: str, arguments: str) -> None:
    """Some templates print them so, and models write what they read."""
    schema = {"type": "object", "properties": {"a": {"type": "object"}}}
    tools = [{"function": {"name": "f", "parameters": schema}}]
    text = f"<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    (found,) = parse(text, families.QWEN3_CODER, tools=tools).tool_calls
    assert found.arguments == arguments


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm-4", '<tool_call>{"name": "f", "arguments": {"a": "x", "b": 1}}</tool_call>'),
        ("glm-4", '<tool_call>f\n{"a": "x", "b": 1}\n</tool_call>'),
        (
            "dots3-note",
            '<dots_function_call>{"name":"f","arguments":{"a": "x", "b": 1}}</dots_function_call>',
        ),
        (
            "dots3-note",
            '<dots_function_call>\n<invoke name="f">{"a": "x", "b": 1}</invoke>\n'
            "</dots_function_call>",
        ),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {"a": "x", "b": 1}}'),
        ("qwen3-coder", '<tool_call>\n<function=f>{"a": "x", "b": 1}</function>\n</tool_call>'),
    ],
)
def test_json_in_place_of_what_the_template_writes(name: str, text: str) -> None:
    """Models mix forms."""
    assert parse(text, families.FAMILIES[name]) == Message(tool_calls=(F,))
    assert parse(f"Hm{text}", families.FAMILIES[name]).content == "Hm"


@pytest.mark.parametrize(
    ("value", "arguments"),
    [
        ('"a\\nb"', '{"a": "a\\nb"}'),
        ('"\\ud800"', '{"a": "\\ud800"}'),
        ('"a" b', '{"a": "\\"a\\" b"}'),
        ("plain", '{"a": "plain"}'),
        ("[1]", '{"a": [1]}'),
    ],
)
def test_text_between_markers_may_be_json(value: str, arguments: str) -> None:
    parameter = f'<parameter name="a">{value}</parameter>'
    text = f'<calls>\n<invoke name="f">\n{parameter}\n</invoke>\n</calls>'
    assert parse(text, families.FAMILIES["json-values"]).tool_calls == (call("f", arguments),)


# -- streams


def brief(delta: Delta) -> str:
    match delta:
        case ContentDelta(text):
            return f"said {text}"
        case ReasoningDelta(text):
            return f"thought {text}"
        case ToolCallStart(_, _, name):
            return f"call {name}"
        case ToolCallArguments(_, text):
            return f"with {text}"


STREAMS: list[tuple[ChatFormat, dict[str, list[str]]]] = [
    (
        families.QWEN3_CODER,
        {
            "<tool_call>\n<function=f": [],
            ">\n": ["call f"],
            "<parameter=ci": ["with {"],
            "ty>\n": ['with "city": '],
            "Os": ['with "Os'],
            '"lo\n': ['with \\"lo'],
            "</parameter>\n</fun": [],
            "ction>": ['with "}'],
            "\n</tool_call>": [],
        },
    ),
    (
        families.MISTRAL,
        {"[TOOL_CALLS]f[ARGS]": ["call f"], '{"a": "b': ['with {"a": "b'], 'c"}': ['with c"}']},
    ),
    (
        families.GEMMA4,
        {
            "<|tool_call>call:f{a:": ["call f", 'with {"a": '],
            '<|"|>ab<|': ['with "ab'],
            "c": ["with <|c"],
        },
    ),
    (
        families.LFM2,
        {"<|tool_call_start|>[f(a='": ["call f", 'with {"a": "'], r"\x41": ["with A"]},
    ),
    (families.PLAIN, {'{"response": "Hel': ["said Hel"], 'lo"}': ["said lo"]}),
    (
        families.HARMONY,
        {
            "<|channel|>analysis<|message|>Hm": ["thought Hm"],
            " so<|e": ["thought  so"],
            f"nd|><|start|>assistant{FINAL}Hi": ["said Hi"],
        },
    ),
    (
        families.HARMONY,
        {f"<|channel|>analysis<|message|>Hm<|end|>{FINAL}Hi": ["thought Hm", "said Hi"]},
    ),
]


@pytest.mark.parametrize(("format", "pieces"), STREAMS)
def test_what_is_certain_streams(format: ChatFormat, pieces: dict[str, list[str]]) -> None:
    tail = "<|start|>assistant" if format is families.HARMONY else ""
    parser = make_parser(format, prompt_tail=tail)
    assert {text: list(map(brief, parser.feed(text))) for text in pieces} == pieces
