"""Formats of families, named or derived, as the server finds them."""

from __future__ import annotations

from tests.support.message_writers import WRITERS

FAMILIES = {name: writer.format for name, writer in WRITERS.items()}
APERTUS = FAMILIES["apertus"]
COMMAND_R7B = FAMILIES["command-r7b"]
DEEPSEEK_V3_2 = FAMILIES["deepseek-v3.2"]
FIREFUNCTION = FAMILIES["firefunction"]
FUNCTIONARY_3_2 = FAMILIES["functionary-3.2"]
GEMMA4 = FAMILIES["gemma-4"]
GLM = FAMILIES["glm-4"]
GRANITE_3 = FAMILIES["granite-3"]
HARMONY = FAMILIES["harmony"]
HERMES = FAMILIES["hermes"]
HERMES_THINK = FAMILIES["hermes-think"]
KIMI_K2 = FAMILIES["kimi-k2"]
LFM2 = FAMILIES["lfm2"]
LLAMA3 = FAMILIES["llama-3"]
LLAMA4 = FAMILIES["llama-4"]
MINIMAX_M3 = FAMILIES["minimax-m3"]
MISTRAL = FAMILIES["mistral"]
MISTRAL_OLD = FAMILIES["mistral-array"]
MISTRAL_THINK = FAMILIES["mistral-think"]
PHI4_MINI = FAMILIES["phi-4-mini"]
PHI4_MINI_GENERIC = FAMILIES["phi-4-mini-generic"]
PLAIN = FAMILIES["plain"]
PLAIN_THINK = FAMILIES["plain-think"]
QWEN3_CODER = FAMILIES["qwen3-coder"]
