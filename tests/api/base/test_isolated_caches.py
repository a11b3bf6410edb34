"""Caches are separate by API key and cache salt."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.support.clients import client_of
from tests.support.media_files import image_file
from trioserve.testing import ScriptedBackend, ScriptedProjector

PNG = "data:image/png;base64," + base64.b64encode(image_file()).decode()
CHAT: dict[str, Any] = {
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is it, in one word, please, if you can see it?"},
                {"type": "image_url", "image_url": {"url": PNG}},
            ],
        }
    ],
    "max_tokens": 1,
}


@pytest.mark.system
async def test_the_kv_cache_and_the_embeddings_of_media() -> None:
    projector = ScriptedProjector()
    backend = ScriptedBackend(str.upper, projector=projector, n_ctx=4000)

    async with client_of(backend, api_keys=("a", "b")) as client:

        async def ask(key: str, **fields: object) -> tuple[bool, int]:
            """Ask, and get if part of the prompt was cached, and the number of images encoded."""
            before = len(projector.encoded)
            headers = {"Authorization": f"Bearer {key}"}
            answer = await client.post(
                "/v1/chat/completions", json={**CHAT, **fields}, headers=headers
            )
            assert answer.status_code == 200, answer.text
            details = answer.json()["usage"]["prompt_tokens_details"]
            return details["cached_tokens"] > 20, len(projector.encoded) - before

        assert await ask("a") == (False, 1)
        assert await ask("a") == (True, 0)
        assert await ask("b") == (False, 1)
        assert await ask("b", cache_salt="x") == (False, 1)
        assert await ask("b", cache_salt="x") == (True, 0)
        assert await ask("a", cache_salt="x") == (False, 1)

    projector.encoded.clear()
    backend = ScriptedBackend(str.upper, projector=projector, n_ctx=4000)
    async with client_of(backend, api_keys=("a", "b"), cache_sharing="all") as client:
        for key in ("a", "b"):
            headers = {"Authorization": f"Bearer {key}"}
            await client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert len(projector.encoded) == 1
