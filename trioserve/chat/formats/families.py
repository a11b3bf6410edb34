"""How each family of models writes its messages, as data, and which family a template is of."""

# ruff: noqa: RUF001 - these models' markers have wide bars on purpose

from __future__ import annotations

from collections.abc import Mapping

import attrs

from trioserve.chat.formats.syntax import (
    Channels,
    ChatFormat,
    Choice,
    Elements,
    Ignore,
    JsonArguments,
    JsonCall,
    JsonContent,
    Literals,
    Marker,
    Maybe,
    Name,
    OneOf,
    Parameters,
    QuotedName,
    Reasoning,
    Step,
    ToolCalls,
)

THINK = Reasoning("<think>", "</think>")

#: Templates with these write calls in ``<tool_call>`` too, but not as JSON.
_OTHER_CALLS = ("<function=", "<arg_key>", "<parameter=", "<invoke")
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"


def _name_to(mark: str) -> tuple[Step, ...]:
    """The name of the function, and the marker behind it."""
    return Name(until=(mark,)), Marker(mark)


# -- one JSON object a call

_NAMED = JsonCall(ignored_keys=("type", "id"))
HERMES = ChatFormat(
    mentions=("<tool_call>",),
    lacks=_OTHER_CALLS,
    tool_calls=ToolCalls(starts=("<tool_call>",), call=(_NAMED,), closing=("</tool_call>",)),
)
HERMES_THINK = attrs.evolve(HERMES, mentions=("<tool_call>", "</think>"), reasoning=THINK)

#: For models whose template has no place for tools, as llama.cpp asks them to write calls.
GENERIC_CALLS = ToolCalls(
    bare="{",
    starts=(),
    opening=(
        Marker("{"),
        Choice(
            '"response"',
            (Marker('"response"'), Marker(":"), JsonContent()),
            (OneOf(('"tool_calls"', '"tool_call"')), Marker(":"), Maybe(("[",))),
        ),
    ),
    call=(_NAMED,),
    between=(",",),
    closing=("]", "}"),
)
PLAIN = ChatFormat(tool_calls=GENERIC_CALLS)
PLAIN_THINK = attrs.evolve(PLAIN, mentions=("</think>",), reasoning=THINK)
_LLAMA3_CALL = JsonCall(arguments_keys=("parameters", "arguments"), ignored_keys=("type", "id"))
LLAMA3 = ChatFormat(
    mentions=("<|start_header_id|>", '"parameters"'),
    tool_calls=ToolCalls(
        bare="{",
        starts=("<|python_tag|>",),
        call=(
            Choice(
                "{",
                (_LLAMA3_CALL,),
                (
                    Name(until=(".call(",)),
                    Marker(".call"),
                    Literals(open="(", equals="=", close=")"),
                ),
            ),
        ),
        between=(";",),
    ),
)
MINIMAX_M1 = ChatFormat(
    mentions=("<beginning_of_sentence>", "<tool_calls>"),
    reasoning=THINK,
    tool_calls=ToolCalls(
        starts=("<tool_calls>",), call=(_NAMED,), again=("{",), closing=("</tool_calls>",)
    ),
)
GIGACHAT = ChatFormat(
    mentions=("<|role_sep|>", "<|message_sep|>"),
    tool_calls=ToolCalls(
        starts=("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>"),
        call=(_NAMED,),
    ),
)

# -- an array of JSON objects


def _array(
    start: str, *closing: str, call: tuple[Step, ...] = (_NAMED,), short_ids: bool = False
) -> ToolCalls:
    return ToolCalls(
        starts=(start,),
        opening=(Marker("["),),
        call=call,
        between=(",",),
        closing=("]", *closing),
        short_ids=short_ids,
    )


