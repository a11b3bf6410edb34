"""The chat templates of llama.cpp: what they write for calls is read back.

`LLAMA_CPP_SDIST` names llama.cpp's sources; ``make test-vocabularies`` gets them.
"""

from __future__ import annotations

import json

import pytest

from tests.support.histories import KEYS, TOOLS, differences
from tests.support.tool_grammars import REQUIRED, read, split, texts
from tests.support.vocabularies import chat_templates
from trioserve.chat.derive.probes import Answer
from trioserve.chat.grammar.answer import constrain
from trioserve.chat.template.render import ChatTemplate
from trioserve.llama.backend import LlamaBackend

pytestmark = pytest.mark.needs("LLAMA_CPP_SDIST")

#: Formats that are not derived. All others are.
NAMED = {
    "Apertus-8B-Instruct": "apertus",
    "Apriel-1.6-15b-Thinker-fixed": "apriel",
    "GigaChat3-10B-A1.8B": "gigachat-3",
    "GigaChat3.1-10B-A1.8B": "gigachat-3",
    "HuggingFaceTB-SmolLM3-3B": "plain",
    "Kimi-K3": "kimi-k3",
    "LFM2-8B-A1B": "lfm2",
    "LFM2.5-Instruct": "lfm2",
    "MiniMax-M1": "minimax-m1",
    "MiniMax-M3": "minimax-m3",
    "NVIDIA-Nemotron-Nano-v2": "nemotron-nano-v2",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "plain",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "plain",
    "deepseek-ai-DeepSeek-V3.1": "plain",
    "google-gemma-2-2b-it": "plain",
    "google-gemma-4-31B-it": "gemma-4",
    "google-gemma-4-31B-it-interleaved": "gemma-4",
    "ibm-granite-granite-3.3-2B-Instruct": "granite-3",
    "llama-cpp-rwkv-world": "plain",
    "meetkai-functionary-medium-v3.1": "functionary-3.1",
    "meetkai-functionary-medium-v3.2": "functionary-3.2",
    "meta-llama-Llama-3.1-8B-Instruct": "llama-3",
    "meta-llama-Llama-3.2-3B-Instruct": "llama-3",
    "meta-llama-Llama-3.3-70B-Instruct": "llama-3",
    "microsoft-Phi-3.5-mini-instruct": "plain",
    "muse-glimmer": "muse-glimmer",
    "openai-gpt-oss-120b": "harmony",
    "openbmb-MiniCPM5-1B": "minicpm-5",
    "unsloth-Apriel-1.5": "apriel",
    "upstage-Solar-Open-100B": "solar-open",
}


def has_quote(history: Answer) -> bool:
    return any("'" in str(one) for _, args in history.calls for one in args.values())


#: Histories that templates write in another way than their models.
ODD = {
    "LFM2.5-8B-A1B": has_quote,  # quotes in quotes as they are
    "NVIDIA-Nemotron-Nano-v2": lambda history: history.content,  # in another message
    "llama-cpp-deepseek-r1": lambda history: history.content,  # without the calls
    "openai-gpt-oss-120b": lambda history: history.content,  # as reasoning
}


@pytest.mark.parametrize("name", sorted(chat_templates()) or ["none"])
def test_what_a_template_writes_is_read_back(name: str) -> None:
    template = ChatTemplate(chat_templates()[name].read_text(encoding="utf-8"), eos_token="</s>")
    assert template.recognized.name == NAMED.get(name, "derived")
    odd = ODD.get(name, lambda _: False)
    assert [found for found in differences(template) if not odd(found[0])] == []


@pytest.mark.parametrize("name", sorted(chat_templates()) or ["none"])
def test_what_a_grammar_allows_is_read_back(backend: LlamaBackend, name: str) -> None:
    template = ChatTemplate(chat_templates()[name].read_text(encoding="utf-8"), eos_token="</s>")
    format = template.format
    tail = "" if format.reasoning is None else format.reasoning.end
    if format.channels is not None:
        tail = min(template.probes.begun, key=len)
    grammar = constrain(format, TOOLS, REQUIRED, parallel=True, prompt_tail=tail)
    for seed, text in enumerate(texts(backend, grammar, 2, format)):
        message = read(text, format, TOOLS, tail)
        assert message.tool_calls, text
        assert not message.content.strip(), text
        for call in message.tool_calls:
            assert json.loads(call.arguments).keys() <= {*KEYS}, text
        assert read(text, format, TOOLS, tail, split(text, seed)) == message
