"""Requests that the tests of Ollama's routes send."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import ollama
import trio

from tests.support.http_server import serving_script
from tests.support.scripts import HI
from trioserve.testing import ScriptedBackend

ASK: dict[str, Any] = {"model": "scripted", "messages": HI}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def lines_in(text: str) -> list[dict[str, Any]]:
    """The objects in a body of lines."""
    *lines, rest = text.split("\n")
    assert rest == ""
    return [json.loads(line) for line in lines]


async def use_ollama(
    backend: ScriptedBackend, use: Callable[[ollama.Client], None], **config: Any
) -> None:
    """Let Ollama's client use a server, in a thread."""

    async with serving_script(backend, **config) as (url, _):
        await with_client(url, use)


async def with_client(url: str, use: Callable[[ollama.Client], None]) -> None:
    """Let Ollama's client use a server at this address, in a thread."""

    def run() -> None:
        with ollama.Client(host=url, timeout=30) as client:
            use(client)

    await trio.to_thread.run_sync(run)
