"""How models write tool calls, as data: one description a family."""

# ruff: noqa: RUF001 - these models' markers have wide bars on purpose

from __future__ import annotations

from trioserve.chat.formats.syntax import (
    Choice,
    Elements,
    Ignore,
    JsonArguments,
    JsonCall,
    JsonContent,
    Literals,
    Maybe,
    Name,
    OneOf,
    Parameters,
    QuotedName,
    Text,
    ToolCalls,
)

# -- one JSON object a call

_NAMED = JsonCall(ignored_keys=("type", "id"))

HERMES = ToolCalls(starts=("<tool_call>",), call=(_NAMED,), closing=("</tool_call>",))

#: For models whose template has no place for tools, as llama.cpp asks them to write calls.
GENERIC = ToolCalls(
    bare="{",
    starts=(),
    opening=(
        Text("{"),
        Choice(
            '"response"',
            (Text('"response"'), Text(":"), JsonContent()),
            (OneOf(('"tool_calls"', '"tool_call"')), Text(":"), Maybe(("[",))),
        ),
    ),
    call=(_NAMED,),
    between=(",",),
    closing=("]", "}"),
)

_LLAMA3_CALL = JsonCall(arguments_keys=("parameters", "arguments"), ignored_keys=("type", "id"))

LLAMA3 = ToolCalls(
    bare="{",
    starts=("<|python_tag|>",),
    call=(
        Choice(
            "{",
            (_LLAMA3_CALL,),
            (Name(until=(".call(",)), Text(".call"), Literals(open="(", equals="=", close=")")),
        ),
    ),
    between=(";",),
)

MINIMAX_M1 = ToolCalls(
    starts=("<tool_calls>",), call=(_NAMED,), again=("{",), closing=("</tool_calls>",)
)

GIGACHAT = ToolCalls(
    starts=("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>"),
    call=(_NAMED,),
)

# -- an array of JSON objects


def _array(
    start: str, *closing: str, call: JsonCall = _NAMED, short_ids: bool = False
) -> ToolCalls:
    return ToolCalls(
        starts=(start,),
        opening=(Text("["),),
        call=(call,),
        between=(",",),
        closing=("]", *closing),
        short_ids=short_ids,
    )


_COHERE = JsonCall(
    name_keys=("tool_name",), arguments_keys=("parameters",), ignored_keys=("tool_call_id",)
)

MISTRAL_OLD = _array("[TOOL_CALLS]", short_ids=True)
NEMOTRON_V2 = _array("<TOOLCALL>", "</TOOLCALL>")
APRIEL = _array("<tool_calls>", "</tool_calls>")
FIREFUNCTION = _array("functools")
GRANITE_3 = _array("<|tool_call|>")
COMMAND_R7B = _array("<|START_ACTION|>", "<|END_ACTION|>", call=_COHERE)
COMMAND_R = ToolCalls(
    starts=("Action:",),
    opening=(Text("```json"), Text("[")),
    call=(_COHERE,),
    between=(",",),
    closing=("]", "```"),
)
APERTUS = ToolCalls(
    starts=("<|tools_prefix|>",),
    opening=(Text("["),),
    call=(Text("{"), QuotedName(), Text(":"), JsonArguments(), Text("}")),
    between=(",",),
    closing=("]", "<|tools_suffix|>"),
)

# -- the name between markers, then the arguments as JSON

MISTRAL = ToolCalls(
    starts=("[TOOL_CALLS]",),
    call=(
        Name(until=("[CALL_ID]", "[ARGS]", "{")),
        Ignore(until=("[ARGS]", "{")),
        Maybe(("[ARGS]",)),
        JsonArguments(),
    ),
    short_ids=True,
)

_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")

DEEPSEEK_R1 = ToolCalls(
    starts=_DEEPSEEK[:2],
    call=(
        Text(_DEEPSEEK[1]),
        Text("function"),
        Text("<｜tool▁sep｜>"),
        Name(until=("\n",)),
        Text("```json"),
        JsonArguments(),
        Text("```"),
        Text(_DEEPSEEK[2]),
    ),
    again=(_DEEPSEEK[1],),
    closing=("<｜tool▁calls▁end｜>",),
)

DEEPSEEK_V3_1 = ToolCalls(
    starts=_DEEPSEEK[:2],
    call=(
        Text(_DEEPSEEK[1]),
        Name(until=("<｜tool▁sep｜>",)),
        Text("<｜tool▁sep｜>"),
        JsonArguments(),
        Text(_DEEPSEEK[2]),
    ),
    again=(_DEEPSEEK[1],),
    closing=("<｜tool▁calls▁end｜>",),
)

KIMI_K2 = ToolCalls(
    starts=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    call=(
        Text("<|tool_call_begin|>"),
        Name(until=("<|tool_call_argument_begin|>",), prefix="functions.", counted=True),
        Text("<|tool_call_argument_begin|>"),
        JsonArguments(),
        Text("<|tool_call_end|>"),
    ),
    again=("<|tool_call_begin|>",),
    closing=("<|tool_calls_section_end|>",),
)

SOLAR = ToolCalls(
    starts=("<|tool_calls|>", "<|tool_call:begin|>"),
    call=(
        Text("<|tool_call:begin|>"),
        Ignore(until=("<|tool_call:name|>",)),
        Text("<|tool_call:name|>"),
        Name(until=("<|tool_call:args|>",)),
        Text("<|tool_call:args|>"),
        JsonArguments(),
        Text("<|tool_call:end|>"),
    ),
    again=("<|tool_call:begin|>",),
    closing=("<|calls|>",),
)

