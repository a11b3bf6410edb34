"""Clients that take what all share: another client gets its answer beside each of them."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
import trio

from tests.support.clients import client_and_service
from tests.support.command import Running, serving
from tests.support.measured import Report
from tests.support.media_bombs import many_scans
from tests.support.media_files import image_file
from tests.support.processes import processor_seconds
from tests.support.projectors import WordProjector
from tests.support.scripts import answering
from tests.support.waiting import patiently, until

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(1800),
    # httpx leaves a generator behind where it is cancelled while it sends.
    pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning"),
]

#: Processor seconds that the server and its processes may take until the other client has its
#: answer, and until `/health` answers: other programs on the machine do not count. Before places
#: were shared, they were 20 to 120, or there was no answer within `PATIENCE`.
_MAX_WAIT = 12.0
_MAX_HEALTH = 3.0

#: Seconds for all that a test does with a server.
_TIMEOUT = 1500.0

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
TINY = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def of(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@attrs.define
class Attack:
    """Requests of the key "first", each sent again when it is answered, and their statuses."""

    client: httpx.AsyncClient
    pid: int  # of the server
    statuses: list[int] = attrs.field(factory=list)
    slowest_health: float = 0.0  # in processor seconds

    async def repeat(self, path: str, make: Callable[[], bytes]) -> None:
        headers = {**of("first"), "Content-Type": "application/json"}
        while True:
            answer = await self.client.post(path, content=make(), headers=headers)
            self.statuses.append(answer.status_code)

    async def watch_health(self, url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            while True:
                used = await slowest(1, lambda: client.get("/health"), self.pid)
                self.slowest_health = max(self.slowest_health, used)
                await trio.sleep(0.05)


@asynccontextmanager
async def attacked(
    url: str, pid: int, n: int, path: str, make: Callable[[], bytes]
) -> AsyncIterator[Attack]:
    """Send requests from `n` connections to a server while a block runs."""
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client,
        trio.open_nursery() as nursery,
    ):
        attack = Attack(client, pid)
        nursery.start_soon(attack.watch_health, url)
        for _ in range(n):
            nursery.start_soon(attack.repeat, path, make)
        await trio.sleep(1.0)  # until they are all there
        yield attack
        nursery.cancel_scope.cancel()


async def slowest(n: int, ask: Callable[[], Awaitable[httpx.Response]], pid: int) -> float:
    """Ask some times, one after another; all have to succeed. Returns the most processor seconds
    that the server takes between a question and its answer.
    """
    seconds = []
    for _ in range(n):
        before = processor_seconds(pid)
        with patiently():
            answer = await ask()
        assert answer.status_code == 200, answer.text
        seconds.append(processor_seconds(pid) - before)
    return max(seconds)


@pytest.fixture
async def served() -> AsyncIterator[Running]:
    keys = ("--api-key", "first", "--api-key", "second")
    # Here, memory is not what bounds the attacks.
    options = ("--parallel", "2", "--ctx-size", "4096", "--max-request-memory", str(2**31))
    async with serving(*keys, *options, timeout=_TIMEOUT) as running:
        yield running


class Schemas:
    """Schemas that cost as much as they may, each of them another one."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self) -> bytes:
        self.n += 1
        names = [f"k{self.n}x{i}" for i in range(600)]
        pattern = "^(a|b)*a(a|b){4}"
        parts = {name: {"type": "string", "pattern": f"{pattern}{name}$"} for name in names}
        schema = {"type": "object", "properties": parts}
        format = {"type": "json_schema", "schema": schema}
        return json.dumps({**CHAT, "response_format": format}).encode()


