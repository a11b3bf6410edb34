"""Chat templates by name: they render as llama.cpp's own code does."""

from __future__ import annotations

import ctypes

import llama_cpp
import pytest

from trioserve.chat.template.builtin import NAMES, source_of, template_named
from trioserve.chat.template.render import ChatTemplate
from trioserve.config import Config
from trioserve.errors import ModelLoadError, TemplateError
from trioserve.server import Server
from trioserve.testing import ScriptedBackend, scripted

Chat = list[tuple[str, str]]

CHATS: list[Chat] = [
    [("user", " Hi ")],
    [("user", "Hi"), ("assistant", " Yo "), ("user", "What?"), ("assistant", "!"), ("user", "x")],
    [("system", " Be good. "), ("user", "Hi\n"), ("assistant", " Yo "), ("user", "?")],
]

#: These drop the system message, or end in "Assistant:" though no answer is asked for.
DIFFER = {"yandex": CHATS[:2], "rwkv-world": CHATS}


def theirs(name: str, chat: Chat, *, ask: bool) -> str:
    messages = [
        llama_cpp.llama_chat_message(role=role.encode(), content=text.encode())
        for role, text in chat
    ]
    array = (llama_cpp.llama_chat_message * len(chat))(*messages)
    buffer = ctypes.create_string_buffer(10_000)
    size = llama_cpp.llama_chat_apply_template(
        name.encode(), array, len(chat), ask, buffer, len(buffer)
    )
    return buffer.raw[:size].decode()


#: Names that llama.cpp has not.
OURS = {"plain"}


def test_all_names_are_known() -> None:
    names = (ctypes.c_char_p * 200)()
    count = llama_cpp.llama_chat_builtin_templates(names, 200)
    assert {(names[i] or b"").decode() for i in range(count)} == {*NAMES} - OURS


@pytest.mark.parametrize("name", sorted({*NAMES} - OURS))
def test_a_template_renders_as_theirs(name: str) -> None:
    template = ChatTemplate(template_named(name))
    for chat in DIFFER.get(name, CHATS):
        messages = [{"role": role, "content": text} for role, text in chat]
        for ask in (True, False) if name not in DIFFER else (True,):
            ours = template.render(messages, add_generation_prompt=ask)
            assert ours == theirs(name, chat, ask=ask)


def test_a_name_or_jinja() -> None:
    assert source_of(" phi4\n") == template_named("phi4")
    assert source_of("{{ messages }}") == "{{ messages }}"
    with pytest.raises(TemplateError, match=r"'phi5' is neither Jinja nor one of these: .*phi4"):
        source_of("phi5")


async def test_a_server_takes_a_name() -> None:
    config = Config(chat_template="zephyr")
    async with Server(config, load=scripted(ScriptedBackend())) as server:
        prompt = await server.render([{"role": "user", "content": "Hi"}])
    assert prompt == "<|user|>\nHi<|endoftext|>\n<|assistant|>\n"


async def test_an_unknown_name_is_an_error_of_loading() -> None:
    config = Config(chat_template="zephir")
    with pytest.raises(BaseException) as caught:  # noqa: PT011 (a group, or not)
        async with Server(config, load=scripted(ScriptedBackend())):
            pass
    found: BaseException = caught.value
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, ModelLoadError)
    assert "'zephir' is neither Jinja nor one of these: bailing" in found.message
