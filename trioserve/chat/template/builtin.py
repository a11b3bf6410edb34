"""Chat templates that can be chosen by name, for models that bring none. The names are llama.cpp's.

Most of them write one message after the other. For these there is a row of texts, from which the
Jinja is made: `{text}` stands for the content, `{trim}` for the content without blanks around it.
"""

# ruff: noqa: RUF001 - these models' markers have wide bars on purpose

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from trioserve.errors import TemplateError

_PLACE = re.compile(r"\{(role|text|trim)\}")
_VALUES = {"role": "message.role", "text": "message.content", "trim": "message.content | trim"}


def _say(text: str) -> str:
    """Write Jinja that writes a text."""
    parts = _PLACE.split(text)
    said = [
        f"({_VALUES[part]})" if i % 2 else json.dumps(part, ensure_ascii=False)
        for i, part in enumerate(parts)
        if part
    ]
    return "{{- " + " ~ ".join(said) + " -}}" if said else ""


def _rows(each: str = "", *, ask: str = "", begin: str = "", **roles: str) -> str:
    """Write a template.

    Args:
        each: what is written for a message of any role.
        ask: what the answer begins with.
        begin: what the prompt begins with.
        roles: what is written for the messages of a role.
    """
    body = "".join(
        f"{{%- elif message.role == '{role}' -%}}{_say(text)}" for role, text in roles.items()
    )
    if body:
        body = body.replace("{%- elif", "{%- if", 1) + "{%- else -%}"
    other = _say(each) or "{{- raise_exception('There is no place for a ' ~ message.role) -}}"
    body += other + ("{%- endif -%}" if roles else "")
    return (
        f"{_say(begin)}{{%- for message in messages -%}}{body}{{%- endfor -%}}"
        f"{{%- if add_generation_prompt -%}}{_say(ask)}{{%- endif -%}}"
    )


def _turns(start: str, system: str, user: str, assistant: str, *, again: str | None = None) -> str:
    """Write a template whose turns begin with `start`, which the system message is inside of.

    `again` is what later turns begin with, where that is something else.
    """
    return (
        "{%- set state = namespace(inside=false, first=true) -%}"
        "{%- for message in messages -%}"
        "{%- if not state.inside -%}"
        f"{{%- if state.first -%}}{_say(start)}"
        f"{{%- else -%}}{_say(start if again is None else again)}{{%- endif -%}}"
        "{%- set state.inside = true -%}{%- set state.first = false -%}{%- endif -%}"
        f"{{%- if message.role == 'system' -%}}{_say(system)}"
        f"{{%- elif message.role == 'user' -%}}{_say(user)}"
        f"{{%- else -%}}{_say(assistant)}{{%- set state.inside = false -%}}{{%- endif -%}}"
        "{%- endfor -%}"
    )


def _merged(user: str, assistant: str, *, ask: str = "", trim: bool = False) -> str:
    """Write a template that has the system message in that of the user."""
    content = "message.content | trim" if trim else "message.content"
    return (
        "{%- set state = namespace(system='') -%}"
        "{%- for message in messages -%}"
        f"{{%- if message.role == 'system' -%}}{{%- set state.system = ({content}) ~ '\\n\\n' -%}}"
        f"{{%- elif message.role == 'user' -%}}"
        + _say(user).replace("(message.content", "(state.system ~ message.content")
        + "{%- set state.system = '' -%}"
        f"{{%- else -%}}{_say(assistant)}{{%- endif -%}}"
        f"{{%- endfor -%}}{{%- if add_generation_prompt -%}}{_say(ask)}{{%- endif -%}}"
    )


_GRANITE = _rows(
    "<|start_of_role|>{role}<|end_of_role|>{text}<|end_of_text|>\n",
    ask="<|start_of_role|>assistant<|end_of_role|>",
)
_ROLE = "<role>{}</role>{{text}}"

