"""Writers of messages, one for each format, and what they write for one example."""

# ruff: noqa: RUF001 - these models' markers have wide bars on purpose

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from trioserve.chat.formats import families
from trioserve.chat.formats.syntax import ChatFormat, Elements, Literals, Parameters

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
        """Whether a call can only come alone."""
        return self.format.tool_calls is not None and bool(self.format.tool_calls.bare)

    @property
    def markers(self) -> tuple[str, ...]:
        """What plain text must not contain."""
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
        """Whether the prompt has begun the reasoning."""
        start = self.format.reasoning.start if self.format.reasoning is not None else "-"
        return self.prompt.rstrip().endswith(start)

    @property
    def plain_keys(self) -> bool:
        """Whether keys must be identifiers."""
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


def each(pattern: str, join: str = "", around: str = "{}") -> Callable[[list[Call]], str]:
    """Write every call by a pattern: NAME and ARGS stand for what is in a call."""

    def write(calls: list[Call]) -> str:
        texts = (
            dumps(arguments).join(pattern.replace("NAME", name).split("ARGS"))
            for name, arguments in calls
        )
        return join.join(texts).join(around.split("{}"))

    return write


def tagged(
    pattern: str, parameter: str, join: str = "", around: str = "{}", *, cdata: bool = False
) -> Callable[[list[Call]], str]:
    """Write every call by a pattern, with NAME and ARGS, and each argument by one with KEY."""

    def one(key: str, value: Any) -> str:
        text = parameter.replace("KEY", key)
        text = text.replace("ISTEXT", "true" if isinstance(value, str) else "false")
        text = text.replace("TYPE", "string" if isinstance(value, str) else "object")
        written = f"<![CDATA[{value}]]>" if cdata and isinstance(value, str) else raw(value)
        return written.join(text.split("VALUE"))

    def write(calls: list[Call]) -> str:
        texts = []
        for name, arguments in calls:
            body = "".join(one(key, value) for key, value in arguments.items())
            texts.append(body.join(pattern.replace("NAME", name).split("ARGS")))
        return join.join(texts).join(around.split("{}"))

    return write


def python(calls: list[Call]) -> str:
    texts = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return f"<|tool_call_start|>[{', '.join(texts)}]<|tool_call_end|>"


def gemma(start: str, quote: str, end: str) -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        return "".join(f"{start}call:{name}{bare_keys(args, quote)}{end}" for name, args in calls)

    return write


