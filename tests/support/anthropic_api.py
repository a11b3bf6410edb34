"""Requests that the tests of Anthropic's routes send."""

from __future__ import annotations

from typing import Any

from tests.support.clients import client_of
from tests.support.scripts import HI
from trioserve.testing import ScriptedBackend

ASK = {"model": "m", "max_tokens": 200, "messages": HI}
WEATHER = {
    "name": "weather",
    "description": "Tells the weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


async def post(backend: ScriptedBackend, **fields: Any) -> dict[str, Any]:
    """Ask for a message, and take it from an answer that must be well."""
    async with client_of(backend) as client:
        answer = await client.post("/v1/messages", json=ASK | fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())
