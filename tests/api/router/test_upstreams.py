"""Models of other servers: what reaches them, what comes back, and what happens if they fail."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
import trio

from tests.support.canned_server import http_answer, json_answer
from tests.support.fake_fleet import Routed, routed
from tests.support.http_server import connected, post
from tests.support.scripts import CHAT, answering
from tests.support.waiting import patiently, until
from trioserve.api.router import exchange
from trioserve.config.keys import digest_of
from trioserve.models.catalog.upstreams import Upstream

SECRET = "sk-very-secret"
STREAM = {**CHAT, "model": "far", "stream": True}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 60},
}
WHOLE = {"id": "x", "choices": [{"message": {"content": "Hi"}}], "usage": USAGE}


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def word(text: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}}])


DEEP = b'{"usage": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
DONE = b"data: [DONE]\n\n"
COUNTED = event(choices=[], usage=USAGE)


@attrs.define
class Far:
    """A server that answers each connection with given bytes.

    A piece that is None: the connection stays open, until the client has closed it. Unless it
    `lists` its models, it has no such route.
    """

    url: str
    answers: list[bytes | None]
    lists: bool = False
    requests: list[tuple[str, dict[str, str], Any]] = attrs.field(factory=list)
    n_open: int = 0
    n_closed: int = 0

    async def serve(self, stream: trio.SocketStream) -> None:
        async with stream:
            data = b""
            while b"\r\n\r\n" not in data:
                data += await stream.receive_some()
            head, _, body = data.partition(b"\r\n\r\n")
            first, *lines = head.decode().split("\r\n")
            headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
            if first.startswith("GET") and not self.lists:
                await stream.send_all(http_answer(b"", "404 Not Found"))
                return
            while len(body) < int(headers.get("content-length", 0)):
                body += await stream.receive_some()
            self.requests.append((first, headers, json.loads(body) if body else None))
            self.n_open += 1
            try:
                for answer in self.answers:
                    if answer is not None:
                        await stream.send_all(answer)
                    elif await stream.receive_some() == b"":
                        self.n_closed += 1
            except trio.BrokenResourceError:
                self.n_closed += 1
            finally:
                self.n_open -= 1


@asynccontextmanager
async def far(*answers: bytes | None, lists: bool = False) -> AsyncIterator[Far]:
    async with trio.open_nursery() as nursery:
        server = Far("", list(answers), lists)
        serve = partial(trio.serve_tcp, server.serve, 0, host="127.0.0.1")
        (listener,) = await nursery.start(serve)
        server.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}/v1"
        yield server
        nursery.cancel_scope.cancel()


def upstream(url: str, **fields: Any) -> Upstream:
    given: dict[str, Any] = {"models": (("far", "org/far-1"),), "key": SECRET, **fields}
    return Upstream(name="there", url=url, **given)


@asynccontextmanager
async def beside(
    *answers: bytes | None, fields: Mapping[str, Any] | None = None, **config: Any
) -> AsyncIterator[tuple[Routed, Far]]:
    """A router with a model "near", and "far" at an upstream that answers so."""
    lists = fields is not None and fields.get("models") == ()
    async with far(*answers, lists=lists) as server:
        there = {"there": upstream(server.url, **(fields or {}))}
        async with routed({"near": answering("Here")}, upstreams=there, **config) as router:
            yield router, server


async def ask(
    router: Routed, body: Mapping[str, Any], path: str = "/v1/chat/completions", **more: Any
) -> httpx.Response:
    with patiently():
        return await router.client.post(path, json=body, **more)


async def test_a_chat_is_passed_on_as_it_is() -> None:
    async with beside(json_answer(WHOLE)) as (router, server):
        body = {**CHAT, "model": "far", "odd": [1.5, None], "timeout": 30}
        answer = await ask(router, body, headers={"Authorization": "Bearer mine", "X-Own": "1"})
        assert (answer.status_code, answer.json()) == (200, WHOLE)
        ((first, headers, sent),) = server.requests
        assert first == "POST /v1/chat/completions HTTP/1.1"
        assert sent == {**CHAT, "model": "org/far-1", "odd": [1.5, None]}
        assert headers["authorization"] == f"Bearer {SECRET}"
        assert "x-own" not in headers
        near = await ask(router, {**CHAT, "model": "near"})
        assert near.json()["choices"][0]["message"]["content"] == "Here"


@pytest.mark.parametrize("wants_usage", [False, True])
async def test_a_stream_is_passed_on_in_whole_events(wants_usage: bool) -> None:
    text = b": waiting\n\n" + word("a") + word("b") + COUNTED + DONE
    pieces = [HEAD, *(text[i : i + 7] for i in range(0, len(text), 7))]
    body = {**STREAM, **({"stream_options": {"include_usage": True}} if wants_usage else {})}
    async with beside(*pieces) as (router, server):
        answer = await ask(router, body)
        assert answer.headers["content-type"] == "text/event-stream"
        given = word("a") + word("b") + (COUNTED if wants_usage else b"") + DONE
        assert answer.content == given
        assert server.requests[0][2]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("path", "body", "answer", "amounts"),
    [
        ("/v1/chat/completions", CHAT, json_answer(WHOLE), (100, 60, 7)),
        ("/v1/chat/completions", STREAM, HEAD + word("a") + COUNTED + DONE, (100, 60, 7)),
        (
            "/v1/messages",
            STREAM,
            HEAD
            + event(type="message_start", message={"usage": {"input_tokens": 5,
                    "cache_read_input_tokens": 20, "output_tokens": 1}})
            + event(type="message_delta", usage={"output_tokens": 9})
            + event(type="message_stop"),
            (25, 20, 9),
        ),
        (
            "/v1/responses",
            {"input": "Hi", "stream": True},
            HEAD + event(type="response.completed", response={"usage": {"input_tokens": 8,
                "output_tokens": 3, "input_tokens_details": {"cached_tokens": 2}}}),
            (8, 2, 3),
        ),
        ("/v1/embeddings", {"input": "a"}, json_answer({"usage": {"prompt_tokens": 4}}), (4, 0, 0)),
    ],
)  # fmt: skip
async def test_usage_of_an_upstream_counts(
    path: str, body: dict[str, Any], answer: bytes, amounts: tuple[int, ...], tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    digest = digest_of("ann-key").hex()
    keys.write_text(f'[ann]\nhash = "sha256:{digest}"\ntokens-per-day = 1\n')
    apis = {"apis": ("chat", "embeddings", "messages", "responses")}
    async with beside(answer, fields=apis, keys_file=str(keys)) as (router, server):
        shown = {"Authorization": "Bearer ann-key"}
        assert (await ask(router, {**body, "model": "far"}, path, headers=shown)).status_code == 200
        await until(lambda: bool(router.service.usage.totals))
        used = router.service.usage.totals["ann", "far"]
        assert (used.input_tokens, used.cached_input_tokens, used.output_tokens) == amounts
        again = await ask(router, {**body, "model": "far"}, path, headers=shown)
        assert (again.status_code, len(server.requests)) == (429, 1)
        assert "ann-key" not in json.dumps([one[1] for one in server.requests])


async def test_an_answer_that_is_left_counts_by_an_estimate() -> None:
    async with beside(HEAD, *[word("a")] * 5, None) as (router, server):
        async with connected(router.url) as stream:
            await stream.send_all(post("/v1/chat/completions", json.dumps(STREAM).encode()))
            read = b""
            while read.count(b"content") < 5:
                read += await stream.receive_some()
        await until(lambda: bool(router.service.usage.totals))
        used = router.service.usage.totals["", "far"]
        assert (used.input_tokens > 5, used.output_tokens) == (True, 5)
        await until(lambda: server.n_closed == 1)


@pytest.mark.parametrize("n", [-5, 10**40, 10**400, 1.5])
async def test_an_impossible_usage_is_estimated(n: float) -> None:
    counted = {"usage": {"prompt_tokens": n, "completion_tokens": n}}
    async with beside(json_answer(counted), metrics_endpoint=True) as (router, _):
        assert (await ask(router, {**CHAT, "model": "far"})).status_code == 200
        await until(lambda: bool(router.service.usage.totals))
        assert 0 < router.service.usage.totals["", "far"].input_tokens < 100
        assert (await router.client.get("/metrics")).status_code == 200


@pytest.mark.parametrize("text", [b"x" * 195, b'{"error": {"message": "' + b"x" * 1995])
async def test_no_part_of_the_key_is_shown_where_a_message_is_cut(text: bytes) -> None:
    answer = http_answer(text + SECRET.encode() + b'"}}', "400 Bad Request")
    async with beside(answer) as (router, _):
        refused = await ask(router, {**CHAT, "model": "far"})
        assert refused.json()["error"]["message"].endswith("x***")


async def test_the_rights_and_limits_of_a_key_hold(tmp_path: Path) -> None:
    text = "".join(
        f'[{name}]\nhash = "sha256:{digest_of(name).hex()}"\n{rest}\n'
        for name, rest in (("ann", 'models = ["near"]'), ("bob", "requests-per-minute = 1"))
    )
    (tmp_path / "keys.toml").write_text(text)
    async with beside(json_answer(WHOLE), keys_file=str(tmp_path / "keys.toml")) as (router, _):
        body = {**CHAT, "model": "far"}
        ann, bob = ({"Authorization": f"Bearer {name}"} for name in ("ann", "bob"))
        assert (await ask(router, body, headers=ann)).status_code == 403
        listed = (await router.client.get("/v1/models", headers=ann)).json()["data"]
        assert [one["id"] for one in listed] == ["near"]
        first = await ask(router, body, headers=bob)
        assert (first.status_code, first.headers["x-ratelimit-remaining-requests"]) == (200, "0")
        assert (await ask(router, body, headers=bob)).status_code == 429


@pytest.mark.parametrize(
    ("status", "more", "wanted", "said"),
    [
        ("401 Unauthorized", (), 502, "refuses its API key"),
        ("403 Forbidden", (), 502, "says: *** is bad"),
        ("429 Too Many Requests", ("Retry-After: 17",), 429, "says: *** is bad"),
        ("400 Bad Request", (), 400, "says: *** is bad"),
        ("404 Not Found", (), 404, "says: *** is bad"),
        ("500 Oops", (), 502, "says: *** is bad"),
        ("503 Busy", ("Retry-After: 5",), 503, "says: *** is bad"),
        ("302 Found", ("Location: http://127.0.0.1:1/",), 502, "says: *** is bad"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_refusals_of_an_upstream(
    status: str, more: tuple[str, ...], wanted: int, said: str, path: str
) -> None:
    text = json.dumps({"error": {"message": f"{SECRET} is bad", "param": "model"}}).encode()
    answer = http_answer(text, status, *more)
    async with beside(answer, fields={"apis": ("chat", "messages")}) as (router, server):
        for stream in (False, True):
            refused = await ask(router, {**STREAM, "stream": stream}, path)
            assert refused.status_code == wanted
            message = refused.json()["error"]["message"]
            assert message.startswith("The upstream 'there'") and said in message
            assert SECRET not in refused.text
            after = [one.split(": ")[1] for one in more if one.startswith("Retry")]
            assert refused.headers.get_list("retry-after") == after
        assert len(server.requests) == 2  # a redirect is not followed


BROKEN: Mapping[str, tuple[list[bytes | None], str]] = {
    "dies": ([HEAD, word("a")], "too early"),
    "garbage": ([HEAD, word("a"), b"data: {nonsense\n\n"], "no JSON"),
    "deep": ([HEAD, word("a"), b"data: " + DEEP + b"\n\n"], "nested too deeply"),
    "says an error": ([HEAD, word("a"), event(error={"message": SECRET})], "says: ***"),
    "long event": ([HEAD, word("a"), b"data: " + b"x" * 2000], "too long"),
    "endless lines": ([HEAD, word("a"), b"data: 1\n" * 2000], "too long"),
    "cut": ([HEAD.replace(b"\r\n\r\n", b"\r\nContent-Length: 999\r\n\r\n"), word("a")], "is lost"),
    "silent": ([HEAD, word("a"), None], "silent"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_stream_that_breaks(name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_MAX_EVENT", 2 * len(DEEP) if name == "deep" else 1000)
    pieces, said = BROKEN[name]
    fields = {"apis": ("chat", "messages"), "timeout": 0.2}
    async with beside(*pieces, fields=fields) as (router, _):
        answer = await ask(router, STREAM, path)
        assert answer.content.startswith(word("a"))
        rest = answer.content.removeprefix(word("a")).decode()
        last = json.loads(rest.rpartition("data: ")[2])
        assert said in last["error"]["message"]
        assert SECRET not in answer.text


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (http_answer(b"<html>", "200 OK", "Content-Type: application/json"), "answers no JSON"),
        (http_answer(b"{}", "200 OK", "Content-Encoding: gzip"), "compresses"),
        (http_answer(DEEP), "nested too deeply"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{" + b" " * 5000, "too long"),
        (b"nonsense\r\n\r\n", "is lost"),
        (b"HTTP/1.1 200 OK\r\n", "is lost"),
    ],
)
async def test_an_answer_that_is_none(
    answer: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_MAX_ANSWER", len(DEEP) if DEEP in answer else 1000)
    async with beside(answer) as (router, _):
        refused = await ask(router, {**CHAT, "model": "far"})
        assert refused.status_code in (502, 503)
        assert said in refused.json()["error"]["message"]


async def test_an_upstream_that_is_down_is_named_and_its_neighbours_answer() -> None:
    async with beside() as (router, server):
        async with far() as gone:
            pass
        service = router.service
        down = attrs.evolve(upstream(gone.url, models=(("lost", "lost"),)), name="gone")
        catalog = router.fleet.catalog
        catalog.upstreams = {**catalog.upstreams, "gone": down}
        assert (await router.client.get("/models?reload=1")).status_code == 200
        server.answers = [json_answer(WHOLE)]
        refused = await ask(router, {**CHAT, "model": "lost"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            503,
            "upstream_unavailable",
        )
        assert "'gone'" in refused.json()["error"]["message"]
        for model in ("near", "far"):
            assert (await ask(router, {**CHAT, "model": model})).status_code == 200
        listed = {one["id"]: one for one in (await router.client.get("/models")).json()["data"]}
        values = {name: listed[name]["status"]["value"] for name in ("near", "far", "lost")}
        assert values == {"near": "loaded", "far": "loaded", "lost": "unloaded"}
        assert "'gone'" in listed["lost"]["status"]["message"]
        assert listed["far"]["source"] == "upstream"
        assert SECRET not in json.dumps(listed)
        # Upstreams that are no longer wanted: one model is left, which answers to any name.
        catalog.upstreams = {}
        await router.client.get("/models?reload=1")
        assert (await ask(router, {**CHAT, "model": "far"})).json()["model"] == "scripted"
        await until(lambda: service.n_lent.value == 0)


async def test_an_upstream_that_cannot_be_looked_at_ends_nothing() -> None:
    odd = upstream(f"http://{'x' * 64}.example/v1")
    async with routed({"near": answering("Here")}, upstreams={"there": odd}) as router:
        assert (await ask(router, {**CHAT, "model": "near"})).status_code == 200
        assert (await ask(router, {**CHAT, "model": "far"})).status_code == 500


async def test_a_changed_upstream_answers_while_it_is_looked_at() -> None:
    async with beside(json_answer(WHOLE)) as (router, server), far(None, lists=True) as silent:
        catalog = router.fleet.catalog
        quiet = attrs.evolve(upstream(silent.url), name="quiet")
        catalog.upstreams = {"there": upstream(server.url, prefix="new-"), "quiet": quiet}
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(router.service.upstreams.reload)
            await until(lambda: silent.n_open == 1)
            assert (await router.client.get("/v1/models")).status_code == 200
            assert (await ask(router, {**CHAT, "model": "far"})).status_code == 200
            nursery.cancel_scope.cancel()
        await router.service.upstreams.reload()
        assert {"near", "far", "new-far"} == catalog.entries.keys()


async def test_listed_models_of_an_upstream_are_offered() -> None:
    found = [{"id": "a", "meta": 1}, {"id": "near"}, {"id": "b", "max_model_len": 4096}]
    listed = json_answer({"data": found})
    fields = {"models": (), "prefix": ""}
    async with beside(listed, fields=fields, metrics_endpoint=True) as (router, server):
        names = [one["id"] for one in (await router.client.get("/v1/models")).json()["data"]]
        assert sorted(names) == ["a", "b", "near"]
        assert server.requests[0][0] == "GET /v1/models HTTP/1.1"
        described = (await router.client.get("/v1/models/b")).json()
        assert (described["context_length"], described["source"]) == (4096, "upstream")
        props = (await router.client.get("/props?model=b")).json()
        assert props["default_generation_settings"]["n_ctx"] == 4096
        assert (props["model_alias"], props["endpoint_tools"]) == ("b", False)
        near = await ask(router, {**CHAT, "model": "near"})
        assert near.json()["choices"][0]["message"]["content"] == "Here"
        server.answers = [json_answer(WHOLE)]
        assert (await ask(router, {**CHAT, "model": "a"})).json() == WHOLE
        text = (await router.client.get("/metrics")).text
        assert 'trioserve:router_requests_total{model="a",status="200"} 1.0' in text
        assert 'trioserve:usage_output_tokens_total{key="",model="a"} 7.0' in text
        assert SECRET not in text


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/api/chat", CHAT, 501),
        ("POST", "/v1/messages", CHAT, 501),
        ("POST", "/completion", {"prompt": "a"}, 501),
        ("POST", "/tokenize", {"content": "a"}, 501),
        ("POST", "/models/load", {}, 400),
        ("POST", "/models/unload", {}, 400),
        ("POST", "/v1/chat/completions", {**CHAT, "trioserve_run_tools": True}, 400),
        ("POST", "/v1/responses", {"input": "a", "previous_response_id": "resp_1"}, 400),
    ],
)
async def test_routes_only_for_local_models(
    method: str, path: str, body: dict[str, Any], status: int
) -> None:
    async with beside(fields={"apis": ("chat", "responses")}) as (router, server):
        answer = await router.client.request(method, path, json={**body, "model": "far"})
        assert answer.status_code == status
        assert server.requests == []


async def test_answers_of_responses_are_not_stored_there() -> None:
    async with beside(json_answer({"id": "resp_1"}), fields={"apis": ("responses",)}) as (
        router,
        server,
    ):
        await ask(router, {"input": "a", "model": "far", "store": True}, "/v1/responses")
        assert server.requests[0][2] == {"input": "a", "model": "org/far-1", "store": False}


async def test_a_hundred_clients_leave() -> None:
    async with beside(HEAD, word("a"), None, fields={"max_requests": 5}) as (router, server):
        body = post("/v1/chat/completions", json.dumps(STREAM).encode())
        async with trio.open_nursery() as nursery:

            async def come_and_go() -> None:
                async with connected(router.url) as stream:
                    await stream.send_all(body)
                    await stream.receive_some()

            for _ in range(100):
                nursery.start_soon(come_and_go)
        with patiently():
            await router.service.n_lent.wait_value(0)
        await until(lambda: server.n_open == 0)
        assert server.n_closed == len(server.requests)
        server.answers = [json_answer(WHOLE)]
        assert (await ask(router, {**CHAT, "model": "far"})).status_code == 200


async def test_a_client_that_does_not_read_holds_no_connection() -> None:
    many = word("x" * 10_000) * 20
    pieces = [HEAD, *[many] * 100, None]
    async with (
        beside(*pieces, stall_timeout=0.2) as (router, server),
        connected(router.url) as stream,
    ):
        await stream.send_all(post("/v1/chat/completions", json.dumps(STREAM).encode()))
        await until(lambda: server.n_closed == 1)
        entry: Any = router.fleet.catalog.entries["far"]
        await until(lambda: router.service.upstreams.state(entry).n_requests == 0)


async def test_the_deadline_of_a_request_holds() -> None:
    async with beside(None) as (router, server):
        answer = await ask(router, {**CHAT, "model": "far", "timeout": 0.1})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        await until(lambda: server.n_closed == 1)


async def test_a_stream_that_waits_gets_pings() -> None:
    async with beside(None, sse_ping_interval=0.1) as (router, _):
        body = post("/v1/chat/completions", json.dumps(STREAM).encode())
        async with connected(router.url) as stream:
            await stream.send_all(body)
            read = b""
            with patiently():
                while read.count(b":\n\n") < 2:
                    read += await stream.receive_some()


async def test_draining_waits_for_what_runs() -> None:
    async with beside(HEAD, word("a"), None, drain_timeout=0.3) as (router, server):
        drained = trio.Event()

        async def drain() -> None:
            await router.service.drain()
            drained.set()

        async with connected(router.url) as stream, trio.open_nursery() as nursery:
            await stream.send_all(post("/v1/chat/completions", json.dumps(STREAM).encode()))
            await until(lambda: server.n_open == 1)
            began = trio.current_time()
            nursery.start_soon(drain)
            await stream.receive_some()
            with patiently():
                await stream.aclose()
                await drained.wait()
            assert trio.current_time() - began < 3


async def test_a_stream_is_resumed() -> None:
    async with beside(HEAD, word("a"), word("b"), COUNTED, DONE) as (router, server):
        answer = await ask(router, STREAM, headers={"X-Conversation-Id": "mine"})
        lines = [line for line in answer.content.splitlines() if not line.startswith(b"id:")]
        assert lines == (word("a") + word("b") + DONE).splitlines()
        again = await router.client.get("/v1/stream", params={"conv_id": "mine"})
        assert again.content == answer.content
        assert len(server.requests) == 1


async def test_a_batch_is_answered() -> None:
    async with beside(json_answer(WHOLE)) as (router, _):
        path = "/v1/chat/completions"
        asked = {"custom_id": "1", "method": "POST", "url": path, "body": {**CHAT, "model": "far"}}
        file = {"file": ("requests.jsonl", json.dumps(asked).encode())}
        sent = await router.client.post("/v1/files", files=file, data={"purpose": "batch"})
        body = {"input_file_id": sent.json()["id"], "endpoint": path, "completion_window": "24h"}
        made = await router.client.post("/v1/batches", json=body)
        found: dict[str, Any] = {}

        async def is_done() -> bool:
            found.update((await router.client.get(f"/v1/batches/{made.json()['id']}")).json())
            return bool(found["status"] == "completed")

        await until(is_done)
        written = await router.client.get(f"/v1/files/{found['output_file_id']}/content")
        assert json.loads(written.text)["response"]["body"] == WHOLE