#: Templates by name.
TEMPLATES: Mapping[str, str] = {
    "bailing": _rows(
        system=_ROLE.format("SYSTEM"),
        user=_ROLE.format("HUMAN"),
        assistant=_ROLE.format("ASSISTANT"),
        ask="<role>ASSISTANT</role>",
    ),
    "bailing-think": _rows(
        system=_ROLE.format("SYSTEM"),
        user=_ROLE.format("HUMAN"),
        assistant=_ROLE.format("ASSISTANT"),
        ask="<role>ASSISTANT</role><think>",
    ),
    "bailing2": "{%- if messages[0].role != 'system' -%}"
    + _say("<role>SYSTEM</role>detailed thinking off<|role_end|>")
    + "{%- endif -%}"
    + _rows(
        system=_ROLE.format("SYSTEM") + "<|role_end|>",
        user=_ROLE.format("HUMAN") + "<|role_end|>",
        assistant=_ROLE.format("ASSISTANT") + "<|role_end|>",
        ask="<role>ASSISTANT</role>",
    ),
    "chatglm3": _rows("<|{role}|>\n {text}", begin="[gMASK]sop", ask="<|assistant|>"),
    "chatglm4": _rows("<|{role}|>\n{text}", begin="[gMASK]<sop>", ask="<|assistant|>\n"),
    "chatml": _rows("<|im_start|>{role}\n{text}<|im_end|>\n", ask="<|im_start|>assistant\n"),
    "command-r": _rows(
        system="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{trim}<|END_OF_TURN_TOKEN|>",
        user="<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{trim}<|END_OF_TURN_TOKEN|>",
        assistant="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{trim}<|END_OF_TURN_TOKEN|>",
        ask="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    "deepseek": _rows(
        system="{text}",
        user="### Instruction:\n{text}\n",
        assistant="### Response:\n{text}\n<|EOT|>\n",
        ask="### Response:\n",
    ),
    "deepseek2": _rows(
        system="{text}\n\n",
        user="User: {text}\n\n",
        assistant="Assistant: {text}<｜end▁of▁sentence｜>",
        ask="Assistant:",
    ),
    "deepseek3": _rows(
        system="{text}\n\n",
        user="<｜User｜>{text}",
        assistant="<｜Assistant｜>{text}<｜end▁of▁sentence｜>",
        ask="<｜Assistant｜>",
    ),
    "deepseek-ocr": _rows("{text}"),
    "exaone3": _rows(
        system="[|system|]{trim}[|endofturn|]\n",
        user="[|user|]{trim}\n",
        assistant="[|assistant|]{trim}[|endofturn|]\n",
        ask="[|assistant|]",
    ),
    "exaone4": _rows(
        system="[|system|]{trim}[|endofturn|]\n",
        user="[|user|]{trim}\n",
        assistant="[|assistant|]{trim}[|endofturn|]\n",
        tool="[|tool|]{trim}[|endofturn|]\n",
        ask="[|assistant|]",
    ),
    "exaone-moe": _rows("<|{role}|>\n{trim}<|endofturn|>\n", ask="<|assistant|>\n"),
    "falcon3": _rows("<|{role}|>\n{text}\n", ask="<|assistant|>\n"),
    "gemma": _merged(
        "<start_of_turn>user\n{trim}<end_of_turn>\n",
        "<start_of_turn>model\n{trim}<end_of_turn>\n",
        ask="<start_of_turn>model\n",
        trim=True,
    ),
    "gigachat": _rows(
        system="{text}<|message_sep|>",
        user="user<|role_sep|>{text}<|message_sep|>"
        "available functions<|role_sep|>[]<|message_sep|>",
        assistant="assistant<|role_sep|>{text}<|message_sep|>",
        begin="<s>",
        ask="assistant<|role_sep|>",
    ),
    "glmedge": _rows("<|{role}|>\n{text}", ask="<|assistant|>"),
    "gpt-oss": _rows(
        "<|start|>{role}<|message|>{text}<|end|>",
        assistant="<|start|>{role}<|message|>{text}<|return|>",
        ask="<|start|>assistant",
    ),
    "granite": _GRANITE,
    "granite-4.0": _GRANITE,
    "granite-4.1": _GRANITE,
    "grok-2": _rows(
        system="System: {trim}<|separator|>\n\n",
        user="Human: {trim}<|separator|>\n\n",
        assistant="Assistant: {text}<|separator|>\n\n",
        ask="Assistant:",
    ),
    "hunyuan-dense": _rows(
        system="{text}<｜hy_place▁holder▁no▁3｜>",
        user="<｜hy_User｜>{text}<｜hy_Assistant｜>",
        assistant="<｜hy_Assistant｜>{text}<｜hy_place▁holder▁no▁2｜>",
    ),
    "hunyuan-moe": _rows(
        "<|startoftext|>{text}<|extra_0|>",
        system="<|startoftext|>{text}<|extra_4|>",
        assistant="{text}<|eos|>",
    ),
    "hunyuan-vl": _rows(
        system="{text}<｜hy_place▁holder▁no▁3｜>",
        user="{text}<｜hy_User｜>",
        assistant="{text}<｜hy_Assistant｜>",
        begin="<｜hy_begin▁of▁sentence｜>",
    ),
    "kimi-k2": _rows(
        system="<|im_system|>system<|im_middle|>{text}<|im_end|>",
        user="<|im_user|>user<|im_middle|>{text}<|im_end|>",
        assistant="<|im_assistant|>assistant<|im_middle|>{text}<|im_end|>",
        tool="<|im_system|>tool<|im_middle|>{text}<|im_end|>",
        ask="<|im_assistant|>assistant<|im_middle|>",
    ),
    "llama2": _turns("[INST] ", "{text}\n", "{text} [/INST]", "{text}</s>"),
    "llama2-sys": _turns(
        "[INST] ", "<<SYS>>\n{text}\n<</SYS>>\n\n", "{text} [/INST]", "{text}</s>"
    ),
    "llama2-sys-bos": _turns(
        "[INST] ",
        "<<SYS>>\n{text}\n<</SYS>>\n\n",
        "{text} [/INST]",
        "{text}</s>",
        again="<s>[INST] ",
    ),
    "llama2-sys-strip": _turns(
        "[INST] ", "<<SYS>>\n{trim}\n<</SYS>>\n\n", "{trim} [/INST]", "{trim}</s>"
    ),
    "llama3": _rows(
        "<|start_header_id|>{role}<|end_header_id|>\n\n{trim}<|eot_id|>",
        ask="<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "llama4": _rows(
        "<|header_start|>{role}<|header_end|>\n\n{trim}<|eot|>",
        ask="<|header_start|>assistant<|header_end|>\n\n",
    ),
    "megrez": _rows(
        "<|role_start|>{role}<|role_end|>{text}<|turn_end|>",
        ask="<|role_start|>assistant<|role_end|>",
    ),
    "minicpm": _rows("{trim}", user="<用户>{trim}<AI>"),
    "mistral-v1": _turns(" [INST] ", "{text}\n\n", "{text} [/INST]", " {text}</s>"),
    "mistral-v3": _turns("[INST] ", "{text}\n\n", "{text}[/INST]", " {trim}</s>"),
    "mistral-v3-tekken": _turns("[INST]", "{text}\n\n", "{text}[/INST]", "{text}</s>"),
    "mistral-v7": _rows(
        system="[SYSTEM_PROMPT] {text}[/SYSTEM_PROMPT]",
        user="[INST] {text}[/INST]",
        assistant=" {text}</s>",
    ),
    "mistral-v7-tekken": _rows(
        system="[SYSTEM_PROMPT]{text}[/SYSTEM_PROMPT]",
        user="[INST]{text}[/INST]",
        assistant="{text}</s>",
    ),
    "monarch": "{%- for message in messages -%}{%- if not loop.first -%}{{- '<s>' -}}{%- endif -%}"
    + _say("{role}\n{text}</s>\n")
    + "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<s>assistant\\n' -}}{%- endif -%}",
    "openchat": _rows(
        system="{text}<|end_of_turn|>",
        user="GPT4 Correct User: {text}<|end_of_turn|>",
        assistant="GPT4 Correct Assistant: {text}<|end_of_turn|>",
        ask="GPT4 Correct Assistant:",
    ),
    "orion": _merged("Human: {text}\n\nAssistant: </s>", "{text}</s>"),
    "pangu-embedded": "{%- if messages[0].role != 'system' -%}"
    + _say("[unused9]系统：[unused10]")
    + "{%- endif -%}"
    + _rows(
        system="[unused9]系统：{text}[unused10]",
        user="[unused9]用户：{text}[unused10]",
        assistant="[unused9]助手：{text}[unused10]",
        tool="[unused9]工具：{text}[unused10]",
        function="[unused9]方法：{text}[unused10]",
        ask="[unused9]助手：",
    ),
    "phi3": _rows("<|{role}|>\n{text}<|end|>\n", ask="<|assistant|>\n"),
    "phi4": _rows(
        "<|im_start|>{role}<|im_sep|>{text}<|im_end|>", ask="<|im_start|>assistant<|im_sep|>"
    ),
    "rwkv-world": _rows(
        system="System: {trim}\n\n",
        user="User: {trim}\n\n",
        assistant="Assistant: {trim}\n\n",
        ask="Assistant:",
    ),
    "seed_oss": _rows(
        "<seed:bos>{role}\n{text}<seed:eos>",
        assistant="<seed:bos>{role}\n{trim}<seed:eos>",
        ask="<seed:bos>assistant\n",
    ),
    "smolvlm": _rows(
        system="{text}\n\n",
        user="User: {text}<end_of_utterance>\n",
        assistant="Assistant: {text}<end_of_utterance>\n",
        begin="<|im_start|>",
        ask="Assistant:",
    ),
    "solar-open": _rows("<|begin|>{role}<|content|>{text}<|end|>", ask="<|begin|>assistant"),
    "vicuna": _rows(
        system="{text}\n\n",
        user="USER: {text}\n",
        assistant="ASSISTANT: {text}</s>\n",
        ask="ASSISTANT:",
    ),
    "vicuna-orca": _rows(
        system="SYSTEM: {text}\n",
        user="USER: {text}\n",
        assistant="ASSISTANT: {text}</s>\n",
        ask="ASSISTANT:",
    ),
    "yandex": _rows(
        user=" Пользователь: {text}\n\n", assistant=" Ассистент: {text}\n\n", ask=" Ассистент:[SEP]"
    ),
    "zephyr": _rows("<|{role}|>\n{text}<|endoftext|>\n", ask="<|assistant|>\n"),
}


def source_of(given: str) -> str:
    """Find the Jinja of a template that is given by its name, or by its Jinja.

    Several words are Jinja, too: a text without variables. A single one is a name.

    Raises:
        TemplateError: it is neither; the message lists the names.
    """
    if (known := TEMPLATES.get(given.strip())) is not None:
        return known
    if "{" in given or len(given.split()) > 1:
        return given
    names = ", ".join(TEMPLATES)
    raise TemplateError(f"{given[:40]!r} is neither Jinja nor one of these: {names}.")
