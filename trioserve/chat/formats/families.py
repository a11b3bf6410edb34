"""How each family of models writes its messages, and which family a template belongs to."""

# ruff: noqa: RUF001 - these models' markers have wide bars on purpose

from __future__ import annotations

import attrs

from trioserve.chat.formats import calls
from trioserve.chat.formats.syntax import Channels, ChatFormat, Reasoning

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


@attrs.frozen
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


#: Templates with these write calls in ``<tool_call>`` too, but not as JSON.
_OTHER_CALLS = ("<function=", "<arg_key>", "<parameter=", "<invoke")
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"

KNOWN: tuple[Signature, ...] = (
    Signature(HARMONY, ("<|start|>", "<|channel|>", "<|message|>")),
    Signature(FUNCTIONARY_3_2, (">>>all",)),
    Signature(MISTRAL_THINK, ("[TOOL_CALLS]", "[ARGS]", "[THINK]")),
    Signature(MISTRAL, ("[TOOL_CALLS]", "[ARGS]")),
    Signature(MISTRAL_OLD, ("[TOOL_CALLS]",)),
    Signature(DEEPSEEK_R1, (_DEEPSEEK_CALL, "```json", "</think>")),
    Signature(DEEPSEEK_V3, (_DEEPSEEK_CALL, "```json")),
    Signature(DEEPSEEK_V3_1, (_DEEPSEEK_CALL,)),
    Signature(DEEPSEEK_V3_2, ("｜DSML｜", "</think>")),
    Signature(KIMI_K2_THINK, ("<|tool_calls_section_begin|>", "</think>")),
    Signature(KIMI_K2, ("<|tool_calls_section_begin|>",)),
    Signature(KIMI_K3, ("<|open|>", "<|close|>", "<|sep|>")),
    Signature(MINIMAX_M2, ("<minimax:tool_call>",)),
    Signature(MINIMAX_M3, ("]<]minimax[>[",)),
    Signature(MINIMAX_M1, ("<beginning_of_sentence>", "<tool_calls>")),
    Signature(COMMAND_R7B, ("<|START_ACTION|>",)),
    Signature(COMMAND_R, ("<|CHATBOT_TOKEN|>", "Action:")),
    Signature(GRANITE_3, ("<|tool_call|>", "<|start_of_role|>")),
    Signature(NEMOTRON_V2, ("<TOOLCALL>",)),
    Signature(APRIEL, ("<tool_calls>", "[BEGIN FINAL RESPONSE]")),
    Signature(FIREFUNCTION, ("functools[",)),
    Signature(FUNCTIONARY_3_1, ("<function=", "</function>", "<|eom_id|>")),
    Signature(LFM2_THINK, ("List of tools: ", "</think>")),
    Signature(LFM2, ("List of tools: ",)),
    Signature(APERTUS, ("<|tools_prefix|>",)),
    Signature(GEMMA4, ("<|tool_call>call:",)),
    Signature(FUNCTION_GEMMA, ("<start_function_call>",)),
    Signature(GIGACHAT, ("<|role_sep|>", "<|message_sep|>")),
    Signature(SOLAR, ("<|tool_call:begin|>",)),
    Signature(SEED_OSS, ("<seed:tool_call>",)),
    Signature(HUNYUAN, (":opensource", "<tool_sep")),
    Signature(MINICPM5, ('<function name="', '<param name="')),
    Signature(GLM, ("<arg_key>", "<tool_call>")),
    Signature(QWEN3_CODER_THINK, ("<function=", "<parameter=", "</think>")),
    Signature(QWEN3_CODER, ("<function=", "<parameter=")),
    Signature(HERMES_THINK, ("<tool_call>", "</think>"), lacks=_OTHER_CALLS),
    Signature(HERMES, ("<tool_call>",), lacks=_OTHER_CALLS),
    Signature(LLAMA3, ("<|start_header_id|>", '"parameters"')),
    Signature(PLAIN_THINK, ("</think>",)),
    Signature(PLAIN),
)


def detect(source: str) -> ChatFormat:
    """Choose the format of a model by the source of its chat template."""
    return next(signature.format for signature in KNOWN if signature.fits(source))
