"""The families of models whose format is not derived from their templates, as data.

Each says why: its template writes no calls, or not as the model does, or nothing can be compared.
"""

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

_NAMED = JsonCall(ignored_keys=("type", "id"))
_PARAMETERS = attrs.evolve(_NAMED, arguments_keys=("parameters", "arguments"))


def _name_to(mark: str) -> tuple[Step, ...]:
    """The name of the function, and the marker behind it."""
    return Name(until=(mark,)), Marker(mark)


def _array(
    start: str, *closing: str, call: tuple[Step, ...] = (_NAMED,), bare: str = ""
) -> ToolCalls:
    return ToolCalls(
        bare=bare,
        starts=(start,),
        opening=(Marker("["),),
        call=call,
        between=(",",),
        closing=("]", *closing),
    )


# -- templates that ask for calls, and write none of earlier answers

# Many fine-tuned models have a template that only describes calls.
HERMES = ChatFormat(
    mentions=("<tool_call>",),
    lacks=("<function=", "<arg_key>", "<parameter=", "<invoke"),
    tool_calls=ToolCalls(starts=("<tool_call>",), call=(_NAMED,), closing=("</tool_call>",)),
)
# Its template says in words how to call.
GRANITE_3 = ChatFormat(
    mentions=("<|tool_call|>", "<|start_of_role|>"),
    tool_calls=_array("<|tool_call|>"),
    dropped=("<response>", "</response>"),
)
# Its templates have a place for calls only since LFM2.5, and not all of these. Some models leave
# the markers out.
LFM2 = ChatFormat(
    mentions=("List of tools: ",),
    tool_calls=_array(
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        call=(Name(until=("(",)), Literals(open="(", equals="=", close=")")),
        bare="[",
    ),
)

# -- families that differ from what their templates write

