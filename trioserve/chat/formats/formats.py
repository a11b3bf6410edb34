"""How models write reasoning and tool calls, as data.

A format says which markers surround what. `detect` chooses one by what the model's chat template
mentions. The order of `KNOWN` decides when several would fit, so special ones come first.
"""

# ruff: noqa: RUF001 - these models' markers have wide bars on purpose

from __future__ import annotations

import attrs

from trioserve.chat.formats import call_formats as calls
from trioserve.chat.formats.syntax import ToolCalls, texts_in


@attrs.frozen
class Reasoning:
    """Reasoning comes first, between two markers. The first may be part of the prompt."""

    start: str
    end: str


@attrs.frozen(kw_only=True)
class Channels:
    """Output that is a row of messages, each of a header and a body.

    A header stands between `start` and `message`. Regular expressions say where the body goes: a
    header with `call`, whose first group is the name of the function, has its arguments; one with
    `reasoning` has that. With `content` too the header is dropped, but stays with any other.

    `thinking` are the texts around reasoning. One of each of `answer` comes, in this order, before
    what is content.
    """

    start: str
    message: str
    call: str
    content: str
    reasoning: str = ""
    ends: tuple[str, ...] = ()
    #: What a model writes for each kind: headers, with a place for the name, and what comes first.
    call_header: str
    content_header: str
    role: str = ""
    thinking: Reasoning | None = None
    answer: tuple[tuple[str, ...], ...] = ()


@attrs.frozen(kw_only=True)
class ChatFormat:
    """How a family of models writes its messages.

    With `channels` there is nothing else. The texts in `dropped` are markers around content.
    """

    name: str
    reasoning: Reasoning | None = None
    tool_calls: ToolCalls | None = None
    dropped: tuple[str, ...] = ()
    channels: Channels | None = None

    @property
    def thinking(self) -> Reasoning | None:
        """The texts around reasoning."""
        return self.reasoning if self.channels is None else self.channels.thinking

    @property
    def texts(self) -> frozenset[str]:
        """All texts that the description mentions, of which most are markers.

        Many markers are control tokens, whose names the text of an output must then have.
        """
        parts = (self.reasoning, self.tool_calls, self.dropped, self.channels)
        return frozenset(filter(None, texts_in(parts)))


@attrs.frozen(kw_only=True)
class Signature:
    """What a template must mention, and must not, to be of a format."""

    format: ChatFormat
    mentions: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    def fits(self, source: str) -> bool:
        """Whether a template has this signature."""
        return all(text in source for text in self.mentions) and not any(
            text in source for text in self.lacks
        )


THINK = Reasoning("<think>", "</think>")
COHERE_THINK = Reasoning("<|START_THINKING|>", "<|END_THINKING|>")

# -- plain markers