MISTRAL_OLD = ChatFormat(
    mentions=("[TOOL_CALLS]",), tool_calls=_array("[TOOL_CALLS]", short_ids=True)
)
NEMOTRON_V2 = ChatFormat(
    mentions=("<TOOLCALL>",), reasoning=THINK, tool_calls=_array("<TOOLCALL>", "</TOOLCALL>")
)
APRIEL = ChatFormat(
    mentions=("<tool_calls>", "[BEGIN FINAL RESPONSE]"),
    reasoning=Reasoning("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    tool_calls=_array("<tool_calls>", "</tool_calls>"),
    dropped=("[END FINAL RESPONSE]",),
)
FIREFUNCTION = ChatFormat(mentions=("functools[",), tool_calls=_array("functools"))
GRANITE_3 = ChatFormat(
    mentions=("<|tool_call|>", "<|start_of_role|>"),
    reasoning=THINK,
    tool_calls=_array("<|tool_call|>"),
    dropped=("<response>", "</response>"),
)
_COHERE = JsonCall(
    name_keys=("tool_name",), arguments_keys=("parameters",), ignored_keys=("tool_call_id",)
)
COMMAND_R7B = ChatFormat(
    mentions=("<|START_ACTION|>",),
    reasoning=Reasoning("<|START_THINKING|>", "<|END_THINKING|>"),
    tool_calls=_array("<|START_ACTION|>", "<|END_ACTION|>", call=(_COHERE,)),
    dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
COMMAND_R = ChatFormat(
    mentions=("<|CHATBOT_TOKEN|>", "Action:"),
    tool_calls=ToolCalls(
        starts=("Action:",),
        opening=(Marker("```json"), Marker("[")),
        call=(_COHERE,),
        between=(",",),
        closing=("]", "```"),
    ),
)
APERTUS = ChatFormat(
    mentions=("<|tools_prefix|>",),
    reasoning=Reasoning("<|inner_prefix|>", "<|inner_suffix|>"),
    tool_calls=_array(
        "<|tools_prefix|>",
        "<|tools_suffix|>",
        call=(Marker("{"), QuotedName(), Marker(":"), JsonArguments(), Marker("}")),
    ),
)

# -- the name between markers, then the arguments as JSON

MISTRAL = ChatFormat(
    mentions=("[TOOL_CALLS]", "[ARGS]"),
    tool_calls=ToolCalls(
        starts=("[TOOL_CALLS]",),
        call=(
            Name(until=("[CALL_ID]", "[ARGS]", "{")),
            Ignore(until=("[ARGS]", "{")),
            Maybe(("[ARGS]",)),
            JsonArguments(),
        ),
        short_ids=True,
    ),
)
MISTRAL_THINK = attrs.evolve(
    MISTRAL,
    mentions=("[TOOL_CALLS]", "[ARGS]", "[THINK]"),
    reasoning=Reasoning("[THINK]", "[/THINK]"),
)


def _deepseek(*call: Step) -> ToolCalls:
    begin, end = _DEEPSEEK_CALL, "<｜tool▁call▁end｜>"
    return ToolCalls(
        starts=("<｜tool▁calls▁begin｜>", begin),
        call=(Marker(begin), *call, Marker(end)),
        again=(begin,),
        closing=("<｜tool▁calls▁end｜>",),
    )


DEEPSEEK_R1 = ChatFormat(
    mentions=(_DEEPSEEK_CALL, "```json", "</think>"),
    reasoning=THINK,
    tool_calls=_deepseek(
        Marker("function"),
        Marker("<｜tool▁sep｜>"),
        Name(until=("\n",)),
        Marker("```json"),
        JsonArguments(),
        Marker("```"),
    ),
)
DEEPSEEK_V3 = attrs.evolve(DEEPSEEK_R1, mentions=(_DEEPSEEK_CALL, "```json"), reasoning=None)
DEEPSEEK_V3_1 = ChatFormat(
    mentions=(_DEEPSEEK_CALL,),
    reasoning=THINK,
    tool_calls=_deepseek(*_name_to("<｜tool▁sep｜>"), JsonArguments()),
)
KIMI_K2 = ChatFormat(
    mentions=("<|tool_calls_section_begin|>",),
    tool_calls=ToolCalls(
        starts=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        call=(
            Marker("<|tool_call_begin|>"),
            Name(until=("<|tool_call_argument_begin|>",), prefix="functions.", counted=True),
            Marker("<|tool_call_argument_begin|>"),
            JsonArguments(),
            Marker("<|tool_call_end|>"),
        ),
        again=("<|tool_call_begin|>",),
        closing=("<|tool_calls_section_end|>",),
    ),
)
KIMI_K2_THINK = attrs.evolve(
    KIMI_K2, mentions=("<|tool_calls_section_begin|>", "</think>"), reasoning=THINK
)
SOLAR = ChatFormat(
    mentions=("<|tool_call:begin|>",),
    reasoning=Reasoning("<|think|>", "<|end|>"),
    tool_calls=ToolCalls(
        starts=("<|tool_calls|>", "<|tool_call:begin|>"),
        call=(
            Marker("<|tool_call:begin|>"),
            Ignore(until=("<|tool_call:name|>",)),
            Marker("<|tool_call:name|>"),
            *_name_to("<|tool_call:args|>"),
            JsonArguments(),
            Marker("<|tool_call:end|>"),
        ),
        again=("<|tool_call:begin|>",),
        closing=("<|calls|>",),
    ),
    dropped=("<|begin|>assistant", "<|content|>", "<|end|>"),
)
FUNCTIONARY_3_1 = ChatFormat(
    mentions=("<function=", "</function>", "<|eom_id|>"),
    tool_calls=ToolCalls(
        starts=("<function=",),
        call=(*_name_to(">"), JsonArguments(), Marker("</function>")),
    ),
)

# -- each argument between markers


def _coder(start: str, end: str, *, newlines: bool) -> ToolCalls:
    return ToolCalls(
        starts=(start, "<function="),
        call=(
            Marker("<function="),
            *_name_to(">"),
            Parameters(
                open="<parameter=",
                key_end=">",
                close="</parameter>",
                ends=("</function>", end),
                newlines=newlines,
            ),
            Maybe(("</function>",)),
        ),
        again=("<function=",),
        closing=(end,),
    )


QWEN3_CODER = ChatFormat(
    mentions=("<function=", "<parameter="),
    tool_calls=_coder("<tool_call>", "</tool_call>", newlines=True),
)
QWEN3_CODER_THINK = attrs.evolve(
    QWEN3_CODER, mentions=("<function=", "<parameter=", "</think>"), reasoning=THINK
)
SEED_OSS = ChatFormat(
    mentions=("<seed:tool_call>",),
    reasoning=Reasoning("<seed:think>", "</seed:think>"),
    tool_calls=_coder("<seed:tool_call>", "</seed:tool_call>", newlines=False),
)
MINIMAX_M2 = ChatFormat(
    mentions=("<minimax:tool_call>",),
    reasoning=THINK,
    tool_calls=ToolCalls(
        starts=("<minimax:tool_call>",),
        call=(
            Marker('<invoke name="'),
            *_name_to('">'),
            Parameters(
                open='<parameter name="',
                key_end='">',
                close="</parameter>",
                ends=("</invoke>",),
            ),
            Marker("</invoke>"),
        ),
        again=('<invoke name="',),
        closing=("</minimax:tool_call>",),
    ),
)
_M3 = "]<]minimax[>["
MINIMAX_M3 = ChatFormat(
    mentions=(_M3,),
    reasoning=Reasoning("<mm:think>", "</mm:think>"),
    tool_calls=ToolCalls(
        starts=(f"{_M3}<tool_call>",),
        call=(
            Marker(f'{_M3}<invoke name="'),
            *_name_to('">'),
            Elements(mark=_M3, parent="invoke", item="item"),
        ),
        again=(f'{_M3}<invoke name="',),
        closing=(f"{_M3}</tool_call>",),
    ),
)
DEEPSEEK_V3_2 = ChatFormat(
    mentions=("｜DSML｜", "</think>"),
    reasoning=THINK,
    tool_calls=ToolCalls(
        starts=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
        call=(
            Marker('<｜DSML｜invoke name="'),
            *_name_to('">'),
            Parameters(
                open='<｜DSML｜parameter name="',
                key_end='"',
                value_open=">",
                text_attribute='string="true"',
                close="</｜DSML｜parameter>",
                ends=("</｜DSML｜invoke>",),
            ),
            Marker("</｜DSML｜invoke>"),
        ),
        again=('<｜DSML｜invoke name="',),
        closing=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    ),
)
MINICPM5 = ChatFormat(
    mentions=('<function name="', '<param name="'),
    reasoning=THINK,
    tool_calls=ToolCalls(
        starts=('<function name="',),
        call=(
            *_name_to('">'),
            Parameters(
                open='<param name="',
                key_end='">',
                close="</param>",
                ends=("</function>",),
                cdata=True,
            ),
            Marker("</function>"),
        ),
    ),
)
GLM = ChatFormat(
    mentions=("<arg_key>", "<tool_call>"),
    reasoning=THINK,
    tool_calls=ToolCalls(
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
            Marker("</tool_call>"),
        ),
    ),
)
HUNYUAN = ChatFormat(
    mentions=(":opensource", "<tool_sep"),
    reasoning=Reasoning("<think:opensource>", "</think:opensource>"),
    tool_calls=ToolCalls(
        starts=("<tool_calls:opensource>",),
        call=(
            Marker("<tool_call:opensource>"),
            *_name_to("<tool_sep:opensource>"),
            Parameters(
                open="<arg_key:opensource>",
                key_end="</arg_key:opensource>",
                value_open="<arg_value:opensource>",
                close="</arg_value:opensource>",
                ends=("</tool_call:opensource>",),
            ),
            Marker("</tool_call:opensource>"),
        ),
        again=("<tool_call:opensource>",),
        closing=("</tool_calls:opensource>",),
    ),
)
KIMI_K3 = ChatFormat(
    mentions=("<|open|>", "<|close|>", "<|sep|>"),
    reasoning=Reasoning("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    tool_calls=ToolCalls(
        starts=("<|open|>tools<|sep|>",),
        call=(
            Marker('<|open|>call tool="'),
            Name(until=('"',)),
            Ignore(until=("<|sep|>",)),
            Marker("<|sep|>"),
            Parameters(
                open='<|open|>argument key="',
                key_end='"',
                value_open="<|sep|>",
                text_attribute='type="string"',
                close="<|close|>argument<|sep|>",
                ends=("<|close|>call<|sep|>",),
            ),
            Marker("<|close|>call<|sep|>"),
        ),
        again=('<|open|>call tool="',),
        closing=("<|close|>tools<|sep|>",),
    ),
    dropped=(
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|>",
        "<|close|>message<|sep|>",
    ),
)

# -- literals

LFM2 = ChatFormat(
    mentions=("List of tools: ",),
    tool_calls=_array(
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        call=(Name(until=("(",)), Literals(open="(", equals="=", close=")")),
    ),
)
LFM2_THINK = attrs.evolve(LFM2, mentions=("List of tools: ", "</think>"), reasoning=THINK)


def _gemma(start: str, end: str, *, quote: str) -> ToolCalls:
    arguments = Literals(open="{", equals=":", close="}", quotes=(quote,), escapes=False)
    call = (Marker("call:"), Name(until=("{",)), arguments)
    return ToolCalls(starts=(start,), call=call, closing=(end,))


GEMMA4 = ChatFormat(
    mentions=("<|tool_call>call:",),
    reasoning=Reasoning("<|channel>thought", "<channel|>"),
    tool_calls=_gemma("<|tool_call>", "<tool_call|>", quote='<|"|>'),
)
FUNCTION_GEMMA = ChatFormat(
    mentions=("<start_function_call>",),
    tool_calls=_gemma("<start_function_call>", "<end_function_call>", quote="<escape>"),
)

# -- rows of messages

HARMONY = ChatFormat(
    mentions=("<|start|>", "<|channel|>", "<|message|>"),
    channels=Channels(
        start="<|start|>",
        message="<|message|>",
        ends=("<|end|>", "<|return|>", "<|call|>"),
        call=r"\bto=functions\.([\w.-]+)",
        reasoning=r"<\|channel\|>\s*analysis\b",
        content=r"<\|channel\|>\s*(?:final|commentary)\b",
        call_header="<|channel|>commentary to=functions.{} <|constrain|>json",
        content_header="<|channel|>final",
        role="assistant",
        thinking=Reasoning("<|channel|>analysis<|message|>", "<|end|>"),
        answer=(("<|channel|>final",), ("<|message|>",)),
    ),
)
FUNCTIONARY_3_2 = ChatFormat(
    mentions=(">>>all",),
    channels=Channels(
        start=">>>",
        message="\n",
        call=r"^(?!all\s*$)([\w.-]+)\s*$",
        content=r"^all\s*$",
        call_header="{}",
        content_header="all",
        answer=(("all\n",),),
    ),
)

#: All formats by name. The first one that fits a template is its format.
FAMILIES: Mapping[str, ChatFormat] = {
    "harmony": HARMONY, "functionary-3.2": FUNCTIONARY_3_2, "mistral-think": MISTRAL_THINK,
    "mistral": MISTRAL, "mistral-array": MISTRAL_OLD, "deepseek-r1": DEEPSEEK_R1,
    "deepseek-v3": DEEPSEEK_V3, "deepseek-v3.1": DEEPSEEK_V3_1, "deepseek-v3.2": DEEPSEEK_V3_2,
    "kimi-k2-think": KIMI_K2_THINK, "kimi-k2": KIMI_K2, "kimi-k3": KIMI_K3,
    "minimax-m2": MINIMAX_M2, "minimax-m3": MINIMAX_M3, "minimax-m1": MINIMAX_M1,
    "command-r7b": COMMAND_R7B, "command-r": COMMAND_R, "granite-3": GRANITE_3,
    "nemotron-nano-v2": NEMOTRON_V2, "apriel": APRIEL, "firefunction": FIREFUNCTION,
    "functionary-3.1": FUNCTIONARY_3_1, "lfm2-think": LFM2_THINK, "lfm2": LFM2, "apertus": APERTUS,
    "gemma-4": GEMMA4, "function-gemma": FUNCTION_GEMMA, "gigachat-3": GIGACHAT,
    "solar-open": SOLAR, "seed-oss": SEED_OSS, "hunyuan-3": HUNYUAN, "minicpm-5": MINICPM5,
    "glm-4": GLM, "qwen3-coder-think": QWEN3_CODER_THINK, "qwen3-coder": QWEN3_CODER,
    "hermes-think": HERMES_THINK, "hermes": HERMES, "llama-3": LLAMA3, "plain-think": PLAIN_THINK,
    "plain": PLAIN,
}  # fmt: skip


def detect(source: str) -> ChatFormat:
    """Choose the format of a model by the source of its chat template."""
    return next(format for format in FAMILIES.values() if format.fits(source))
