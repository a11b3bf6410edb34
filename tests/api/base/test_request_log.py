"""The line that each request leaves in the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from hypercorn.utils import LifespanFailureError
from structlog.testing import capture_logs

from tests.server.test_keys import table
from tests.support.clients import client_of
from tests.support.fake_fleet import routed
from tests.support.http_server import connected, serving_script
from tests.support.scripts import CHAT, answering, endless
from tests.support.waiting import until
from trioserve.api.base.request_log import agent_in
from trioserve.testing import ScriptedBackend

CHATS = "/v1/chat/completions"


def requests_in(logs: list[Any]) -> list[dict[str, Any]]:
    return [dict(line) for line in logs if line["event"] == "request"]


@pytest.mark.parametrize(
    ("method", "path", "body", "told"),
    [
        ("GET", "/v1/models", None, {"status": 200}),
        ("POST", CHATS, b"{", {"status": 400, "code": "invalid_request_error"}),
        ("POST", CHATS, b"x" * 1001, {"status": 413}),
        ("GET", "/nothing", None, {"status": 404, "code": "not_found_error"}),
        ("GET", "/v1/completions", None, {"status": 405}),
        ("GET", "/metrics", None, {"status": 501, "code": "not_supported_error"}),
    ],
)
async def test_a_request_leaves_one_line(
    method: str, path: str, body: bytes | None, told: dict[str, Any]
) -> None:
    async with client_of(answering("Hi"), max_body_size=1000) as client:
        with capture_logs() as logs:
            answer = await client.request(method, path, content=body)
            await until(lambda: requests_in(logs))
    (line,) = requests_in(logs)
    wanted = {"method": method, "path": path, "client": "127.0.0.1", "log_level": "info", **told}
    assert line | wanted == line
    if answer.status_code >= 400:
        assert line["error"] == answer.json()["error"]["message"]
    assert line["agent"].startswith("python-httpx/")
    assert line["total_ms"] > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_routed", [False, True])
async def test_a_chat_tells_its_model_tokens_and_times(stream: bool, is_routed: bool) -> None:
    asked = {**CHAT, "stream": stream, "model": f"gpt-{stream}-{is_routed}"}
    made = routed({"one": answering("Hello")}) if is_routed else client_of(answering("Hello"))
    async with made as it:  # type: ignore[attr-defined]
        client = it if isinstance(it, httpx.AsyncClient) else it.client
        with capture_logs() as logs:
            answer = await client.post(CHATS, json=asked)
            assert answer.status_code == 200
            await until(lambda: requests_in(logs))
    (line,) = requests_in(logs)
    assert (line["model"], line["finish"], line["cached_tokens"]) == ("scripted", "eos", 0)
    assert line["prompt_tokens"] > 1 and line["completion_tokens"] > 1
    assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["total_ms"]
    (known,) = (one for one in logs if "not its own" in one["event"])
    assert known["name"] == asked["model"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_of_the_server_is_a_warning(stream: bool) -> None:
    def breaks(_backend: ScriptedBackend) -> None:
        raise RuntimeError("the device is lost")

    with capture_logs() as logs:
        try:
            async with client_of(endless(breaks)) as client:
                await client.post("/completion", json={"prompt": "a", "stream": stream})
                await until(lambda: requests_in(logs))
        except* LifespanFailureError:
            pass  # the app ends with its engine, perhaps before the test does
    (line,) = requests_in(logs)
    assert (line["log_level"], line["code"]) == ("warning", "server_error")


async def test_frequent_requests_are_logged_at_debug() -> None:
    async with client_of(answering("Hi")) as client:
        with capture_logs() as logs:
            for path in ("/health", "/slots", "/licenses.txt"):
                assert (await client.get(path)).status_code == 200
            assert (await client.options(CHATS)).status_code == 200
            await until(lambda: len(requests_in(logs)) == 4)
    assert {line["log_level"] for line in requests_in(logs)} == {"debug"}


async def test_the_name_of_the_key_and_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(table("alice", "sk-secret"))
    async with client_of(answering("Hi"), keys_file=str(file)) as client:
        headers = {"Authorization": "Bearer sk-secret", "Prefer": "respond-async"}
        with capture_logs() as logs:
            assert (await client.post(CHATS, json=CHAT)).status_code == 401
            begun = await client.post(CHATS, json=CHAT, headers=headers)
            assert begun.status_code == 202
            where = begun.headers["Location"]
            assert (await client.get(where)).status_code == 200
            await until(lambda: len(requests_in(logs)) == 3)
    refused, worked, read = requests_in(logs)
    if worked["path"] != CHATS:
        worked, read = read, worked
    assert refused["status"] == 401 and "key" not in refused
    assert (worked["key"], worked["status"], worked["stream"]) == ("alice", 200, "resumable")
    assert worked["completion_tokens"] > 0
    assert read["path"] == "/v1/stream/<id_>"
    assert "sk-secret" not in str(logs) and where.rpartition("/")[2] not in str(logs)


async def test_refusals_before_routing() -> None:
    async with serving_script(endless(), max_connections=1) as (url, _):
        with capture_logs() as logs:
            async with connected(url) as stream:
                await stream.send_all(b"GET / HTTP/1.1\nHost: x\r\n\r\n")
                await until(lambda: requests_in(logs))
    (line,) = requests_in(logs)
    assert (line["status"], line["client"]) == (400, "127.0.0.1")
    assert "does not end in CR and LF" in line["error"]


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("curl/8.5.0", "curl/8.5.0"),
        ("OpenAI/Python 1.99.1", "OpenAI/Python"),
        ("Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0", "Firefox/128"),
        ("Mozilla/5.0 AppleWebKit/537.36 Chrome/140.0.0.0 Safari/537.36", "Chrome/140"),
        ("\x1b[31mred", ""),
        ("x" * 500, "x" * 40),
        ("", ""),
    ],
)
def test_the_name_of_a_client(header: str, name: str) -> None:
    assert agent_in(header) == name
