"""The families of models, as data: how each writes reasoning and tool calls."""

from __future__ import annotations

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
