"""llama.cpp's own chat templates, in C++, chosen by what a Jinja template looks like."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from trioserve.llama import library
from trioserve.llama.library import lib


def apply(source: str, turns: Sequence[tuple[str, str]], add_generation_prompt: bool) -> str | None:
    """Render pairs of role and content; None if llama.cpp has no template for this source.

    Roles and contents are C strings: a null character would end them, so there must be none.
    """
    library.check_library()
    chat = (lib.llama_chat_message * len(turns))()
    for message, (role, content) in zip(chat, turns, strict=True):
        message.role, message.content = role.encode(), content.encode()
    size = sum(len(one.encode()) for turn in turns for one in turn) * 2 + 256
    while True:
        buffer = ctypes.create_string_buffer(size)
        length = lib.llama_chat_apply_template(
            source.encode(), chat, len(turns), add_generation_prompt, buffer, size
        )
        if length < 0:
            return None
        if length <= size:
            return bytes(buffer.raw[:length]).decode()
        size = length
