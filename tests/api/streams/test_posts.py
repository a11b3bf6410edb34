"""POSTs that begin a stream which outlives them."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import httpx
import pytest
import trio

from tests.support.clients import busy, client_and_service, client_of
from tests.support.event_source import (
    EventSource,
    connections_of_readers,
    gated,
    ids_in,
    payloads_in,
    text_in,
    text_of,
)
from tests.support.http_server import chunks_of, connected, post, slots_in_use
from tests.support.scripts import CHAT, HI, answering, endless
from tests.support.waiting import PATIENCE, patiently, until
from trioserve.api import streams
from trioserve.api.service import Service
from trioserve.api.sessions import StreamSession

CHATS = "/v1/chat/completions"
STREAM = {**CHAT, "stream": True}
NAMED = {"X-Conversation-Id": "chat-1"}
ASYNC = {"Prefer": "respond-async"}


#: A POST by hand, for readers that leave.
ASK = post(CHATS, json.dumps(STREAM).encode(), "X-Conversation-Id: chat-1")


def at(offset: int = 0, conversation: str = "chat-1") -> str:
    return f"/v1/stream?conv_id={conversation}&from={offset}"


async def until_idle(service: Service) -> None:
    with patiently():
        while await slots_in_use(service):
            await trio.lowlevel.checkpoint()


async def until_closed(service: Service, conversation: str = "chat-1") -> StreamSession:
    with patiently():
        while (session := service.streams.find("", conversation)) is None:
            await trio.sleep(0.01)
        while not session.ring.closed:
            await trio.sleep(0.01)
    return session


# -- what a stream is


ROUTES = [
    (CHATS, CHAT),
    (CHATS, {**CHAT, "n": 2}),
    ("/v1/completions", {"prompt": "a"}),
    ("/completion", {"prompt": ["a", "b"]}),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/messages", {**CHAT, "max_tokens": 9}),
    ("/api/chat", CHAT),
    ("/api/generate", {"prompt": "a"}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_stream_is_the_same_but_for_its_ids(path: str, body: dict[str, Any]) -> None:
    async with client_of(answering("Hello there, you.", n_slots=2)) as client:
        body = {**body, "stream": True, "seed": 1}
        plain = await client.post(path, json=body)
        named = await client.post(path, json=body, headers=NAMED)
        again = await client.get(at())
        assert (named.status_code, again.status_code) == (200, 200)
        assert named.content == again.content
        kinds = {each.headers["content-type"] for each in (plain, named, again)}
        assert len(kinds) == 1
        for header in ("cache-control", "x-accel-buffering", "x-request-id"):
            assert len(named.headers.get_list(header)) == 1
        if "ndjson" in plain.headers["content-type"]:
            ends = [len(named.content)]
        else:
            ends = ids_in(named.content)
            assert len(ends) == named.content.count(b"data: ")
            assert b"id: " not in plain.content
        assert ends[-1] == len(named.content)
        for end in ends:
            rest = await client.get(at(end))
            assert rest.content == named.content[end:]
            assert rest.status_code == 200


async def test_without_the_headers_nothing_is_kept() -> None:
    async with client_and_service(answering("Hello")) as (client, service):
        assert b"id: " not in (await client.post(CHATS, json=STREAM)).content
        # The first is not to be a stream, and the others prefer something else.
        others = ("wait=5", "return=minimal", "respond-async=1", "")
        for headers in (NAMED, *({"Prefer": other} for other in others)):
            whole = await client.post(CHATS, json=CHAT, headers=headers)
            assert whole.json()["choices"][0]["message"]["content"] == "Hello"
        assert list(service.streams) == []
        assert (await client.get(at())).status_code == 404


async def test_a_reader_that_leaves_stops_nothing() -> None:
    backend, gate = gated("0123456789" * 20)
    async with client_and_service(backend) as (client, service):
        gate.allow(30)
        async with chunks_of(str(client.base_url), ASK) as next_chunk:
            read = await next_chunk()
            while not text_of(read):
                read += await next_chunk()
        assert len(text_of(read)) < 100
        gate.open()
        data = read.encode()
        last = ids_in(data)[-1]
        rest = await client.get(at(last))
        assert text_in(data[:last] + rest.content) == "0123456789" * 20
        assert (await client.get(at())).content == data[:last] + rest.content
        await until_idle(service)


async def test_many_readers_see_the_same() -> None:
    backend, gate = gated("0123456789" * 20)
    seen: list[bytes] = []
    async with client_and_service(backend) as (client, _), trio.open_nursery() as nursery:

        async def follow() -> None:
            seen.append((await client.get(at())).content)

        gate.allow(5)
        await client.post(CHATS, json=CHAT, headers={**NAMED, **ASYNC})
        for _ in range(20):
            nursery.start_soon(follow)
            gate.allow(10)
            await trio.sleep(0.005)
        gate.open()
    assert len(set(seen)) == 1
    assert len(seen) == 20
    assert text_in(seen[0]) == "0123456789" * 20


async def test_a_reader_of_discarded_bytes_gets_an_error() -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 5}
    settings = {"stream_bytes": 2**16}
    async with client_and_service(answering("x" * 500), **settings) as (client, service):
        await client.post(CHATS, json=body, headers={**NAMED, **ASYNC})
        session = await until_closed(service)
        early = await client.get(at())
        assert early.status_code == 400
        assert early.json()["error"]["param"] == "from"
        assert "no longer kept" in early.json()["error"]["message"]
        wanted = {"conversation_ids": ["chat-1"]}
        (found,) = (await client.post("/v1/streams/lookup", json=wanted)).json()
        assert found["total_bytes"] == session.ring.end > 2**16
        rest = (await client.get(at(session.ring.start))).content
        assert 2**16 - 2000 < len(rest) <= 2**16
        assert rest.startswith(b"id: ")
        assert rest.endswith(b"data: [DONE]\n\n")


async def test_a_reader_that_stalls_holds_nobody_up() -> None:
    settings = {"unread_tokens": 1, "stall_timeout": 0.2}
    async with (
        client_and_service(answering("x" * 2000), **settings) as (client, service),
        connected(str(client.base_url)) as stalled,
    ):
        await stalled.send_all(ASK)
        session = await until_closed(service)
        assert session.failure is None
        assert session.n_readers <= 1
        assert text_in((await client.get(at())).content) == "x" * 2000


async def test_a_reader_that_is_too_slow_gets_an_error() -> None:
    async with client_and_service(answering("Hello")) as (client, service):
        await client.post(CHATS, json=CHAT, headers={**NAMED, **ASYNC})
        session = await until_closed(service)
        slow = streams._follow(session, 0, b"", b"last")
        session.drop(1)
        error, last = [part async for part in slow]
        assert "no longer kept" in payloads_in(error)[-1]["error"]["message"]
        assert last == b"last"


async def test_the_client_has_one_request_in_the_log_and_in_its_limits() -> None:
    async with client_and_service(answering("Hello"), rate_limit_requests=10) as (client, _):
        headers = {**NAMED, "X-Request-Id": "mine"}
        answer = await client.post(CHATS, json=STREAM, headers=headers)
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["x-ratelimit-remaining-requests"] == "9"
        for _ in range(5):
            assert "x-ratelimit-limit-requests" not in (await client.get(at())).headers
        again = await client.post(CHATS, json=STREAM, headers=NAMED)
        assert again.headers["x-ratelimit-remaining-requests"] == "8"


@pytest.mark.system
async def test_memory_is_held_while_the_request_runs() -> None:
    backend, gate = gated("Hello")
    long = {**CHAT, "ignored": "x" * 500_000}
    async with client_and_service(backend) as (client, service):
        accepted = await client.post(CHATS, json=long, headers={**NAMED, **ASYNC})
        assert accepted.status_code == 202
        assert service.memory.n_held >= 500_000
        gate.open()
        assert text_in((await client.get(at())).content) == "Hello"
        await until(lambda: not service.memory.n_held)


# -- how it ends


async def stopped(client: httpx.AsyncClient, path: str, body: Any) -> bytes:
    """Delete a stream while it is read; returns all of it."""
    async with client.stream("POST", path, json=body, headers=NAMED) as response:
        parts = response.aiter_raw()
        data = await anext(parts)
        assert (await client.delete(at())).status_code == 204
        return data + b"".join([part async for part in parts])


async def test_delete_stops_a_stream_and_frees_its_slot() -> None:
    async with client_and_service(endless()) as (client, service):
        *_, last = payloads_in(await stopped(client, CHATS, STREAM))
        assert last["error"]["code"] == "stream_stopped"
        assert last["error"]["message"] == "The stream was stopped."
        await until_idle(service)
        assert (await client.get(at())).status_code == 404
        for _ in range(2):
            assert (await client.delete(at())).status_code == 204


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_stopped_stream_ends_with_an_error_in_the_form_of_its_api(
    path: str, body: dict[str, Any]
) -> None:
    async with client_of(endless()) as client:
        data = await stopped(client, path, {**body, "max_tokens": 90_000, "stream": True})
    last = json.loads(data.rstrip().rpartition(b"\n")[2].removeprefix(b"data: "))
    if path.startswith("/api/"):
        assert last == {"error": "The stream was stopped."}
    else:
        assert last["error"]["message"] == "The stream was stopped."
    if path in ("/v1/messages", "/v1/responses"):
        assert last["type"] == "error"
        assert b"\nevent: error\ndata: " in data
    if path == "/v1/responses":
        numbers = [each["sequence_number"] for each in payloads_in(data)]
        assert numbers == list(range(len(numbers)))


async def test_one_conversation_posted_again_and_again_under_load() -> None:
    async with client_and_service(endless()) as (client, service):
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                async with client.stream("POST", CHATS, json=STREAM, headers=NAMED) as response:
                    async for _ in response.aiter_raw():
                        pass

            for _ in range(40):
                nursery.start_soon(ask)
                await trio.lowlevel.checkpoint()
            with patiently():
                while len(service.streams.lookup("", ["chat-1"])) != 1 or (
                    await slots_in_use(service) != 1
                ):
                    await trio.sleep(0.01)
            await client.delete(at())
        await until_idle(service)
        assert list(service.streams) == []


@pytest.mark.system
async def test_a_deadline_ends_a_stream() -> None:
    async with client_of(endless()) as client:
        answer = await client.post(CHATS, json={**STREAM, "timeout": 0.2}, headers=NAMED)
        assert payloads_in(answer.content)[-1]["error"]["code"] == "deadline_exceeded"
        assert (await client.get(at())).content == answer.content


@pytest.mark.system
async def test_the_end_of_the_server_ends_a_stream() -> None:
    async with client_and_service(endless(), drain_timeout=0.2) as (client, service):
        async with client.stream("POST", CHATS, json=STREAM, headers=NAMED) as response:
            parts = response.aiter_raw()
            data = await anext(parts)
            async with client.stream("GET", at()) as second:
                await service.drain()
                refused = await client.post(CHATS, json=STREAM, headers={"X-Conversation-Id": "b"})
                assert refused.status_code == 503
                async for part in parts:
                    data += part
                assert await second.aread() == data
        assert "The server shut down" in payloads_in(data)[-1]["error"]["message"]
        assert (await client.get(at())).content == data  # as long as there are sockets


async def test_a_server_that_stops_at_once_ends_streams_with_an_error() -> None:
    async with client_and_service(endless()) as (client, service):
        async with client.stream("POST", CHATS, json=STREAM, headers=NAMED) as response:
            parts = response.aiter_raw()
            data = await anext(parts)
            await service.stop()
            data += b"".join([part async for part in parts])
        assert "error" in payloads_in(data)[-1]


# -- answers that are no streams


async def test_an_error_is_an_error() -> None:
    async with client_and_service() as (client, service):
        for headers in (NAMED, {"Prefer": "respond-async, wait=20"}):
            wrong = await client.post(CHATS, json={**STREAM, "temperature": "hot"}, headers=headers)
            assert wrong.status_code == 400
            assert wrong.json()["error"]["param"] == "temperature"
            assert len(wrong.headers.get_list("content-type")) == 1
            for content in (b"{", b"[]", b"", b'{"stream": 1}', b'{"stream": "yes"}'):
                answer = await client.post(CHATS, content=content, headers=headers)
                assert answer.status_code == 400, content
        assert list(service.streams) == []
        await until(lambda: not service.memory.n_held)


@pytest.mark.system
async def test_an_error_that_nobody_waited_for_is_kept() -> None:
    async with busy() as where:
        client = where.client
        body = {**STREAM, "timeout": 0.3}
        with trio.move_on_after(0.1) as left:
            await client.post(CHATS, json=body, headers=NAMED)
        assert left.cancelled_caught
        answer = await client.get(at())
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")
        (event,) = payloads_in(answer.content)
        assert event["error"]["code"] == "deadline_exceeded"


async def test_a_stream_that_waits_is_stopped() -> None:
    async with busy() as where, trio.open_nursery() as nursery:
        answers: list[httpx.Response] = []

        async def ask() -> None:
            answers.append(await where.client.post(CHATS, json=STREAM, headers=NAMED))

        nursery.start_soon(ask)
        with patiently():
            while not (await where.service.server.status()).waiting:
                await trio.sleep(0.01)
        assert (await where.client.delete(at())).status_code == 204
        await until(lambda: answers)
        assert answers[0].status_code == 409
        assert answers[0].json()["error"]["code"] == "stream_stopped"
        assert (await where.service.server.status()).waiting == ()


async def test_places_in_the_queue_are_in_the_stream() -> None:
    async with busy() as where:
        body = json.dumps({**STREAM, "queue_comments": True}).encode()
        ask = post(CHATS, body, "X-Conversation-Id: chat-1")
        async with chunks_of(str(where.client.base_url), ask) as next_chunk:
            assert (await next_chunk()).startswith(": queued, position 1")
        await where.free()
        assert text_in((await where.client.get(at())).content) == "Hello"


@pytest.mark.parametrize("id_", [b"", b"x" * 257, b"a\tb", "a\u0085".encode()])
async def test_bad_ids(id_: bytes) -> None:
    async with client_of() as client:
        headers = {b"X-Conversation-Id": id_}
        answer = await client.post(CHATS, json=STREAM, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "X-Conversation-Id"


@pytest.mark.parametrize("id_", ["x" * 256, "a b::model/name", "é", "日本", "%41&from=7"])
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
async def test_good_ids(id_: str, encoding: str) -> None:
    async with client_of(answering("Hello")) as client:
        headers = {b"X-Conversation-Id": id_.encode(encoding, errors="replace")}
        answer = await client.post(CHATS, json=STREAM, headers=headers)
        id_ = id_.encode(encoding, errors="replace").decode(encoding)
        again = await client.get("/v1/stream", params={"conv_id": id_})
        assert again.content == answer.content


async def test_too_many_streams() -> None:
    async with client_of(endless(), stream_sessions=2) as client:
        for name in "ab":
            headers = {"X-Conversation-Id": name, **ASYNC}
            assert (await client.post(CHATS, json=CHAT, headers=headers)).status_code == 202
        refused = await client.post(CHATS, json=STREAM, headers={"X-Conversation-Id": "c"})
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        for name in "ab":
            await client.delete(at(conversation=name))


@pytest.mark.system
async def test_five_hundred_streams_at_once() -> None:
    """All begin before one ends; what they keep stays within the bound, and each can be read."""
    bound, gate = 2 * 2**20, threading.Event()
    backend = answering("0123456789" * 5, n_slots=8, n_ctx=8 * 4096)
    backend.on_decode = lambda backend: gate.wait(PATIENCE)
    async with client_and_service(backend, stream_total_bytes=bound) as (client, service):
        async with trio.open_nursery() as nursery:
            limit = trio.CapacityLimiter(20)

            async def ask(n: int) -> None:
                headers = {"X-Conversation-Id": f"{n}", "Prefer": "respond-async, wait=0"}
                async with limit:
                    answer = await client.post(CHATS, json=CHAT, headers=headers)
                assert answer.status_code == 202, answer.text

            for n in range(500):
                nursery.start_soon(ask, n)
        assert len(list(service.streams)) == 500
        gate.set()
        with patiently():
            while not all(session.ring.closed for session in service.streams):
                allocated = sum(sys.getsizeof(each.ring._bytes) for each in service.streams)
                assert allocated < 1.2 * bound + 500 * 100
                await trio.sleep(0.01)
        assert 0 < service.streams.n_bytes <= bound
        kept = [each.conversation for each in service.streams]
        assert len(kept) > 100
        for name in kept[:: len(kept) // 10]:
            answer = await client.get(at(conversation=str(name)))
            assert text_in(answer.content) == "0123456789" * 5


# -- for an EventSource


async def test_an_event_source_reads_an_answer() -> None:
    async with client_of(answering("Hello"), api_keys=("key",)) as client:
        refused = await client.post(CHATS, json=CHAT, headers=ASYNC)
        assert refused.status_code == 401
        headers = {**ASYNC, "Authorization": "Bearer key"}
        accepted = await client.post(CHATS, json={**CHAT, "stream": False}, headers=headers)
        assert accepted.status_code == 202
        assert accepted.headers["Preference-Applied"] == "respond-async"
        location = accepted.headers["Location"]
        assert accepted.json() == {"location": location}
        source = EventSource(client, location)
        assert await source.run() == 204
        assert source.n_connections == 2
        *events, done, last = source.data
        assert (done, last, source.names[-1]) == ("[DONE]", "{}", "done")
        texts = [json.loads(each)["choices"][0]["delta"].get("content") for each in events]
        assert "".join(filter(None, texts)) == "Hello"


@pytest.mark.system
async def test_an_event_source_whose_connection_is_cut_ten_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connections = connections_of_readers(monkeypatch)
    text = "".join(f"{n} " for n in range(100))
    backend, gate = gated(text)
    async with client_of(backend) as client:
        accepted = await client.post(CHATS, json=CHAT, headers=ASYNC)
        source = EventSource(client, accepted.headers["Location"])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(source.run)
            for n in range(10):
                n_events = len(source.data)
                gate.allow(20)
                with patiently():
                    while len(connections) <= n or len(source.data) == n_events:
                        await trio.sleep(0.001)
                connections[n]()
            gate.open()
    events = [json.loads(data) for data in source.data if data not in ("[DONE]", "{}")]
    said = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(said) == text
    assert source.n_connections >= 11


async def test_both_names() -> None:
    async with client_of(answering("Hello")) as client:
        accepted = await client.post(CHATS, json=CHAT, headers={**NAMED, **ASYNC})
        location = accepted.headers["Location"]
        one, other = await client.get(at()), await client.get(location)
        whole = b"retry: 500\n\n" + one.content + b"event: done\ndata: {}\n\n"
        assert other.content == whole
        assert (await client.delete(location)).status_code == 204
        for url in (at(), location):
            assert (await client.get(url)).status_code == 404


@pytest.mark.system
@pytest.mark.parametrize(
    ("prefer", "status"),
    [
        ("respond-async", 202),
        ("respond-async, wait=10", 504),
        ('wait="10";a=b, Respond-Async; x=1', 504),
        ("respond-async, wait=soon", 202),
        ("wait=0, respond-async", 202),
    ],
)
async def test_how_long_a_post_waits(prefer: str, status: int) -> None:
    backend, gate = gated("Hello")
    async with client_of(backend) as client:
        body = {**CHAT, "timeout": 0.7}
        answer = await client.post(CHATS, json=body, headers={"Prefer": prefer})
        gate.open()
        assert answer.status_code == status


async def test_routes_that_do_not_stream_take_no_part() -> None:
    async with client_and_service() as (client, service):
        for headers in (NAMED, ASYNC, {"X-Conversation-Id": ""}):
            body = {"content": "a", "stream": True}
            answer = await client.post("/tokenize", json=body, headers=headers)
            assert answer.json() == {"tokens": [97]}
        for headers in (NAMED, {"Prefer": "respond-async, wait=20"}):
            answer = await client.post(f"{CHATS}/input_tokens", json=STREAM, headers=headers)
            assert answer.json()["object"] == "response.input_tokens"
        assert list(service.streams) == []


async def test_ollama_streams_without_being_asked() -> None:
    async with client_of(answering("Hello")) as client:
        answer = await client.post("/api/chat", json={"messages": HI}, headers=NAMED)
        assert (await client.get(at())).content == answer.content
        whole = await client.post(
            "/api/chat", json={"messages": HI, "stream": False}, headers=NAMED
        )
        assert whole.json()["message"]["content"] == "Hello"
        nothing = await client.post("/api/chat", json={"messages": []}, headers=NAMED)
        assert nothing.json()["done_reason"] == "load"
        accepted = await client.post("/api/chat", json={"messages": HI}, headers={**NAMED, **ASYNC})
        lines = await client.get(accepted.headers["Location"])
        assert lines.headers["content-type"] == "application/x-ndjson"
        assert lines.content == (await client.get(at())).content
        assert json.loads(lines.content.splitlines()[-1])["done"]


@pytest.mark.parametrize("stream", [0, "true"])
async def test_stream_must_be_a_boolean(stream: Any) -> None:
    async with client_of(answering("Hello")) as client:
        answer = await client.post(CHATS, json={**CHAT, "stream": stream}, headers=ASYNC)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


@pytest.mark.system
async def test_a_silent_stream_has_pings_for_all_readers() -> None:
    backend, gate = gated("Hello")
    async with client_of(backend) as client:
        body = {**STREAM, "sse_ping_interval": 0.1}
        answer = await client.post(CHATS, json=body, headers={**NAMED, **ASYNC})
        assert answer.status_code == 202
        async with client.stream("GET", at()) as reader:
            pings = 0
            async for line in reader.aiter_lines():
                pings += line == ":"
                if pings == 3:
                    gate.open()
            assert pings >= 3
        assert text_in((await client.get(at())).content) == "Hello"


async def test_the_first_reader_gets_the_headers_of_the_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with client_and_service(answering("Hello")) as (client, service):
        start = service.streams.start

        def start_with_header(caller: Any, name: Any, route: Any, ask: Any, **more: Any) -> Any:
            async def asked(other: Any) -> Any:
                reply = await ask(other)
                reply.headers["X-Of-A-Child"] = "yes"
                return reply

            return start(caller, name, route, asked, **more)

        monkeypatch.setattr(service.streams, "start", start_with_header)
        answer = await client.post(CHATS, json=STREAM, headers=NAMED)
        assert answer.headers["X-Of-A-Child"] == "yes"