HERMES_THINK = ChatFormat(name="hermes-think", reasoning=THINK, tool_calls=calls.HERMES)
HERMES = ChatFormat(name="hermes", tool_calls=calls.HERMES)
PLAIN_THINK = ChatFormat(name="plain-think", reasoning=THINK, tool_calls=calls.GENERIC)
PLAIN = ChatFormat(name="plain", tool_calls=calls.GENERIC)
QWEN3_CODER_THINK = ChatFormat(
    name="qwen3-coder-think", reasoning=THINK, tool_calls=calls.QWEN3_CODER
)
QWEN3_CODER = ChatFormat(name="qwen3-coder", tool_calls=calls.QWEN3_CODER)
GLM = ChatFormat(name="glm-4", reasoning=THINK, tool_calls=calls.GLM)
HUNYUAN = ChatFormat(
    name="hunyuan-3",
    reasoning=Reasoning("<think:opensource>", "</think:opensource>"),
    tool_calls=calls.HUNYUAN,
)
SEED_OSS = ChatFormat(
    name="seed-oss",
    reasoning=Reasoning("<seed:think>", "</seed:think>"),
    tool_calls=calls.SEED_OSS,
)
MINIMAX_M2 = ChatFormat(name="minimax-m2", reasoning=THINK, tool_calls=calls.MINIMAX_M2)
MINIMAX_M3 = ChatFormat(
    name="minimax-m3",
    reasoning=Reasoning("<mm:think>", "</mm:think>"),
    tool_calls=calls.MINIMAX_M3,
)
MINIMAX_M1 = ChatFormat(name="minimax-m1", reasoning=THINK, tool_calls=calls.MINIMAX_M1)
MINICPM5 = ChatFormat(name="minicpm-5", reasoning=THINK, tool_calls=calls.MINICPM5)
LLAMA3 = ChatFormat(name="llama-3", tool_calls=calls.LLAMA3)
MISTRAL_OLD = ChatFormat(name="mistral-array", tool_calls=calls.MISTRAL_OLD)
MISTRAL = ChatFormat(name="mistral", tool_calls=calls.MISTRAL)
MISTRAL_THINK = ChatFormat(
    name="mistral-think", reasoning=Reasoning("[THINK]", "[/THINK]"), tool_calls=calls.MISTRAL
)
DEEPSEEK_R1 = ChatFormat(name="deepseek-r1", reasoning=THINK, tool_calls=calls.DEEPSEEK_R1)
DEEPSEEK_V3 = ChatFormat(name="deepseek-v3", tool_calls=calls.DEEPSEEK_R1)
DEEPSEEK_V3_1 = ChatFormat(name="deepseek-v3.1", reasoning=THINK, tool_calls=calls.DEEPSEEK_V3_1)
DEEPSEEK_V3_2 = ChatFormat(name="deepseek-v3.2", reasoning=THINK, tool_calls=calls.DEEPSEEK_V3_2)
KIMI_K2_THINK = ChatFormat(name="kimi-k2-think", reasoning=THINK, tool_calls=calls.KIMI_K2)
KIMI_K2 = ChatFormat(name="kimi-k2", tool_calls=calls.KIMI_K2)
KIMI_K3 = ChatFormat(
    name="kimi-k3",
    reasoning=Reasoning("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    tool_calls=calls.KIMI_K3,
    dropped=(
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|>",
        "<|close|>message<|sep|>",
    ),
)
COMMAND_R7B = ChatFormat(
    name="command-r7b",
    reasoning=COHERE_THINK,
    tool_calls=calls.COMMAND_R7B,
    dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
COMMAND_R = ChatFormat(name="command-r", tool_calls=calls.COMMAND_R)
GRANITE_3 = ChatFormat(
    name="granite-3",
    reasoning=THINK,
    tool_calls=calls.GRANITE_3,
    dropped=("<response>", "</response>"),
)
NEMOTRON_V2 = ChatFormat(name="nemotron-nano-v2", reasoning=THINK, tool_calls=calls.NEMOTRON_V2)
APRIEL = ChatFormat(
    name="apriel",
    reasoning=Reasoning("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    tool_calls=calls.APRIEL,
    dropped=("[END FINAL RESPONSE]",),
)
FIREFUNCTION = ChatFormat(name="firefunction", tool_calls=calls.FIREFUNCTION)
FUNCTIONARY_3_1 = ChatFormat(name="functionary-3.1", tool_calls=calls.FUNCTIONARY_3_1)
LFM2_THINK = ChatFormat(name="lfm2-think", reasoning=THINK, tool_calls=calls.LFM2)
LFM2 = ChatFormat(name="lfm2", tool_calls=calls.LFM2)
APERTUS = ChatFormat(
    name="apertus",
    reasoning=Reasoning("<|inner_prefix|>", "<|inner_suffix|>"),
    tool_calls=calls.APERTUS,
)
GEMMA4 = ChatFormat(
    name="gemma-4",
    reasoning=Reasoning("<|channel>thought", "<channel|>"),
    tool_calls=calls.GEMMA4,
)
FUNCTION_GEMMA = ChatFormat(name="function-gemma", tool_calls=calls.FUNCTION_GEMMA)
GIGACHAT = ChatFormat(name="gigachat-3", tool_calls=calls.GIGACHAT)
SOLAR = ChatFormat(
    name="solar-open",
    reasoning=Reasoning("<|think|>", "<|end|>"),
    tool_calls=calls.SOLAR,
    dropped=("<|begin|>assistant", "<|content|>", "<|end|>"),
)

# -- rows of messages

HARMONY = ChatFormat(
    name="harmony",
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
    name="functionary-3.2",
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

#: Templates with these write calls in ``<tool_call>`` too, but not as JSON.
_OTHER_CALLS = ("<function=", "<arg_key>", "<parameter=", "<invoke")
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"

# fmt: off
KNOWN: tuple[Signature, ...] = (
    Signature(format=HARMONY, mentions=("<|start|>", "<|channel|>", "<|message|>")),
    Signature(format=FUNCTIONARY_3_2, mentions=(">>>all",)),
    Signature(format=MISTRAL_THINK, mentions=("[TOOL_CALLS]", "[ARGS]", "[THINK]")),
    Signature(format=MISTRAL, mentions=("[TOOL_CALLS]", "[ARGS]")),
    Signature(format=MISTRAL_OLD, mentions=("[TOOL_CALLS]",)),
    Signature(format=DEEPSEEK_R1, mentions=(_DEEPSEEK_CALL, "```json", "</think>")),
    Signature(format=DEEPSEEK_V3, mentions=(_DEEPSEEK_CALL, "```json")),
    Signature(format=DEEPSEEK_V3_1, mentions=(_DEEPSEEK_CALL,)),
    Signature(format=DEEPSEEK_V3_2, mentions=("｜DSML｜", "</think>")),
    Signature(format=KIMI_K2_THINK, mentions=("<|tool_calls_section_begin|>", "</think>")),
    Signature(format=KIMI_K2, mentions=("<|tool_calls_section_begin|>",)),
    Signature(format=KIMI_K3, mentions=("<|open|>", "<|close|>", "<|sep|>")),
    Signature(format=MINIMAX_M2, mentions=("<minimax:tool_call>",)),
    Signature(format=MINIMAX_M3, mentions=("]<]minimax[>[",)),
    Signature(format=MINIMAX_M1, mentions=("<beginning_of_sentence>", "<tool_calls>")),
    Signature(format=COMMAND_R7B, mentions=("<|START_ACTION|>",)),
    Signature(format=COMMAND_R, mentions=("<|CHATBOT_TOKEN|>", "Action:")),
    Signature(format=GRANITE_3, mentions=("<|tool_call|>", "<|start_of_role|>")),
    Signature(format=NEMOTRON_V2, mentions=("<TOOLCALL>",)),
    Signature(format=APRIEL, mentions=("<tool_calls>", "[BEGIN FINAL RESPONSE]")),
    Signature(format=FIREFUNCTION, mentions=("functools[",)),
    Signature(format=FUNCTIONARY_3_1, mentions=("<function=", "</function>", "<|eom_id|>")),
    Signature(format=LFM2_THINK, mentions=("List of tools: ", "</think>")),
    Signature(format=LFM2, mentions=("List of tools: ",)),
    Signature(format=APERTUS, mentions=("<|tools_prefix|>",)),
    Signature(format=GEMMA4, mentions=("<|tool_call>call:",)),
    Signature(format=FUNCTION_GEMMA, mentions=("<start_function_call>",)),
    Signature(format=GIGACHAT, mentions=("<|role_sep|>", "<|message_sep|>")),
    Signature(format=SOLAR, mentions=("<|tool_call:begin|>",)),
    Signature(format=SEED_OSS, mentions=("<seed:tool_call>",)),
    Signature(format=HUNYUAN, mentions=(":opensource", "<tool_sep")),
    Signature(format=MINICPM5, mentions=('<function name="', '<param name="')),
    Signature(format=GLM, mentions=("<arg_key>", "<tool_call>")),
    Signature(format=QWEN3_CODER_THINK, mentions=("<function=", "<parameter=", "</think>")),
    Signature(format=QWEN3_CODER, mentions=("<function=", "<parameter=")),
    Signature(format=HERMES_THINK, mentions=("<tool_call>", "</think>"), lacks=_OTHER_CALLS),
    Signature(format=HERMES, mentions=("<tool_call>",), lacks=_OTHER_CALLS),
    Signature(format=LLAMA3, mentions=("<|start_header_id|>", '"parameters"')),
    Signature(format=PLAIN_THINK, mentions=("</think>",)),
    Signature(format=PLAIN),
)
# fmt: on


def detect(source: str) -> ChatFormat:
    """Choose the format of a model by the source of its chat template."""
    return next(signature.format for signature in KNOWN if signature.fits(source))
