"""`function_name`: the name that a model calls a tool of an MCP server by."""

from __future__ import annotations

import re
from zlib import crc32

#: The longest name of a function that OpenAI's clients allow.
MAX_NAME = 64


def function_name(server: str, tool: str) -> str:
    """``SERVER_TOOL``, as llama-server names it, with ``_`` for what no function name may hold.

    A name that is too long is cut, and ends with a checksum of the whole, so that it stays the only
    one of its kind.
    """
    whole = f"{server}_{tool}"
    name = re.sub(r"[^a-zA-Z0-9_-]", "_", whole)
    if len(name) <= MAX_NAME:
        return name
    checksum = f"_{crc32(whole.encode('utf-8', 'surrogatepass')):08x}"
    return name[: MAX_NAME - len(checksum)] + checksum