FUNCTIONARY_3_1 = ToolCalls(
    starts=("<function=",),
    call=(Name(until=(">",)), Text(">"), JsonArguments(), Text("</function>")),
)

# -- each argument between markers

QWEN3_CODER = ToolCalls(
    starts=("<tool_call>", "<function="),
    call=(
        Text("<function="),
        Name(until=(">",)),
        Text(">"),
        Parameters(
            open="<parameter=",
            key_end=">",
            close="</parameter>",
            ends=("</function>", "</tool_call>"),
            newlines=True,
        ),
        Maybe(("</function>",)),
    ),
    again=("<function=",),
    closing=("</tool_call>",),
)

SEED_OSS = ToolCalls(
    starts=("<seed:tool_call>", "<function="),
    call=(
        Text("<function="),
        Name(until=(">",)),
        Text(">"),
        Parameters(
            open="<parameter=",
            key_end=">",
            close="</parameter>",
            ends=("</function>", "</seed:tool_call>"),
        ),
        Maybe(("</function>",)),
    ),
    again=("<function=",),
    closing=("</seed:tool_call>",),
)

MINIMAX_M2 = ToolCalls(
    starts=("<minimax:tool_call>",),
    call=(
        Text('<invoke name="'),
        Name(until=('">',)),
        Text('">'),
        Parameters(
            open='<parameter name="',
            key_end='">',
            close="</parameter>",
            ends=("</invoke>",),
        ),
        Text("</invoke>"),
    ),
    again=('<invoke name="',),
    closing=("</minimax:tool_call>",),
)

_M3 = "]<]minimax[>["

MINIMAX_M3 = ToolCalls(
    starts=(f"{_M3}<tool_call>",),
    call=(
        Text(f'{_M3}<invoke name="'),
        Name(until=('">',)),
        Text('">'),
        Elements(mark=_M3, parent="invoke", item="item"),
    ),
    again=(f'{_M3}<invoke name="',),
    closing=(f"{_M3}</tool_call>",),
)

DEEPSEEK_V3_2 = ToolCalls(
    starts=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
    call=(
        Text('<｜DSML｜invoke name="'),
        Name(until=('">',)),
        Text('">'),
        Parameters(
            open='<｜DSML｜parameter name="',
            key_end='"',
            value_open=">",
            text_attribute='string="true"',
            close="</｜DSML｜parameter>",
            ends=("</｜DSML｜invoke>",),
        ),
        Text("</｜DSML｜invoke>"),
    ),
    again=('<｜DSML｜invoke name="',),
    closing=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
)

MINICPM5 = ToolCalls(
    starts=('<function name="',),
    call=(
        Name(until=('">',)),
        Text('">'),
        Parameters(
            open='<param name="',
            key_end='">',
            close="</param>",
            ends=("</function>",),
            cdata=True,
        ),
        Text("</function>"),
    ),
)

GLM = ToolCalls(
    starts=("<tool_call>",),
    call=(
        Name(until=("<arg_key>", "</tool_call>")),
        Parameters(
            open="<arg_key>",
            key_end="</arg_key>",
            value_open="<arg_value>",
            close="</arg_value>",
            ends=("</tool_call>",),
        ),
        Text("</tool_call>"),
    ),
)

HUNYUAN = ToolCalls(
    starts=("<tool_calls:opensource>",),
    call=(
        Text("<tool_call:opensource>"),
        Name(until=("<tool_sep:opensource>",)),
        Text("<tool_sep:opensource>"),
        Parameters(
            open="<arg_key:opensource>",
            key_end="</arg_key:opensource>",
            value_open="<arg_value:opensource>",
            close="</arg_value:opensource>",
            ends=("</tool_call:opensource>",),
        ),
        Text("</tool_call:opensource>"),
    ),
    again=("<tool_call:opensource>",),
    closing=("</tool_calls:opensource>",),
)

KIMI_K3 = ToolCalls(
    starts=("<|open|>tools<|sep|>",),
    call=(
        Text('<|open|>call tool="'),
        Name(until=('"',)),
        Ignore(until=("<|sep|>",)),
        Text("<|sep|>"),
        Parameters(
            open='<|open|>argument key="',
            key_end='"',
            value_open="<|sep|>",
            text_attribute='type="string"',
            close="<|close|>argument<|sep|>",
            ends=("<|close|>call<|sep|>",),
        ),
        Text("<|close|>call<|sep|>"),
    ),
    again=('<|open|>call tool="',),
    closing=("<|close|>tools<|sep|>",),
)

# -- literals

LFM2 = ToolCalls(
    starts=("<|tool_call_start|>",),
    opening=(Text("["),),
    call=(Name(until=("(",)), Literals(open="(", equals="=", close=")")),
    between=(",",),
    closing=("]", "<|tool_call_end|>"),
)

GEMMA4 = ToolCalls(
    starts=("<|tool_call>",),
    call=(
        Text("call:"),
        Name(until=("{",)),
        Literals(open="{", equals=":", close="}", quotes=('<|"|>',), escapes=False),
    ),
    closing=("<tool_call|>",),
)

FUNCTION_GEMMA = ToolCalls(
    starts=("<start_function_call>",),
    call=(
        Text("call:"),
        Name(until=("{",)),
        Literals(open="{", equals=":", close="}", quotes=("<escape>",), escapes=False),
    ),
    closing=("<end_function_call>",),
)
