"""Writers of messages, one for each format.

Formats that the server derives are derived here too: from templates that write what writers do.
"""

# ruff: noqa: RUF001 - these models' markers have wide bars on purpose

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from trioserve.chat.formats import families
from trioserve.chat.formats.syntax import ChatFormat, Elements, Literals, Parameters
from trioserve.chat.template.render import ChatTemplate

Call = tuple[str, dict[str, Any]]


def parts(part: object) -> Iterator[object]:
    """Give all parts of a description."""
    yield part
    if isinstance(part, tuple):
        for one in part:
            yield from parts(one)
    elif attrs.has(type(part)):
        for field in attrs.fields(type(part)):
            yield from parts(getattr(part, field.name))


@attrs.frozen(kw_only=True)
class Writer:
    """Writes messages as a model does.

    `write_calls` writes all calls; `reasoning` and `content` are patterns with a place for text.
    """

    format: ChatFormat
    write_calls: Callable[[list[Call]], str]
    reasoning: str = ""
    content: str = "{}"
    prompt: str = ""  # the end of the prompt
    most: int = 9  # how many calls a message without content can have

    @property
    def bare(self) -> bool:
        """True if a call can only come alone."""
        return self.format.tool_calls is not None and bool(self.format.tool_calls.bare)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that plain text must not contain."""
        format = self.format
        found = list(format.dropped)
        if format.reasoning is not None:
            found += [format.reasoning.start, format.reasoning.end]
        if format.tool_calls is not None:
            found += [*format.tool_calls.starts, *filter(None, [format.tool_calls.bare])]
        if format.channels is not None:
            found += [format.channels.start, *format.channels.ends]
        return tuple(found)

    @property
    def begun(self) -> bool:
        """True if the prompt has begun the reasoning."""
        start = self.format.reasoning.start if self.format.reasoning is not None else "-"
        return self.prompt.rstrip().endswith(start)

    @property
    def plain_keys(self) -> bool:
        """True if keys must be identifiers."""
        return any(isinstance(one, Parameters | Literals | Elements) for one in parts(self.format))

    def clean(self, text: str) -> str:
        """Change text that cannot be written: it would end its string."""
        for one in parts(self.format):
            if isinstance(one, Parameters):
                text = text.replace(one.close, f"{one.close}x")
                if one.cdata:
                    text = text.replace("]", "")
            elif isinstance(one, Elements):
                text = text.replace(one.mark, "").replace(one.mark[0], "")
            elif isinstance(one, Literals) and not one.escapes:
                for quote in one.quotes:
                    text = text.replace(quote[0], "")
        return text

    def write(self, reasoning: str, content: str, calls: list[Call]) -> str:
        """Write a message."""
        text = self.reasoning.replace("{}", reasoning) if reasoning or self.begun else ""
        text += self.content.replace("{}", content) if content else ""
        return text + (self.write_calls(calls) if calls else "")


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def raw(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def bare_keys(value: Any, quote: str) -> str:
    """Write a value as Gemma does."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        members = (f"{key}:{bare_keys(one, quote)}" for key, one in value.items())
        return "{" + ",".join(members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(bare_keys(one, quote) for one in value) + "]"
    return dumps(value)


@attrs.frozen
class Pattern:
    """Writes every call by a pattern: NAME, INPUT and NUMBER, the id, stand for what is in a call.

    Arguments are JSON, or by the pattern of one with KEY, VALUE and, for text and other values,
    the first or the second of `types` for TYPE. `around` has a place for all calls.
    """

    call: str
    argument: str = ""
    join: str = ""
    around: str = "{}"
    comma: str = ""
    types: tuple[str, str] = ("", "")
    value: Callable[[Any], str] = raw
    #: A template's text for a value, in Jinja.
    value_in_jinja: str = "(v if v is string else v | tojson)"

    def __call__(self, calls: list[Call]) -> str:
        texts = (
            self._arguments(args).join(self._call(name).split("INPUT")) for name, args in calls
        )
        return self.join.join(texts).join(self.around.split("{}"))

    def _call(self, name: str) -> str:
        return self.call.replace("NUMBER", "123456789").replace("NAME", name)

    def _arguments(self, arguments: dict[str, Any]) -> str:
        if not self.argument:
            return dumps(arguments)
        texts = []
        for key, value in arguments.items():
            kind = self.types[0 if isinstance(value, str) else 1]
            text = self.argument.replace("KEY", key).replace("TYPE", kind)
            texts.append(self.value(value).join(text.split("VALUE")))
        return self.comma.join(texts)

    def in_jinja(self) -> str:
        """Write the calls in `m.tool_calls`."""
        kind = f"{{{{ {self.types[0]!r} if v is string else {self.types[1]!r} }}}}"
        argument = jinja(
            self.argument, KEY="{{ k }}", TYPE=kind, VALUE=f"{{{{ {self.value_in_jinja} }}}}"
        )
        comma = f"{{% if not loop.first %}}{jinja(self.comma)}{{% endif %}}"
        arguments = f"{{% for k, v in f.arguments.items() %}}{comma}{argument}{{% endfor %}}"
        if not self.argument:
            arguments = "{{ f.arguments | tojson }}"
        # Templates that write ids insist on nine characters.
        number = "{{ one.id if one.id | length == 9 else raise_exception('id') }}"
        call = jinja(self.call, NAME="{{ f.name }}", NUMBER=number, INPUT=arguments)
        calls = (
            "{% for one in m.tool_calls %}{% set f = one.function %}"
            f"{{% if not loop.first %}}{jinja(self.join)}{{% endif %}}{call}{{% endfor %}}"
        )
        return calls.join(map(jinja, self.around.split("{}")))


def jinja(text: str, **parts: str) -> str:
    """Write text in Jinja as it is, but for words that stand for something."""
    pieces = re.split(f"({'|'.join(parts)})", text) if parts else [text]
    return "".join(parts.get(one) or f"{{{{ {one!r} }}}}" for one in pieces if one)


_TURN = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}{{ '<|turn|>' + m.role + '\\n' }}
{%- if m.tool_calls or m.reasoning_content %}REASONING{% endif %}
{%- if m.content %}CONTENT{% endif %}
{%- if m.tool_calls %}CALLS{% endif %}{{ '<|over|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}PROMPT{% endif %}"""


def template_of(writer: Writer) -> str:
    """Make a template that writes what a writer does."""
    assert isinstance(writer.write_calls, Pattern)
    thinking = ""
    if writer.reasoning:
        before, after = writer.reasoning.split("{}")
        start = jinja(before or writer.prompt)
        thinking = f"{start}{{{{ m.reasoning_content or '' }}}}{jinja(after)}"
    said = "{{ m.content }}".join(map(jinja, writer.content.split("{}")))
    source = _TURN.replace("REASONING", thinking).replace("CONTENT", said)
    source = source.replace("CALLS", writer.write_calls.in_jinja())
    return source.replace("PROMPT", jinja(writer.prompt) if writer.prompt else "")


THINK = "<think>\n{}\n</think>\n\n"
OBJECT = '{"name": "NAME", "arguments": INPUT}'
COHERE = '    {"tool_call_id": "0", "tool_name": "NAME", "parameters": INPUT}'
HERMES = Pattern(f"<tool_call>\n{OBJECT}\n</tool_call>", join="\n", around="\n{}")
QWEN3_CODER = Pattern(
    "<tool_call>\n<function=NAME>\nINPUT</function>\n</tool_call>",
    "<parameter=KEY>\nVALUE\n</parameter>\n",
    join="\n",
    around="\n\n{}",
)
DEEPSEEK = (
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
)
KIMI = Pattern(
    "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>INPUT<|tool_call_end|>",
    around="<|tool_calls_section_begin|>{}<|tool_calls_section_end|>",
)
PYTHON = Pattern(
    "NAME(INPUT)",
    "KEY=VALUE",
    comma=", ",
    join=", ",
    around="<|tool_call_start|>[{}]<|tool_call_end|>",
    value=repr,
    value_in_jinja="v | tojson",
)


def gemma(start: str, quote: str, end: str) -> Pattern:
    return Pattern(
        f"{start}call:NAME{{INPUT}}{end}",
        "KEY:VALUE",
        comma=",",
        value=lambda value: bare_keys(value, quote),
        value_in_jinja=f"({quote!r} ~ v ~ {quote!r} if v is string else v | tojson)",
    )


def dsml(bar: str, section: str) -> Pattern:
    """Write DeepSeek's markup; `bar` stands before each name of a tag."""
    return Pattern(
        f'<{bar}invoke name="NAME">\nINPUT</{bar}invoke>\n',
        f'<{bar}parameter name="KEY" string="TYPE">VALUE</{bar}parameter>\n',
        around=f"\n\n<{bar}{section}>\n{{}}</{bar}{section}>",
        types=("true", "false"),
    )


def suffixed(suffix: str) -> Pattern:
    """Write calls as Hunyuan does, whose markers have a suffix."""
    return Pattern(
        f"<tool_call{suffix}>NAME<tool_sep{suffix}>\nINPUT</tool_call{suffix}>\n",
        f"<arg_key{suffix}>KEY</arg_key{suffix}>\n<arg_value{suffix}>VALUE</arg_value{suffix}>\n",
        around=f"<tool_calls{suffix}>\n{{}}</tool_calls{suffix}>",
    )


def cdata(value: Any) -> str:
    return f"<![CDATA[{value}]]>" if isinstance(value, str) else dumps(value)


def elements(calls: list[Call]) -> str:
    mark = "]<]minimax[>["
    texts = []
    for name, arguments in calls:
        inside = "".join(
            f"{mark}<{key}>{raw(value)}{mark}</{key}>" for key, value in arguments.items()
        )
        texts.append(f'{mark}<invoke name="{name}">{inside}{mark}</invoke>\n')
    return f"{mark}<tool_call>\n{''.join(texts)}{mark}</tool_call>"


def derive(calls: Pattern, **fields: Any) -> Writer:
    """Make a writer whose format is derived from a template that writes the same."""
    writer = Writer(format=families.PLAIN, write_calls=calls, **fields)
    found = ChatTemplate(template_of(writer)).recognized
    assert found.name == "derived", found
    return attrs.evolve(writer, format=found.format)


#: Writers whose formats are derived.
DERIVED = {
    "hermes": derive(HERMES),
    "hermes-think": derive(HERMES, reasoning=THINK),
    "qwen3-coder": derive(QWEN3_CODER),
    "qwen3-coder-think": derive(QWEN3_CODER, reasoning=THINK),
    "glm-4": derive(
        Pattern(
            "\n<tool_call>NAME\nINPUT</tool_call>",
            "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
        ),
        reasoning="{}</think>\n",
        prompt="<think>",
    ),
    "hunyuan-3": derive(
        suffixed(":opensource"), reasoning="<think:opensource>{}</think:opensource>"
    ),
    "seed-oss": derive(
        Pattern(
            "\n<seed:tool_call>\n<function=NAME>\nINPUT</function>\n</seed:tool_call>",
            "<parameter=KEY>VALUE</parameter>\n",
        ),
        reasoning="<seed:think>{}</seed:think>\n",
    ),
    "minimax-m2": derive(
        Pattern(
            '<invoke name="NAME">\nINPUT</invoke>\n',
            '<parameter name="KEY">VALUE</parameter>\n',
            around="\n<minimax:tool_call>\n{}</minimax:tool_call>",
        ),
        reasoning="{}\n</think>\n\n",
        prompt="<think>\n",
    ),
    "mistral-array": derive(
        Pattern(OBJECT[:-1] + ', "id": "NUMBER"}', join=", ", around="[TOOL_CALLS][{}]")
    ),
    "mistral": derive(Pattern("[TOOL_CALLS]NAME[CALL_ID]NUMBER[ARGS]INPUT")),
    "mistral-think": derive(Pattern("[TOOL_CALLS]NAME[ARGS]INPUT"), reasoning="[THINK]{}[/THINK]"),
    "deepseek-r1": derive(
        Pattern(
            DEEPSEEK[0] + "function<｜tool▁sep｜>NAME\n```json\nINPUT\n```" + DEEPSEEK[1],
            join="\n",
            around=DEEPSEEK[2],
        ),
        reasoning="{}\n</think>\n\n",
        prompt="<think>\n",
    ),
    "deepseek-v3.1": derive(
        Pattern(DEEPSEEK[0] + "NAME<｜tool▁sep｜>INPUT" + DEEPSEEK[1], around=DEEPSEEK[2]),
        reasoning="{}</think>",
        prompt="<think>",
    ),
    "deepseek-v3.2": derive(
        dsml("｜DSML｜", "function_calls"), reasoning="{}</think>", prompt="<think>"
    ),
    "command-r7b": derive(
        Pattern(COHERE, join=",\n", around="<|START_ACTION|>[\n{}\n]<|END_ACTION|>"),
        reasoning="<|START_THINKING|>{}<|END_THINKING|>",
        content="<|START_RESPONSE|>{}<|END_RESPONSE|>",
    ),
    "command-r": derive(Pattern(COHERE, join=",\n", around="\nAction:\n```json\n[\n{}\n]\n```")),
    "firefunction": derive(Pattern(OBJECT, join=", ", around="functools[{}]")),
    "lfm2-think": derive(PYTHON, reasoning="<think>{}</think>"),
    "kimi-k2": derive(KIMI),
    "dots3-note": derive(
        Pattern(
            '<invoke name="NAME">\nINPUT</invoke>\n',
            '<parameter name="KEY">VALUE</parameter>\n',
            around="<dots_function_call>\n{}</dots_function_call>",
        ),
        reasoning=THINK,
    ),
    "lfm2.5-bare": derive(attrs.evolve(PYTHON, around="[{}]")),
    "olmo-3": derive(
        attrs.evolve(PYTHON, join="\n", around="<function_calls>{}</function_calls>", value=dumps)
    ),
    "deepseek-v4.1": derive(dsml("｜DSML｜ ", "calls"), reasoning="{}</think>", prompt="<think>"),
    "gigachat-3.5": derive(
        dsml("｜GCML｜", "tool_calls"), reasoning="{}</think>", prompt="<think>"
    ),
    "hunyuan-4": derive(
        Pattern(
            "<tool_call:6124c78e>NAMEINPUT</tool_call:6124c78e>",
            "<arg_key:6124c78e>KEY</arg_key:6124c78e><arg_value:6124c78e>VALUE</arg_value:6124c78e>",
            around="<tool_calls:6124c78e>{}</tool_calls:6124c78e>",
        ),
        reasoning="<think:6124c78e>{}</think:6124c78e>",
    ),
    "ernie-4.5": derive(
        HERMES,
        reasoning="<think>\n{}\n</think>\n\n\n",
        content="<response>\n{}\n</response>\n",
    ),
    "json-values": derive(
        Pattern(
            '<invoke name="NAME">\nINPUT</invoke>\n',
            '<parameter name="KEY">VALUE</parameter>\n',
            around="<calls>\n{}</calls>",
            value=dumps,
            value_in_jinja="v | tojson",
        )
    ),
    "function-gemma": derive(gemma("<start_function_call>", "<escape>", "<end_function_call>")),
}

_NAMED = (
    Writer(
        format=families.PLAIN,
        write_calls=Pattern(OBJECT, join=", ", around='{"tool_calls": [{}]}'),
    ),
    Writer(format=families.HERMES, write_calls=HERMES),
    Writer(format=families.MINIMAX_M3, write_calls=elements, reasoning="<mm:think>{}</mm:think>"),
    Writer(
        format=families.MINIMAX_M1,
        write_calls=Pattern(OBJECT, join="\n", around="\n<tool_calls>\n{}\n</tool_calls>"),
        reasoning=THINK,
    ),
    Writer(
        format=families.MINICPM5,
        write_calls=Pattern(
            '\n<function name="NAME">INPUT</function>',
            '<param name="KEY">VALUE</param>',
            value=cdata,
        ),
        reasoning=THINK,
    ),
    Writer(
        format=families.LLAMA3,
        write_calls=Pattern('{"name": "NAME", "parameters": INPUT}', join="; "),
    ),
    Writer(
        format=families.LLAMA4,
        write_calls=attrs.evolve(PYTHON, around="[{}]"),
    ),
    Writer(
        format=families.PHI4_MINI_GENERIC,
        write_calls=Pattern(OBJECT, join=", ", around='{"tool_calls": [{}]}'),
    ),
    Writer(
        format=families.PHI4_MINI, write_calls=Pattern(OBJECT, join=", ", around="functools[{}]")
    ),
    Writer(
        format=families.HUNYUAN_A13B,
        write_calls=Pattern(OBJECT, join=", ", around="<tool_calls>[{}]</tool_calls>\n</answer>"),
        reasoning="<think>\n{}\n</think>\n",
        content="<answer>\n{}\n</answer>",
    ),
    Writer(
        format=families.KIMI_K3,
        write_calls=Pattern(
            '<|open|>call tool="NAME" index="1"<|sep|>INPUT<|close|>call<|sep|>',
            '<|open|>argument key="KEY" type="TYPE"<|sep|>VALUE<|close|>argument<|sep|>',
            around="<|open|>tools<|sep|>{}<|close|>tools<|sep|><|close|>message<|sep|>",
            types=("string", "object"),
        ),
        reasoning="{}<|close|>think<|sep|>",
        content="<|open|>response<|sep|>{}<|close|>response<|sep|>",
        prompt="<|open|>think<|sep|>",
    ),
    Writer(
        format=families.GRANITE_3,
        write_calls=Pattern(OBJECT, join=", ", around="<|tool_call|>[{}]"),
        content="<response>{}</response>",
    ),
    Writer(
        format=families.NEMOTRON_V2,
        write_calls=Pattern(OBJECT, join=", ", around="\n<TOOLCALL>[{}]</TOOLCALL>"),
        reasoning=THINK,
    ),
    Writer(
        format=families.APRIEL,
        write_calls=Pattern(OBJECT, join=", ", around="\n<tool_calls>[{}]</tool_calls>"),
        reasoning="{}\n[BEGIN FINAL RESPONSE]\n",
        prompt="<|begin_assistant|>\nHere are my reasoning steps:\n",
    ),
    Writer(format=families.FUNCTIONARY_3_1, write_calls=Pattern("<function=NAME>INPUT</function>")),
    Writer(format=families.LFM2, write_calls=PYTHON),
    Writer(
        format=families.APERTUS,
        write_calls=Pattern(
            '{"NAME": INPUT}', join=", ", around="<|tools_prefix|>[{}]<|tools_suffix|>"
        ),
        reasoning="<|inner_prefix|>{}<|inner_suffix|>",
    ),
    Writer(
        format=families.GEMMA4,
        write_calls=gemma("<|tool_call>", '<|"|>', "<tool_call|>"),
        reasoning="<|channel>thought\n{}\n<channel|>",
    ),
    Writer(format=families.GIGACHAT, write_calls=Pattern(f"<|function_call|>{OBJECT}"), most=1),
    Writer(
        format=families.SOLAR,
        write_calls=Pattern(
            "<|tool_call:begin|>id<|tool_call:name|>NAME<|tool_call:args|>INPUT<|tool_call:end|>",
            around="<|begin|>assistant<|tool_calls|>{}<|calls|>",
        ),
        reasoning="<|think|>{}<|end|>",
        content="<|begin|>assistant<|content|>{}<|end|>",
        prompt="<|begin|>assistant",
    ),
    Writer(
        format=families.HARMONY,
        write_calls=Pattern(
            "<|start|>assistant<|channel|>commentary to=functions.NAME "
            "<|constrain|>json<|message|>INPUT<|call|>"
        ),
        reasoning="<|channel|>analysis<|message|>{}<|end|>",
        content="<|start|>assistant<|channel|>final<|message|>{}<|end|>",
        prompt="<|end|><|start|>assistant",
    ),
    Writer(
        format=families.MUSE_GLIMMER,
        write_calls=Pattern(
            "<|start|>assistant to=NAME<|message|><atem:function_calls>\n"
            '<atem:invoke name="NAME">\nINPUT</atem:invoke>\n</atem:function_calls><|eom|>',
            '<atem:parameter name="KEY">VALUE</atem:parameter>\n',
        ),
        reasoning=" to=self<|message|>{}<|eom|>",
        content="<|start|>assistant to=user<|message|>{}<|eom|>",
        prompt="<|eot|><|start|>assistant",
    ),
    Writer(
        format=families.FUNCTIONARY_3_2,
        write_calls=Pattern(">>>NAME\nINPUT"),
        content=">>>all\n{}",
    ),
)

_NAMES = {format: name for name, format in families.FAMILIES.items()}

PLAIN_THINK = attrs.evolve(families.PLAIN, reasoning=families.THINK)

#: All writers by the names of their formats; one that is asked for may be derived, too.
WRITERS = {_NAMES[writer.format]: writer for writer in _NAMED} | DERIVED
WRITERS["plain-think"] = attrs.evolve(WRITERS["plain"], format=PLAIN_THINK, reasoning=THINK)