#: Long texts to tokenize, and chats of very many messages.
TEXT = json.dumps({"content": "word " * (8 * 2**20 // 5)}).encode()
MESSAGES = [{"role": "user", "content": "a"}] * 9_999
MANY_MESSAGES = json.dumps({"messages": MESSAGES, "max_tokens": 1}).encode()


@pytest.mark.parametrize(
    ("n", "path", "make"),
    [
        (60, "/v1/chat/completions", Schemas()),
        (24, "/tokenize", lambda: TEXT),
        (60, "/v1/chat/completions", lambda: MANY_MESSAGES),
    ],
    ids=["schemas", "long texts", "many messages"],
)
async def test_work_of_one_key_does_not_hold_up_another(
    served: Running, report: Report, n: int, path: str, make: Callable[[], bytes]
) -> None:
    format = {"type": "json_schema", "schema": TINY}
    text = {"content": "a " * 5000}
    async with httpx.AsyncClient(base_url=served.url, timeout=None, headers=of("second")) as client:

        async def chat() -> httpx.Response:
            return await client.post(
                "/v1/chat/completions", json={**CHAT, "response_format": format}
            )

        pid = served.process.pid
        alone = await slowest(3, chat, pid)
        async with attacked(served.url, pid, n, path, make) as attack:
            beside = await slowest(20, chat, pid)
            tokens = await slowest(3, lambda: client.post("/tokenize", json=text), pid)
    report(
        f"{n} x {len(make()) // 1000} kB for {path}: a chat with a schema {beside:.2f} s "
        f"({alone:.2f} alone), "
        f"/tokenize {tokens:.2f}, /health {attack.slowest_health:.2f}, "
        f"{len(attack.statuses)} answers {sorted(set(attack.statuses))}"
    )
    assert max(beside, tokens) < _MAX_WAIT
    assert attack.slowest_health < _MAX_HEALTH
    assert set(attack.statuses) <= {200, 400, 429, 503}


async def test_images_of_one_key_do_not_hold_up_those_of_another(report: Report) -> None:
    """The decoders are processes: all that the server does is to wait for them."""

    def asking(data: bytes) -> dict[str, Any]:
        url = f"data:image/jpeg;base64,{b64encode(data).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}]
        return {"messages": [{"role": "user", "content": content}]}

    data, small = json.dumps(asking(many_scans(600))).encode(), asking(image_file())
    backend = answering("Hello", projector=WordProjector())
    async with client_and_service(backend, api_keys=("first", "second")) as (client, _):
        url = str(client.base_url)

        async def chat() -> httpx.Response:
            return await client.post("/v1/chat/completions", json=small, headers=of("second"))

        pid = os.getpid()
        await slowest(2, chat, pid)
        async with attacked(url, pid, 24, "/v1/chat/completions", lambda: data) as attack:
            beside = await slowest(3, chat, pid)
    report(f"24 x images: one more {beside:.2f} s, /health {attack.slowest_health:.2f}")
    assert beside < _MAX_WAIT


async def test_half_sent_heads_do_not_lock_out_others(report: Report) -> None:
    """They come from one address, again and again, and the other client from another one."""
    limit, flags = 100, ("--host", "0.0.0.0")
    async with (
        serving(*flags, "--max-connections", str(limit), timeout=_TIMEOUT) as running,
        trio.open_nursery() as nursery,
    ):
        port = int(running.url.rpartition(":")[2])
        n_opened = 0

        async def attack() -> None:
            nonlocal n_opened
            while True:
                with trio.socket.socket() as sock:
                    await sock.bind(("127.0.0.2", 0))
                    await sock.connect(("127.0.0.1", port))
                    await sock.send(b"GET /health HTTP/1.1\r\nHost: local")
                    n_opened += 1
                    while await sock.recv(2**12):
                        pass

        async def attack_again() -> None:
            while True:
                try:
                    await attack()
                except OSError:
                    await trio.lowlevel.checkpoint()

        for _ in range(3 * limit):
            nursery.start_soon(attack_again)
        await until(lambda: n_opened > 2 * limit)

        async def ask() -> httpx.Response:  # a new connection each time
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                return await client.get("/health")

        seconds = await slowest(30, ask, running.process.pid)
        nursery.cancel_scope.cancel()
    report(f"{n_opened} half-sent heads, {limit} connections: /health {seconds:.2f} s at most")
    assert seconds < _MAX_HEALTH


async def test_requests_that_are_wide(served: Running, report: Report) -> None:
    """Each is refused or answered soon, and `/health` answers meanwhile."""
    names = {"conversation_ids": ["a"] * 16_000}
    patterns = {"trioserve_run_tools": {"tools": ["*a*b*c*d*e" + "?" * 50] * 10_000}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/streams/lookup", names),
        ("/v1/chat/completions", {**CHAT, **patterns}),
        ("/v1/responses", {"input": "Hi", "metadata": {f"{n}": "x" * 500 for n in range(9999)}}),
        ("/v1/chat/completions", {**CHAT, "stop": ["a" * 512] * 100_000}),
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function"}] * 100_000}),
    ]
    headers = {**of("first"), "X-Conversation-Id": "a"}
    async with httpx.AsyncClient(base_url=served.url, timeout=None, headers=headers) as client:
        for n in range(100):
            name = {"X-Conversation-Id": f"a::{n}"}
            await client.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers=name)
        for path, body in bodies:
            attack = Attack(client, served.process.pid)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(attack.watch_health, served.url)
                await trio.sleep(0.2)
                before = processor_seconds(attack.pid)
                answer = await client.post(path, json=body)
                seconds = processor_seconds(attack.pid) - before
                nursery.cancel_scope.cancel()
            report(
                f"{path} with {len(json.dumps(body)) // 1000} kB: {answer.status_code}, "
                f"{len(answer.content)} bytes, {seconds:.2f} s, /health {attack.slowest_health:.2f}"
            )
            assert answer.status_code == (200 if path.endswith("lookup") else 400)
            assert len(answer.content) < 100_000
            assert attack.slowest_health < _MAX_HEALTH


def calls(folder: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Calls of tools that take as long as they may."""
    (folder / "ab").write_bytes(b"ab" * 2**22)
    (folder / "lines").write_bytes((b"ab" * 2000 + b"\n") * 2000)
    (folder / "edited").write_text("a" * (4 * 2**20 - 1))
    (folder / ".git").mkdir(exist_ok=True)
    (folder / ".gitignore").write_text("\n".join(f"*{n}*x*y*z*" for n in range(2000)))
    wide = "[ab]{0,900}" * 5 + "c"
    edits = [{"old_text": "a" * 50 + "b", "new_text": ""}] * 60_000
    numbers = json.dumps([1] * 4_000_000)
    few = [{"old_text": "a" * 2_000_000 + "b" + "a" * 90, "new_text": ""}] * 2
    return {
        "a wide pattern": ("grep_search", {"path": "lines", "pattern": wide}),
        "a wide pattern, one line": ("grep_search", {"path": "ab", "pattern": wide}),
        "a pattern of a megabyte": ("grep_search", {"path": "ab", "pattern": "a" * 2**20}),
        "60,000 edits": ("edit_file", {"path": "edited", "edits": edits}),
        "long edits": ("edit_file", {"path": "edited", "edits": few}),
        "edits as text": ("edit_file", {"path": "edited", "edits": numbers}),
        "a number as text": (
            "read_file",
            {"path": "ab", "start_line": numbers},
        ),
        ".gitignore": ("file_glob_search", {"path": "."}),
        "a long glob": ("file_glob_search", {"path": ".", "include": "**/" * 300 + "*a*" * 40}),
    }


async def test_calls_of_tools_that_take_long(tmp_path: Path, report: Report) -> None:
    """They end in time, and the calls of another key are answered beside them."""
    (tmp_path / "small").write_text("text\n")
    keys = ("--api-key", "first", "--api-key", "second")
    tools = ("--tools", "all", "--tools-dir", str(tmp_path))
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(
            serving(*keys, *tools, "--drain-timeout", "1", timeout=_TIMEOUT)
        )
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=running.url, timeout=None)
        )

        async def read() -> httpx.Response:
            params = {"tool": "read_file", "params": {"path": "small"}}
            return await client.post("/tools", json=params, headers=of("second"))

        for name, (tool, params) in calls(tmp_path).items():
            body = {"tool": tool, "params": params}
            attack = Attack(client, running.process.pid)
            began = processor_seconds(attack.pid)

            async def call(body: dict[str, Any] = body) -> None:
                answer = await client.post("/tools", json=body, headers=of("first"))
                # 503: the key has as much memory as it may.
                assert answer.status_code in (200, 400, 503), answer.text

            async with trio.open_nursery() as nursery:
                nursery.start_soon(attack.watch_health, running.url)
                async with trio.open_nursery() as calling:
                    for _ in range(4):
                        calling.start_soon(call)
                    await trio.sleep(0.5)
                    beside = await slowest(3, read, attack.pid)
                nursery.cancel_scope.cancel()
            took = processor_seconds(attack.pid) - began
            report(
                f"4 x {name}: {took:.2f} s, read_file beside it {beside:.2f}, "
                f"/health {attack.slowest_health:.2f}"
            )
            assert took < 150
            assert beside < _MAX_WAIT
            assert attack.slowest_health < _MAX_HEALTH
        # Calls that run end with the server.
        async with trio.open_nursery() as nursery:
            body = {"tool": "grep_search", "params": calls(tmp_path)["a wide pattern"][1]}

            async def call_to_the_end() -> None:
                with trio.move_on_after(60):
                    answer = await client.post("/tools", json=body, headers=of("first"))
                    assert answer.status_code in (200, 503)

            for _ in range(2):
                nursery.start_soon(call_to_the_end)
            await trio.sleep(0.5)
            running.process.terminate()
            with patiently():
                await running.process.wait()
            nursery.cancel_scope.cancel()