THINK = "<think>\n{}\n</think>\n\n"
OBJECT = '{"name": "NAME", "arguments": ARGS}'
HERMES = each(f"<tool_call>\n{OBJECT}\n</tool_call>", "\n", "\n{}")
QWEN3_CODER = tagged(
    "<tool_call>\n<function=NAME>\nARGS</function>\n</tool_call>",
    "<parameter=KEY>\nVALUE\n</parameter>\n",
    "\n",
    "\n\n{}",
)
DEEPSEEK_R1 = each(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGS\n```<｜tool▁call▁end｜>",
    "\n",
    "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
)
COHERE = each(
    '    {"tool_call_id": "0", "tool_name": "NAME", "parameters": ARGS}', ",\n", "[\n{}\n]"
)
KIMI = each(
    "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGS<|tool_call_end|>",
    "",
    "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>",
)


def mistral(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}" for name, arguments in calls)


def elements(calls: list[Call]) -> str:
    mark = "]<]minimax[>["
    texts = []
    for name, arguments in calls:
        inside = "".join(
            f"{mark}<{key}>{raw(value)}{mark}</{key}>" for key, value in arguments.items()
        )
        texts.append(f'{mark}<invoke name="{name}">{inside}{mark}</invoke>\n')
    return f"{mark}<tool_call>\n{''.join(texts)}{mark}</tool_call>"


def generic(calls: list[Call]) -> str:
    texts = (f'{{"name": "{name}", "arguments": {dumps(values)}}}' for name, values in calls)
    return f'{{"tool_calls": [{", ".join(texts)}]}}'


def command_r7b(calls: list[Call]) -> str:
    return f"<|START_ACTION|>{COHERE(calls)}<|END_ACTION|>"


def command_r(calls: list[Call]) -> str:
    return f"\nAction:\n```json\n{COHERE(calls)}\n```"


def harmony(calls: list[Call]) -> str:
    header = "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
    return "".join(header.format(name) + dumps(values) + "<|call|>" for name, values in calls)


_ALL = (
    Writer(format=families.HERMES_THINK, write_calls=HERMES, reasoning=THINK),
    Writer(format=families.HERMES, write_calls=HERMES),
    Writer(format=families.PLAIN_THINK, write_calls=generic, reasoning=THINK),
    Writer(format=families.PLAIN, write_calls=generic),
    Writer(format=families.QWEN3_CODER_THINK, write_calls=QWEN3_CODER, reasoning=THINK),
    Writer(format=families.QWEN3_CODER, write_calls=QWEN3_CODER),
    Writer(
        format=families.GLM,
        write_calls=tagged(
            "\n<tool_call>NAME\nARGS</tool_call>",
            "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
        ),
        reasoning="{}</think>\n",
        prompt="<|assistant|><think>",
    ),
    Writer(
        format=families.HUNYUAN,
        write_calls=tagged(
            "<tool_call:opensource>NAME<tool_sep:opensource>\nARGS</tool_call:opensource>\n",
            "<arg_key:opensource>KEY</arg_key:opensource>\n"
            "<arg_value:opensource>VALUE</arg_value:opensource>\n",
            around="<tool_calls:opensource>\n{}</tool_calls:opensource>",
        ),
        reasoning="<think:opensource>{}</think:opensource>",
    ),
    Writer(
        format=families.SEED_OSS,
        write_calls=tagged(
            "\n<seed:tool_call>\n<function=NAME>\nARGS</function>\n</seed:tool_call>",
            "<parameter=KEY>VALUE</parameter>\n",
        ),
        reasoning="<seed:think>{}</seed:think>\n",
    ),
    Writer(
        format=families.MINIMAX_M2,
        write_calls=tagged(
            '<invoke name="NAME">\nARGS</invoke>\n',
            '<parameter name="KEY">VALUE</parameter>\n',
            around="\n<minimax:tool_call>\n{}</minimax:tool_call>",
        ),
        reasoning="{}\n</think>\n\n",
        prompt="]~b]ai\n<think>\n",
    ),
    Writer(format=families.MINIMAX_M3, write_calls=elements, reasoning="<mm:think>{}</mm:think>"),
    Writer(
        format=families.MINIMAX_M1,
        write_calls=each(OBJECT, "\n", "\n<tool_calls>\n{}\n</tool_calls>"),
        reasoning=THINK,
    ),
    Writer(
        format=families.MINICPM5,
        write_calls=tagged(
            '\n<function name="NAME">ARGS</function>',
            '<param name="KEY">VALUE</param>',
            cdata=True,
        ),
        reasoning=THINK,
    ),
    Writer(
        format=families.LLAMA3,
        write_calls=each('{"name": "NAME", "parameters": ARGS}', "; "),
    ),
    Writer(
        format=families.MISTRAL_OLD,
        write_calls=each(OBJECT[:-1] + ', "id": "123456789"}', ", ", "[TOOL_CALLS][{}]"),
    ),
    Writer(format=families.MISTRAL, write_calls=mistral),
    Writer(format=families.MISTRAL_THINK, write_calls=mistral, reasoning="[THINK]{}[/THINK]"),
    Writer(
        format=families.DEEPSEEK_R1,
        write_calls=DEEPSEEK_R1,
        reasoning="{}\n</think>\n\n",
        prompt="<｜Assistant｜><think>\n",
    ),
    Writer(format=families.DEEPSEEK_V3, write_calls=DEEPSEEK_R1),
    Writer(
        format=families.DEEPSEEK_V3_1,
        write_calls=each(
            "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGS<｜tool▁call▁end｜>",
            "",
            "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
        ),
        reasoning="{}</think>",
        prompt="<｜Assistant｜><think>",
    ),
    Writer(
        format=families.DEEPSEEK_V3_2,
        write_calls=tagged(
            '<｜DSML｜invoke name="NAME">\nARGS</｜DSML｜invoke>\n',
            '<｜DSML｜parameter name="KEY" string="ISTEXT">VALUE</｜DSML｜parameter>\n',
            around="\n\n<｜DSML｜function_calls>\n{}</｜DSML｜function_calls>",
        ),
        reasoning="{}</think>",
        prompt="<｜Assistant｜><think>",
    ),
    Writer(format=families.KIMI_K2_THINK, write_calls=KIMI, reasoning=THINK),
    Writer(format=families.KIMI_K2, write_calls=KIMI),
    Writer(
        format=families.KIMI_K3,
        write_calls=tagged(
            '<|open|>call tool="NAME" index="1"<|sep|>ARGS<|close|>call<|sep|>',
            '<|open|>argument key="KEY" type="TYPE"<|sep|>VALUE<|close|>argument<|sep|>',
            around="<|open|>tools<|sep|>{}<|close|>tools<|sep|><|close|>message<|sep|>",
        ),
        reasoning="{}<|close|>think<|sep|>",
        content="<|open|>response<|sep|>{}<|close|>response<|sep|>",
        prompt="<|open|>think<|sep|>",
    ),
    Writer(
        format=families.COMMAND_R7B,
        write_calls=command_r7b,
        reasoning="<|START_THINKING|>{}<|END_THINKING|>",
        content="<|START_RESPONSE|>{}<|END_RESPONSE|>",
    ),
    Writer(format=families.COMMAND_R, write_calls=command_r),
    Writer(
        format=families.GRANITE_3,
        write_calls=each(OBJECT, ", ", "<|tool_call|>[{}]"),
        reasoning="<think>{}</think>\n",
        content="<response>{}</response>",
    ),
    Writer(
        format=families.NEMOTRON_V2,
        write_calls=each(OBJECT, ", ", "\n<TOOLCALL>[{}]</TOOLCALL>"),
        reasoning=THINK,
    ),
    Writer(
        format=families.APRIEL,
        write_calls=each(OBJECT, ", ", "\n<tool_calls>[{}]</tool_calls>"),
        reasoning="{}\n[BEGIN FINAL RESPONSE]\n",
        prompt="<|begin_assistant|>\nHere are my reasoning steps:\n",
    ),
    Writer(format=families.FIREFUNCTION, write_calls=each(OBJECT, ", ", "functools[{}]")),
    Writer(format=families.FUNCTIONARY_3_1, write_calls=each("<function=NAME>ARGS</function>")),
    Writer(format=families.LFM2_THINK, write_calls=python, reasoning="<think>{}</think>"),
    Writer(format=families.LFM2, write_calls=python),
    Writer(
        format=families.APERTUS,
        write_calls=each('{"NAME": ARGS}', ", ", "<|tools_prefix|>[{}]<|tools_suffix|>"),
        reasoning="<|inner_prefix|>{}<|inner_suffix|>",
    ),
    Writer(
        format=families.GEMMA4,
        write_calls=gemma("<|tool_call>", '<|"|>', "<tool_call|>"),
        reasoning="<|channel>thought\n{}\n<channel|>",
    ),
    Writer(
        format=families.FUNCTION_GEMMA,
        write_calls=gemma("<start_function_call>", "<escape>", "<end_function_call>"),
    ),
    Writer(format=families.GIGACHAT, write_calls=each(f"<|function_call|>{OBJECT}"), most=1),
    Writer(
        format=families.SOLAR,
        write_calls=each(
            "<|tool_call:begin|>id<|tool_call:name|>NAME<|tool_call:args|>ARGS<|tool_call:end|>",
            "",
            "<|begin|>assistant<|tool_calls|>{}<|calls|>",
        ),
        reasoning="<|think|>{}<|end|>",
        content="<|begin|>assistant<|content|>{}<|end|>",
        prompt="<|begin|>assistant",
    ),
    Writer(
        format=families.HARMONY,
        write_calls=harmony,
        reasoning="<|channel|>analysis<|message|>{}<|end|>",
        content="<|start|>assistant<|channel|>final<|message|>{}<|end|>",
        prompt="<|end|><|start|>assistant",
    ),
    Writer(
        format=families.FUNCTIONARY_3_2,
        write_calls=each(">>>NAME\nARGS"),
        content=">>>all\n{}",
    ),
)

_NAMES = {format: name for name, format in families.FAMILIES.items()}

#: By the name of the format.
WRITERS = {_NAMES[writer.format]: writer for writer in _ALL}
