"""The queue over HTTP: priorities, deadlines, clients, places, and when it is full."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from tests.support.clients import busy, client_and_service, client_of
from tests.support.http_server import connected, post, serving_script
from tests.support.scripts import CHAT, ENDLESS, HI
from tests.support.waiting import patiently, until
from trioserve.api.base import sse
from trioserve.api.base.reply import Pings
from trioserve.api.base.sse import PING, comment_on
from trioserve.server import RequestContext
from trioserve.server.dispatch import Mailbox
from trioserve.server.generation.requests import FRESH, Queue
from trioserve.server.server import Server
from trioserve.testing import ScriptedBackend
from trioserve.types import EngineStatus, Task, WaitingStatus

PREFER = {"Prefer": "respond-async, wait=1"}
NAMED = {"X-Conversation-Id": "one"}

#: A route that generates, and a body for it.
ROUTES = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/completions", {"prompt": ["a", "b"]}),
    ("/completion", {"prompt": "a"}),
    ("/completion", {"prompt": ["a", "b"]}),
]


async def until_queued(server: Server, n: int = 1) -> list[WaitingStatus]:
    """Wait until ``n`` tasks are in the queue, and get their places."""
    with patiently():
        while len(waiting := (await server.status()).waiting) != n:
            await trio.lowlevel.checkpoint()
    return list(waiting)


# -- looks at the queue


def place(task_id: int, position: int, wait_s: float | None = None) -> WaitingStatus:
    return WaitingStatus(
        task_id=task_id, position=position, n_prompt=1, priority=0, waited_s=0.0, wait_s=wait_s
    )


def looking(*waiting: WaitingStatus, takes: float = 0) -> tuple[Queue, list[float]]:
    """A queue, and the times when it was looked at."""
    looks: list[float] = []

    async def look() -> EngineStatus:
        looks.append(trio.current_time())
        await trio.sleep(takes)
        return EngineStatus(slots=(), waiting=waiting)

    return Queue(look), looks


async def test_one_look_serves_all(autojump_clock: MockClock) -> None:
    seen, looks = looking(place(7, 1), place(8, 2), takes=0.5)
    found: list[WaitingStatus | None] = []

    async def ask(*task_ids: int) -> None:
        found.append(await seen.first_of(task_ids))

    async with trio.open_nursery() as nursery:
        for task_ids in ((7,), (8, 7), (8,), (9,)):
            nursery.start_soon(ask, *task_ids)
    assert len(looks) == 1
    assert sorted(one.position if one else 0 for one in found) == [0, 1, 1, 2]
    await trio.sleep(FRESH)
    await ask(7)
    assert len(looks) == 2


def test_a_place_as_a_comment() -> None:
    assert comment_on(place(7, 3, 2.123)) == b": queued, position 3, about 2.1 s\n\n"
    assert comment_on(place(7, 3)) == b": queued, position 3\n\n"


async def test_a_silent_response_tells_its_place_or_pings(autojump_clock: MockClock) -> None:
    seen, looks = looking(place(7, 2), place(8, 3))
    mailboxes = [Mailbox(8, 1), Mailbox(7, 1)]
    pings = Pings(30, seen, mailboxes)
    assert await pings.comment() == b": queued, position 2\n\n"
    mailboxes[0].queued = False
    assert await pings.comment() == PING
    assert await Pings(30, seen, [Mailbox(9, 1)]).comment() == PING  # it left the queue just now
    assert len(looks) == 1


async def test_a_ping_does_not_wait_for_a_long_step(autojump_clock: MockClock) -> None:
    seen, _ = looking(place(7, 1), takes=60)
    assert await Pings(30, seen, [Mailbox(7, 1)]).comment() == PING
    assert trio.current_time() == pytest.approx(sse.LOOK_TIMEOUT)


# -- places


async def test_slots_tell_the_queue_when_asked() -> None:
    async with busy() as (client, service), trio.open_nursery() as nursery:
        for name, priority in (("one", 0), ("two", 5)):
            fields = {"prompt": name, "priority": priority}
            nursery.start_soon(partial(client.post, "/completion", json=fields))
            await until_queued(service.server, 1 if name == "one" else 2)
        plain = (await client.get("/slots")).json()
        assert [slot["is_processing"] for slot in plain] == [True]
        whole = (await client.get("/slots?queue=1")).json()
        assert [slot["is_processing"] for slot in whole["slots"]] == [True]
        first, second = whole["queue"]
        assert (first["position"], second["position"]) == (1, 2)
        assert (first["priority"], second["priority"]) == (5, 0)
        assert first["id_task"] > second["id_task"]
        assert first["n_prompt_tokens"] == 3
        assert first["waited_s"] >= 0
        assert first["wait_s"] is None  # no request has ended yet
        nursery.cancel_scope.cancel()


async def test_slots_tell_of_the_cache_and_of_totals_when_asked() -> None:
    async with busy() as (client, service):
        before = (await service.server.status()).counters
        whole = (await client.get("/slots?queue=1")).json()
        after = (await service.server.status()).counters
        assert whole["kv_cache"]["cells"] == after.n_cells > 0
        assert 0 < before.n_cells_used <= whole["kv_cache"]["used"] <= after.n_cells_used
        totals = whole["totals"]
        assert totals["prompt_tokens"] == after.prompt_queries > 0
        assert totals["cached_tokens"] == after.cached_tokens
        assert before.predicted_tokens <= totals["generated_tokens"] <= after.predicted_tokens


async def test_slots_and_metrics_tell_what_each_tier_of_the_cache_holds(tmp_path: Path) -> None:
    """A server reads from RAM, the next one from disk, and the last one has no folder."""
    fields = {"metrics_endpoint": True, "cache_disk": str(tmp_path)}
    one_seq = partial(ScriptedBackend, n_slots=1, n_seqs=1)

    async with client_of(one_seq(), **fields) as client:
        await ask_for(client, "a", "b", "a")
        ram = await tiers(client)
    assert ram["kv_bytes"] > 0
    assert ram["ram_bytes"] > 0
    assert ram["ram_tokens"] >= len(LONG)
    assert ram["disk_tokens"] == ram["disk_read_bytes"] == 0

    async with client_of(one_seq(), **fields) as client:
        await ask_for(client, "a")
        disk = await tiers(client)
    assert disk["disk_tokens"] >= len(LONG)
    assert disk["ram_tokens"] == 0
    files = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert 0 < disk["disk_read_bytes"] < disk["disk_bytes"] <= sum(files)

    async with client_of(one_seq(), metrics_endpoint=True) as client:
        await ask_for(client, "a", "b", "a")
        none = await tiers(client)
    assert none["ram_tokens"] == ram["ram_tokens"]
    assert {value for name, value in none.items() if name.startswith("disk")} == {0}


LONG = "x" * 200


async def ask_for(client: httpx.AsyncClient, *beginnings: str) -> None:
    for beginning in beginnings:
        answer = await client.post("/completion", json={"prompt": beginning + LONG})
        assert answer.status_code == 200


async def tiers(client: httpx.AsyncClient) -> dict[str, int]:
    """Get the cache counts of `/slots`, and compare those that are stable with the metrics."""
    seen: dict[str, int] = (await client.get("/slots?queue=1")).json()["cache"]
    text = (await client.get("/metrics")).text
    samples = {line.split("{")[0]: line.split()[-1] for line in text.splitlines()}
    for field, name in (
        ("kv_bytes", "kv_cache_bytes"),
        ("ram_tokens", "prefix_cache_ram_hits_total"),
        ("disk_tokens", "prefix_cache_disk_hits_total"),
        ("disk_read_bytes", "disk_cache_read_bytes_total"),
    ):
        assert seen[field] == float(samples[f"trioserve:{name}"]), field
    return seen


async def test_the_wait_is_estimated_from_what_has_ended() -> None:
    async with busy() as (client, service), trio.open_nursery() as nursery:
        service.server.lifecycle.services.admission.observe(3000)
        for _ in range(2):
            nursery.start_soon(partial(client.post, "/completion", json={"prompt": "a"}))
        await until_queued(service.server, 2)
        whole = (await client.get("/slots?queue=1")).json()
        assert [one["wait_s"] for one in whole["queue"]] == [3.0, 6.0]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/completion"])
@pytest.mark.parametrize(
    "fields", [{"queue_comments": True}, {"sse_ping_interval": 0.1}], ids=["asked", "at a ping"]
)
async def test_a_stream_tells_its_place(path: str, fields: dict[str, Any]) -> None:
    body = json.dumps({**CHAT, "prompt": ["a", "b"], "stream": True, **fields}).encode()
    async with (
        busy() as (client, _),
        connected(str(client.base_url).rstrip("/")) as stream,
    ):
        await stream.send_all(post(path, body))
        answer = b""
        with patiently():
            while b": queued, position 1\n\n" not in answer:
                answer += await stream.receive_some()
        assert answer.startswith(b"HTTP/1.1 200")


async def test_the_sdk_passes_over_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    async with busy() as where:
        base_url = f"{str(where.client.base_url).rstrip('/')}/v1"

        def use() -> str:
            with openai.OpenAI(base_url=base_url, api_key="any") as sdk:
                stream = sdk.chat.completions.create(
                    model="m",
                    messages=cast(Any, HI),
                    stream=True,
                    timeout=60,
                    extra_body={"queue_comments": True, "priority": 3, "timeout": 600},
                )
                return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

        async def free_the_slot() -> None:
            (waiting,) = await until_queued(where.service.server)
            assert waiting.priority == 3
            with patiently():
                await commented.wait()
            await where.free()

        commented = trio.Event()
        comment = Pings.comment

        async def noted(pings: Pings) -> bytes:
            commented.set()
            return await comment(pings)

        monkeypatch.setattr(Pings, "comment", noted)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(free_the_slot)
            assert await trio.to_thread.run_sync(use) == "Hello"


# -- a full queue


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_full_queue_is_429_and_says_when_to_come_back(
    path: str, body: dict[str, Any], streaming: bool
) -> None:
    async with busy(max_queue=0) as (client, service):
        service.server.lifecycle.services.admission.observe(2100)
        answer = await client.post(path, json={**body, "stream": streaming})
        assert answer.status_code == 429
        assert answer.headers["Retry-After"] == "3"
        assert answer.headers["Content-Type"] == "application/json"
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
        assert not await until_queued(service.server, 0)


async def test_one_prompt_too_many_refuses_all_of_them() -> None:
    async with busy(max_queue=1) as (client, service):
        for streaming in (True, False):
            body = {"prompt": ["a", "b"], "stream": streaming}
            answer = await client.post("/completion", json=body)
            assert answer.status_code == 429
            await until_queued(service.server, 0)


async def test_no_stream_begins_in_a_full_queue() -> None:
    async with busy(max_queue=0) as (client, service):
        for headers in (PREFER, NAMED):
            body = {**CHAT, "stream": True}
            answer = await client.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 429
            assert int(answer.headers["Retry-After"]) >= 1
        assert list(service.streams) == []


# -- priorities


@pytest.mark.parametrize(("order", "given"), [("higher-first", -7), ("lower-first", 7)])
@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_priorities(path: str, body: dict[str, Any], order: str, given: int) -> None:
    """With "lower-first", as vLLM has them."""
    async with busy(priority_order=order) as (client, service), trio.open_nursery() as nursery:
        nursery.start_soon(partial(client.post, path, json={**body, "priority": given}))
        n = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
        assert [one.priority for one in await until_queued(service.server, n)] == [-7] * n
        nursery.cancel_scope.cancel()


# -- deadlines


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_deadline_in_the_queue_is_504(
    path: str, body: dict[str, Any], streaming: bool
) -> None:
    async with busy() as (client, service):
        answer = await client.post(path, json={**body, "stream": streaming, "timeout": 0.05})
        assert answer.status_code == 504
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("deadline_exceeded", "timeout_error")
        await until_queued(service.server, 0)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
async def test_a_deadline_in_a_stream_is_an_event(path: str) -> None:
    backend = ScriptedBackend(lambda prompt: "x" * ENDLESS, n_ctx=2 * ENDLESS)
    backend.on_decode = lambda backend: time.sleep(0.001)
    body = {"messages": HI, "prompt": "a", "stream": True, "timeout": 1000}
    async with (
        client_and_service(backend) as (client, service),
    ):
        with capture_logs() as logs:
            async with client.stream("POST", path, json=body) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                pass_deadline(service.server)
                rest = [line async for line in lines if line]
            await until(lambda: bool(logs) and logs[-1]["event"] == "request")
        assert answer.status_code == 200
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        assert '"length"' not in "".join(rest)
        assert (logs[-1]["status"], logs[-1]["code"]) == (200, "deadline_exceeded")


def pass_deadline(server: Server) -> None:
    """Make the time pass that the one request has, without waiting for it."""
    dispatcher = server.lifecycle.services.dispatcher
    (mailbox,) = dispatcher.mailboxes
    assert mailbox.deadline > trio.current_time() + 900
    mailbox.deadline = trio.current_time()
    dispatcher._watch_at(mailbox.deadline, mailbox)


async def test_the_header_is_for_requests_without_the_field() -> None:
    async with busy() as (client, service):
        short = {"X-Request-Timeout": "0.05"}
        answer = await client.post("/completion", json={"prompt": "a"}, headers=short)
        assert answer.status_code == 504
        async with trio.open_nursery() as nursery:
            body = {"prompt": "a", "timeout": 60}
            nursery.start_soon(partial(client.post, "/completion", json=body, headers=short))
            await until_queued(service.server)
            await trio.sleep(0.1)
            await until_queued(service.server)
            nursery.cancel_scope.cancel()


async def test_the_time_begins_before_the_body() -> None:
    body = b'{"prompt": "a"}'
    async with serving_script() as (url, _), connected(url) as stream:
        whole = post("/completion", body, "X-Request-Timeout: 0.05")
        await stream.send_all(whole[: -len(body)])
        await trio.sleep(0.1)
        await stream.send_all(body)
        with patiently():
            assert b"504" in await stream.receive_some()


@pytest.mark.parametrize(
    ("waited", "status"), [("0.5", 200), ("100.25", 504), ("nan", 200), ("-100", 200), ("", 200)]
)
async def test_the_time_at_a_proxy_counts(waited: str, status: int) -> None:
    body = {"prompt": "a", "n_predict": 2, "timeout": 50}
    async with client_of() as client:
        headers = {"X-Request-Waited": waited}
        answer = await client.post("/completion", json=body, headers=headers)
        assert answer.status_code == status


async def test_the_time_of_a_stream_begins_when_it_is_posted() -> None:
    async with client_of() as client:
        body = {**CHAT, "timeout": 50, "stream": True}
        for waited, status in (("10", 200), ("100", 504)):
            headers = {**NAMED, "X-Request-Waited": waited}
            answer = await client.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == status


@pytest.mark.parametrize("timeout", ["", "0", "-1", "1e3", "inf", "nan", "1_0", "٣", "5 s"])
async def test_bad_timeouts_in_the_header(timeout: str) -> None:
    async with client_of() as client:
        headers = {b"X-Request-Timeout": timeout.encode()}
        answer = await client.post("/completion", json={"prompt": "a"}, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "X-Request-Timeout"


# -- clients


async def test_keys_take_turns_and_are_not_shown() -> None:
    """One key has sent two requests when the other one comes, which is then second, not third."""
    async with busy(api_keys=("anna", "bert")) as (client, service):
        with capture_logs() as logs:
            async with trio.open_nursery() as nursery:

                async def ask(path: str, body: dict[str, Any], headers: dict[str, str]) -> None:
                    await client.post(path, json=body, headers=headers)

                anna, bert = {"Authorization": "Bearer anna"}, {"x-api-key": "bert"}
                for n, (body, headers) in enumerate(
                    [({"prompt": "a"}, anna), ({"prompt": "aa"}, anna), ({"prompt": "b" * 9}, bert)]
                ):
                    nursery.start_soon(ask, "/completion", body, headers)
                    places = await until_queued(service.server, n + 1)
                assert [one.n_prompt for one in places] == [1, 9, 2]
                shown = (await client.get("/slots?queue=1", headers=anna)).text
                nursery.cancel_scope.cancel()
        assert "anna" not in shown + repr(logs) + repr(places)
        assert "bert" not in shown + repr(logs)


async def test_a_stream_keeps_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    async with (
        client_and_service(api_keys=("anna",)) as (client, service),
    ):
        requests = service.server.lifecycle.services.requests
        original = requests.open

        def opened(task: Task, context: RequestContext, operation: str) -> Any:
            seen.append(context.client)
            return original(task, context, operation)

        monkeypatch.setattr(requests, "open", opened)
        headers = {**PREFER, "Authorization": "Bearer anna"}
        accepted = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert (await client.get(accepted.headers["Location"])).status_code == 200
    assert seen == ["anna"]


async def test_without_keys_all_are_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    async with busy() as (client, service), trio.open_nursery() as nursery:
        for n in range(3):
            ask: Callable[[], Awaitable[Any]] = partial(
                client.post,
                "/completion",
                json={"prompt": "a" * (n + 1)},
                headers={"Authorization": f"Bearer key-{n}"},
            )
            nursery.start_soon(ask)
            places = await until_queued(service.server, n + 1)
        assert [one.n_prompt for one in places] == [1, 2, 3]
        nursery.cancel_scope.cancel()
