"""Recognises the family of a model by its chat template.

The order of `KNOWN` decides when several formats would fit, so special ones come first.
"""

# ruff: noqa: RUF001 - these models' markers have wide bars on purpose

from __future__ import annotations

import attrs

from trioserve.chat.formats import families
from trioserve.chat.formats.syntax import ChatFormat


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
    Signature(families.HARMONY, ("<|start|>", "<|channel|>", "<|message|>")),
    Signature(families.FUNCTIONARY_3_2, (">>>all",)),
    Signature(families.MISTRAL_THINK, ("[TOOL_CALLS]", "[ARGS]", "[THINK]")),
    Signature(families.MISTRAL, ("[TOOL_CALLS]", "[ARGS]")),
    Signature(families.MISTRAL_OLD, ("[TOOL_CALLS]",)),
    Signature(families.DEEPSEEK_R1, (_DEEPSEEK_CALL, "```json", "</think>")),
    Signature(families.DEEPSEEK_V3, (_DEEPSEEK_CALL, "```json")),
    Signature(families.DEEPSEEK_V3_1, (_DEEPSEEK_CALL,)),
    Signature(families.DEEPSEEK_V3_2, ("｜DSML｜", "</think>")),
    Signature(families.KIMI_K2_THINK, ("<|tool_calls_section_begin|>", "</think>")),
    Signature(families.KIMI_K2, ("<|tool_calls_section_begin|>",)),
    Signature(families.KIMI_K3, ("<|open|>", "<|close|>", "<|sep|>")),
    Signature(families.MINIMAX_M2, ("<minimax:tool_call>",)),
    Signature(families.MINIMAX_M3, ("]<]minimax[>[",)),
    Signature(families.MINIMAX_M1, ("<beginning_of_sentence>", "<tool_calls>")),
    Signature(families.COMMAND_R7B, ("<|START_ACTION|>",)),
    Signature(families.COMMAND_R, ("<|CHATBOT_TOKEN|>", "Action:")),
    Signature(families.GRANITE_3, ("<|tool_call|>", "<|start_of_role|>")),
    Signature(families.NEMOTRON_V2, ("<TOOLCALL>",)),
    Signature(families.APRIEL, ("<tool_calls>", "[BEGIN FINAL RESPONSE]")),
    Signature(families.FIREFUNCTION, ("functools[",)),
    Signature(families.FUNCTIONARY_3_1, ("<function=", "</function>", "<|eom_id|>")),
    Signature(families.LFM2_THINK, ("List of tools: ", "</think>")),
    Signature(families.LFM2, ("List of tools: ",)),
    Signature(families.APERTUS, ("<|tools_prefix|>",)),
    Signature(families.GEMMA4, ("<|tool_call>call:",)),
    Signature(families.FUNCTION_GEMMA, ("<start_function_call>",)),
    Signature(families.GIGACHAT, ("<|role_sep|>", "<|message_sep|>")),
    Signature(families.SOLAR, ("<|tool_call:begin|>",)),
    Signature(families.SEED_OSS, ("<seed:tool_call>",)),
    Signature(families.HUNYUAN, (":opensource", "<tool_sep")),
    Signature(families.MINICPM5, ('<function name="', '<param name="')),
    Signature(families.GLM, ("<arg_key>", "<tool_call>")),
    Signature(families.QWEN3_CODER_THINK, ("<function=", "<parameter=", "</think>")),
    Signature(families.QWEN3_CODER, ("<function=", "<parameter=")),
    Signature(families.HERMES_THINK, ("<tool_call>", "</think>"), lacks=_OTHER_CALLS),
    Signature(families.HERMES, ("<tool_call>",), lacks=_OTHER_CALLS),
    Signature(families.LLAMA3, ("<|start_header_id|>", '"parameters"')),
    Signature(families.PLAIN_THINK, ("</think>",)),
    Signature(families.PLAIN),
)


def detect(source: str) -> ChatFormat:
    """Choose the format of a model by the source of its chat template."""
    return next(signature.format for signature in KNOWN if signature.fits(source))
