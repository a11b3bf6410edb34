"""Addresses, certificates, prefixes, files and origins."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from tests.support.clients import client_of
from tests.support.command import run, serving
from tests.support.http_server import connected, serving_script
from tests.support.waiting import patiently
from trioserve.api.edge import access
from trioserve.config import Config
from trioserve.models import BUNDLED

# -- where it listens


@pytest.mark.system
async def test_https_and_a_unix_socket(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    cert, key, path = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "trio.sock"
    issued.private_key_pem.write_to_path(str(key))
    issued.cert_chain_pems[0].write_to_path(str(cert))
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    argv = ["--ssl-cert-file", str(cert), "--ssl-key-file", str(key), "--api-prefix", "/llm"]
    async with serving("--host", f"127.0.0.1,{path}", *argv) as running:
        assert running.url.startswith("https://127.0.0.1:")
        assert running.url.endswith("/llm")
        async with httpx.AsyncClient(verify=trusting, timeout=30) as client:
            answer = await client.post(f"{running.url}/completion", json={"n_predict": 2} | PROMPT)
            assert answer.json()["tokens_predicted"] == 2
        transport = httpx.AsyncHTTPTransport(uds=str(path), verify=trusting)
        async with httpx.AsyncClient(transport=transport, timeout=30) as client:
            assert (await client.get("https://127.0.0.1/llm/health")).status_code == 200
        running.process.terminate()
        assert await running.process.wait() == 0
    assert not path.exists()


PROMPT = {"prompt": "Once"}


@pytest.mark.system
@pytest.mark.parametrize(
    ("argv", "status", "problem"),
    [
        (["--path", "no"], 1, "--path: no is not a directory"),
        (
            ["--ssl-key-file", "/dev/null", "--ssl-cert-file", "/dev/null"],
            1,
            "the certificate or its key cannot be used: ",
        ),
        (["--mcp-servers-config", "no"], 1, "--mcp-servers-config: no cannot be read: "),
        (["-m", "no/model", "--offline"], 1, "no/model is not in the cache, and nothing is downl"),
        (["--hf-repo", "no/such/model"], 1, "'no/such/model' is not a model on the hub"),
        (["-m", str(BUNDLED), "--spec-draft-hf", "none"], 1, "'none' is not a model on the hub"),
        (["--log-file", "no/log"], 2, "the log file no/log cannot be opened: No such file or dire"),
    ],
)
def test_a_problem_is_told_in_one_line(argv: list[str], status: int, problem: str) -> None:
    result = run(*argv)
    assert result.returncode == status
    assert result.stderr.startswith(f"trioserve: {problem}")
    assert result.stderr.count("\n") == 1


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async with serving_script(timeout=0.05) as (url, _), connected(url) as stream:
        head = b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{"
        await stream.send_all(head)
        with patiently():
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 408 ")


# -- below which path


async def test_a_prefix_comes_before_all_routes() -> None:
    async with client_of(api_prefix="/llm") as client:
        assert (await client.get("/llm/health")).status_code == 200
        assert (await client.get("/llm/")).status_code == 200
        for path in ("/health", "/llm", "/llmhealth", "/"):
            answer = await client.get(path)
            assert answer.status_code == 404
            assert answer.json()["error"]["type"] == "not_found_error"
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        headers = {"Prefer": "respond-async"}
        parked = await client.post("/llm/v1/chat/completions", json=chat, headers=headers)
        assert parked.headers["Location"].startswith("/llm/v1/stream/")
        assert (await client.delete(parked.headers["Location"])).status_code == 204


async def test_no_page() -> None:
    async with client_of(ui=False) as client:
        answer = await client.get("/")
        message = answer.json()["error"]["message"]
        assert answer.status_code == 404
        assert message == "This server has no page: it runs with --no-ui."


async def test_files_are_served_in_place_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text("<p>mine", encoding="utf-8")
    (tmp_path / "site" / "sub").mkdir()
    (tmp_path / "site" / "sub" / "a.js").write_text("1", encoding="utf-8")
    (tmp_path / "secret").write_text("2", encoding="utf-8")
    async with client_of(static_path=str(tmp_path / "site"), api_keys=("key",)) as client:
        answer = await client.get("/")
        assert answer.text == "<p>mine"
        assert answer.headers["Content-Type"].startswith("text/html")
        assert (await client.get("/sub/a.js")).status_code == 401
        client.headers["Authorization"] = "Bearer key"
        assert (await client.get("/sub/a.js")).text == "1"
        for path in ("/sub/b.js", "/sub/", "/%2e%2e/secret", "/..%2fsecret", "/a%00"):
            answer = await client.get(path)
            assert answer.status_code == 404, path
            assert answer.json()["error"]["type"] == "not_found_error"
        assert (await client.post("/sub/a.js")).status_code == 404
        assert (await client.get("/health")).json() == {"status": "ok"}


# -- other origins


HERE, THERE = "http://localhost:3000", "https://example.com"


@pytest.mark.parametrize(
    ("settings", "origin", "says"),
    [
        ({}, HERE, HERE),
        ({}, THERE, None),
        ({"cors_origins": THERE}, THERE, THERE),
        ({"cors_origins": THERE}, HERE, None),
        ({"cors_origins": f"{THERE}, localhost"}, HERE, HERE),
        ({"cors_origins": "*"}, THERE, "*"),
        ({"cors_origins": "*", "cors_credentials": True}, THERE, THERE),
        ({"cors_origins": "*", "cors_credentials": True}, "", "*"),
        ({"cors_origins": ""}, HERE, None),
    ],
)
def test_which_origins_are_let_in(settings: dict[str, Any], origin: str, says: str | None) -> None:
    assert access.Sites(Config(**settings)).allowed(origin) == says


async def test_a_preflight_says_what_is_allowed() -> None:
    settings = {"cors_origins": "*", "cors_methods": "GET", "cors_headers": "*"}
    async with client_of(**settings, cors_credentials=True, api_keys=("key",)) as client:
        answer = await client.options("/completion", headers={"Origin": THERE})
        assert answer.status_code == 200
        said = {k: v for k, v in answer.headers.items() if k.startswith("access-control-allow")}
        assert said == {
            "access-control-allow-origin": THERE,
            "access-control-allow-credentials": "true",
            "access-control-allow-methods": "GET",
            "access-control-allow-headers": "*",
        }