# Built-in tools are called as ``<|python_tag|>brave_search.call(query="…")``, which templates show
# in no history; after that marker several calls have a semicolon between them.
LLAMA3 = ChatFormat(
    mentions=("<|start_header_id|>", '"parameters"'),
    tool_calls=ToolCalls(
        bare="{",
        starts=("<|python_tag|>",),
        call=(
            Choice(
                "{",
                (_PARAMETERS,),
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
# It reasons, which its template mentions nowhere.
MINIMAX_M1 = ChatFormat(
    mentions=("<beginning_of_sentence>", "<tool_calls>"),
    reasoning=THINK,
    tool_calls=ToolCalls(
        starts=("<tool_calls>",), call=(_NAMED,), again=("{",), closing=("</tool_calls>",)
    ),
)
# In version 3 a call begins with the marker that ends any message.
GIGACHAT = ChatFormat(
    mentions=("<|role_sep|>", "<|message_sep|>"),
    tool_calls=ToolCalls(
        starts=("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>"),
        call=(_NAMED,),
    ),
)
# Its template writes text before a call as a message by itself.
NEMOTRON_V2 = ChatFormat(
    mentions=("<TOOLCALL>",), reasoning=THINK, tool_calls=_array("<TOOLCALL>", "</TOOLCALL>")
)
# Its reasoning begins with a sentence, which the prompt has.
APRIEL = ChatFormat(
    mentions=("<tool_calls>", "[BEGIN FINAL RESPONSE]"),
    reasoning=Reasoning("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    tool_calls=_array("<tool_calls>", "</tool_calls>"),
    dropped=("[END FINAL RESPONSE]",),
)
# Its template writes reasoning only in a form of content that no client sends.
APERTUS = ChatFormat(
    mentions=("<|tools_prefix|>",),
    reasoning=Reasoning("<|inner_prefix|>", "<|inner_suffix|>"),
    tool_calls=_array(
        "<|tools_prefix|>",
        "<|tools_suffix|>",
        call=(Marker("{"), QuotedName(), Marker(":"), JsonArguments(), Marker("}")),
    ),
)
# Reasoning and answer are messages, which begin with the role again.
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
# A turn with calls ends with another token than one of text, which closes no call.
FUNCTIONARY_3_1 = ChatFormat(
    mentions=("<function=", "</function>", "<|eom_id|>"),
    tool_calls=ToolCalls(
        starts=("<function=",),
        call=(*_name_to(">"), JsonArguments(), Marker("</function>")),
    ),
)
# Arguments are elements within elements, with a marker that looks like parts of tags.
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
# Text with special characters is CDATA.
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
# Names of tags stand behind the tags, so that markers are texts and tags.
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
# Reasoning begins with a tag and a word, and text comes behind calls.
GEMMA4 = ChatFormat(
    mentions=("<|tool_call>call:",),
    reasoning=Reasoning("<|channel>thought", "<channel|>"),
    tool_calls=ToolCalls(
        starts=("<|tool_call>",),
        call=(
            Marker("call:"),
            Name(until=("{",)),
            Literals(open="{", equals=":", close="}", quotes=('<|"|>',), escapes=False),
        ),
        closing=("<tool_call|>",),
    ),
)

# Calls are objects or in Python, between markers or not, whatever the template writes.
LLAMA4 = ChatFormat(
    mentions=("<|header_start|>",),
    tool_calls=ToolCalls(
        bare="[{",
        starts=("<|python_start|>",),
        opening=(Maybe(("[",)),),
        call=(
            Choice(
                "{",
                (_PARAMETERS,),
                (Name(until=("(",)), Literals(open="(", equals="=", close=")")),
                writes_others=True,
            ),
        ),
        between=(",", ";"),
        closing=("]", "<|python_end|>"),
    ),
)

# Its template asks for these calls, and writes those of earlier answers as objects.
PHI4_MINI = ChatFormat(mentions=("functools", "<|end|>"), tool_calls=_array("functools"))
# It marks its answers as such, which templates take out of earlier ones.
HUNYUAN_A13B = ChatFormat(
    mentions=("<|extra_0|>", "<|startoftext|>"),
    reasoning=THINK,
    tool_calls=_array("<tool_calls>", "</tool_calls>"),
    dropped=("<answer>", "</answer>", "助手："),  # noqa: RUF001 - a wide colon
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
MUSE_GLIMMER = ChatFormat(
    mentions=("<atem:function_calls>", "<|start|>", "<|message|>"),
    channels=Channels(
        start="<|start|>",
        message="<|message|>",
        ends=("<|eom|>", "<|eot|>"),
        call=r"\bto=(?!(?:self|user)\b)([\w.-]+)",
        reasoning=r"\bto=self\b",
        content=r"\bto=user\b",
        call_header=" to={}",
        content_header=" to=user",
        role="assistant",
        thinking=Reasoning(" to=self<|message|>", "<|eom|>"),
        answer=((" to=user",), ("<|message|>",)),
        body=(
            Marker("<atem:function_calls>"),
            Marker('<atem:invoke name="'),
            *_name_to('">'),
            Parameters(
                open='<atem:parameter name="',
                key_end='">',
                close="</atem:parameter>",
                ends=("</atem:invoke>",),
            ),
            Maybe(("</atem:invoke>",)),
            Maybe(("</atem:function_calls>",)),
        ),
        between="<|eom|>",
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

# -- any other model

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
            writes_others=True,
        ),
    ),
    call=(_NAMED,),
    between=(",",),
    closing=("]", "}"),
)
PLAIN = ChatFormat(tool_calls=GENERIC_CALLS)
# Phi-4-mini's own template has tools in a field of system messages, which no API has, and no calls.
PHI4_MINI_GENERIC = ChatFormat(
    mentions=("<|tool|>", "<|/tool|>"),
    tool_calls=ToolCalls(
        bare="{[",
        starts=("functools", "<|tool_call|>"),
        opening=(Choice("[", (Marker("["),), GENERIC_CALLS.opening, writes_others=True),),
        call=(_PARAMETERS,),
        between=(",",),
        closing=("]", "}", "<|/tool_call|>"),
    ),
)

#: Formats that are not derived. The first one that fits a template is its format.
SPECIAL: Mapping[str, ChatFormat] = {
    "harmony": HARMONY, "muse-glimmer": MUSE_GLIMMER, "functionary-3.2": FUNCTIONARY_3_2,
    "kimi-k3": KIMI_K3,
    "minimax-m3": MINIMAX_M3, "minimax-m1": MINIMAX_M1, "nemotron-nano-v2": NEMOTRON_V2,
    "apriel": APRIEL, "functionary-3.1": FUNCTIONARY_3_1, "apertus": APERTUS, "gemma-4": GEMMA4,
    "gigachat-3": GIGACHAT, "solar-open": SOLAR, "minicpm-5": MINICPM5, "llama-3": LLAMA3,
    "llama-4": LLAMA4, "phi-4-mini": PHI4_MINI, "hunyuan-a13b": HUNYUAN_A13B,
}  # fmt: skip

#: Formats of templates that no format can be derived from, because they write no calls.
ASKED_FOR: Mapping[str, ChatFormat] = {
    "granite-3": GRANITE_3, "lfm2": LFM2, "hermes": HERMES,
}  # fmt: skip

#: Formats of templates that have no place for tools.
WITHOUT_TOOLS: Mapping[str, ChatFormat] = {"phi-4-mini-generic": PHI4_MINI_GENERIC}

#: All formats that are not derived, by name.
FAMILIES: Mapping[str, ChatFormat] = {**SPECIAL, **ASKED_FOR, **WITHOUT_TOOLS, "plain": PLAIN}
