"""`cache_salt`, in the bodies of routes that continue text."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.clients import client_of
from tests.support.scripts import answering
from trioserve.types import MAX_SALT

TEXT = "a text that is long enough to be found again"
CHAT = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1}

ROUTES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "/completion": ({"prompt": TEXT, "n_predict": 1}, ("timings", "cache_n")),
    "/v1/chat/completions": (CHAT, ("usage", "prompt_tokens_details", "cached_tokens")),
    "/v1/messages": (CHAT, ("usage", "cache_read_input_tokens")),
    "/v1/responses": (
        {"input": TEXT, "max_output_tokens": 1},
        ("usage", "input_tokens_details", "cached_tokens"),
    ),
}


@pytest.mark.parametrize("route", ROUTES)
async def test_requests_with_the_same_salt_share(route: str) -> None:
    body, path = ROUTES[route]
    found = []
    async with client_of(answering("Hello")) as client:
        for salt in (None, "a", "", "a", "b"):
            answer = await client.post(route, json=body | {"cache_salt": salt})
            assert answer.status_code == 200, answer.text
            value = answer.json()
            for name in path:
                value = value[name]
            found.append(value > len(TEXT) // 2)
    assert found == [False, False, True, True, False]


async def test_a_salt_that_is_none() -> None:
    message = f"'cache_salt' must be a string of at most {MAX_SALT} characters."
    async with client_of(answering("Hello")) as client:
        for route, (body, _) in ROUTES.items():
            for salt in (5, ["a"], "a" * (MAX_SALT + 1)):
                answer = await client.post(route, json=body | {"cache_salt": salt})
                assert answer.status_code == 400, (route, salt)
                assert answer.json()["error"]["message"] == message
