"""Rate limits over HTTP: refusals, headers, and the retries of SDKs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import trio

from tests.support.clients import client_and_service, client_of
from tests.support.http_server import serving_at, serving_script

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


async def test_each_key_has_its_own_requests() -> None:
    async with client_of(api_keys=("one", "two"), rate_limit_requests=2) as client:

        async def ask(key: str) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            return await client.post("/v1/chat/completions", json=CHAT, headers=headers)

        for left in (1, 0):
            answer = await ask("one")
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "2"
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
        refused = await ask("one")
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["Retry-After"]) <= 30
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert (await ask("two")).status_code == 200
        # Requests that do not generate are not counted.
        headers = {"Authorization": "Bearer one"}
        assert (await client.get("/props", headers=headers)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_reserved_and_settled(stream: bool) -> None:
    async with client_and_service(rate_limit_tokens=1000) as (client, service):
        long = {"prompt": "abc", "n_predict": 900, "stop": ["a"], "stream": stream}
        answer = await client.post("/completion", json=long)
        assert answer.status_code == 200
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) <= (103 if stream else 1000)
        requests = service.server.lifecycle.services.requests
        await service.server.lifecycle.gate.drained()
        assert (
            requests.resources.rate_limits.remaining("127.0.0.1")["tokens"].remaining > 900
        )  # it used a few
        full = {"prompt": "x" * 60, "n_predict": 60}
        used = [(await client.post("/completion", json=full)).status_code for _ in range(10)]
    assert used.count(429) >= 1


async def test_all_outputs_of_a_request_count_for_tokens_and_as_one_request() -> None:
    body = {"prompt": "abc", "max_tokens": 9, "n": 2}
    async with client_of(rate_limit_requests=10, rate_limit_tokens=1000) as client:
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-ratelimit-remaining-requests"] == "9"
        assert 1000 - 2 * 12 <= int(answer.headers["x-ratelimit-remaining-tokens"]) < 1000 - 6


async def test_anthropic_s_routes_have_its_headers_and_pages_may_read_ours() -> None:
    page = {"Origin": "http://localhost:3000"}
    async with client_of(rate_limit_requests=9) as client:
        answer = await client.post("/v1/messages", json=CHAT)
        assert answer.headers["anthropic-ratelimit-requests-limit"] == "9"
        assert answer.headers["anthropic-ratelimit-requests-remaining"] == "8"
        assert answer.headers["anthropic-ratelimit-requests-reset"].endswith("+00:00")
        answer = await client.post("/v1/chat/completions", json=CHAT, headers=page)
        assert answer.headers["x-ratelimit-remaining-requests"] == "7"
        exposed = answer.headers["Access-Control-Expose-Headers"].lower()
        assert "x-ratelimit-remaining-requests" in exposed


async def test_without_limits_there_are_no_headers() -> None:
    async with client_of() as client:
        answer = await client.post("/v1/chat/completions", json=CHAT)
        assert not any("ratelimit" in name for name in answer.headers)


@pytest.mark.system
async def test_the_sdks_back_off() -> None:
    """With one request left a second, a third one comes after the time that the answer names."""
    async with serving_script(rate_limit_requests=60) as (url, service):
        limits = service.server.resources.rate_limits

        def use_up() -> None:
            while limits.remaining("127.0.0.1")["requests"].remaining:
                limits.admit("127.0.0.1")

        def call_openai() -> None:
            with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=2) as client:
                client.chat.completions.create(model="m", **CHAT)

        def call_anthropic() -> None:
            with anthropic.Anthropic(base_url=url, api_key="any", max_retries=2) as client:
                client.messages.create(model="m", **CHAT)

        for call in (call_openai, call_anthropic):
            use_up()
            began = trio.current_time()
            await trio.to_thread.run_sync(call)
            assert trio.current_time() - began > 0.5


async def test_a_proxy_at_a_unix_socket_names_the_addresses(tmp_path: Path) -> None:
    path = tmp_path / "proxy.sock"
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    async with (
        serving_at(path, rate_limit_requests=1),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):

        async def ask(address: str) -> int:
            headers = {"X-Forwarded-For": address}
            answer = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
            return answer.status_code

        assert [await ask(each) for each in ("1.1.1.1", "2.2.2.2, 3.3.3.3")] == [200, 200]
        assert [await ask(each) for each in ("1.1.1.1", "3.3.3.3")] == [429, 429]
        assert await ask("2.2.2.2") == 200


async def test_forwarded_addresses_of_clients_are_ignored() -> None:
    statuses = []
    async with client_of(rate_limit_requests=1) as client:
        for address in ("1.1.1.1", "2.2.2.2"):
            headers = {"X-Forwarded-For": address}
            answer = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
            statuses.append(answer.status_code)
        assert statuses == [200, 429]
