"""MCP servers at addresses: the SDK's own, and those that misbehave."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import ToolAnnotations
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from tests.support.http_server import serving
from tests.support.mcp_servers import call, opened
from tests.support.waiting import until
from trioserve.errors import ToolServerError
from trioserve.tools.mcp import http
from trioserve.tools.mcp.entries import HttpEntry
from trioserve.tools.mcp.session import McpSession, with_session

#: The SDK's client leaves its streams to the garbage collector, which closes them.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Async generator 'httpcore2:ResourceWarning",
    "ignore:Async generator 'httpx2:ResourceWarning",
)


class Confirmation(BaseModel):
    """A question of a server."""

    sure: bool = True


class Server:
    """A server with a few tools, and what has become of their calls."""

    def __init__(self) -> None:
        self.mcp = MCPServer("remote")
        self.n_cancelled = 0
        self.n_running = 0
        self.started = trio.Event()
        reads = ToolAnnotations(read_only_hint=True, title="Echo")
        self.mcp.tool(annotations=reads)(self.echo)
        self.mcp.tool()(self.sleep)
        self.mcp.tool()(self.authorization)
        self.mcp.tool()(self.question)

    async def echo(self, text: str) -> str:
        return text

    async def sleep(self, seconds: float) -> str:
        self.n_running += 1
        self.started.set()
        try:
            await trio.sleep(seconds)
        except trio.Cancelled:
            self.n_cancelled += 1
            raise
        finally:
            self.n_running -= 1
        return "slept"

    async def authorization(self, context: Context) -> str:
        assert context.request_context.request is not None
        return str(context.request_context.request.headers.get("authorization"))

    async def question(self, context: Context) -> str:
        capabilities = context.session.client_params.capabilities
        form = await context.elicit("Really?", Confirmation)
        page = await context.elicit_url("Log in", "https://example.org", "1")
        return f"{capabilities.elicitation is not None}, {form.action}, {page.action}"


@asynccontextmanager
async def remote(server: Server, **options: Any) -> AsyncIterator[str]:
    async with serving(server.mcp.streamable_http_app(**options)) as url:
        yield f"{url}/mcp"


@pytest.mark.parametrize("options", [{}, {"json_response": True}, {"stateless_http": True}])
async def test_tools_at_an_address(options: dict[str, bool]) -> None:
    async with remote(Server(), **options) as url:
        entry = {"url": url, "headers": {"Authorization": "Bearer token"}}
        async with opened(a=entry) as servers:
            info = servers.tools["a_echo"].info
            assert (info.display_name, info.writes) == ("Echo", False)
            assert servers.tools["a_sleep"].info.writes
            assert (await call(servers, "a_echo", text="é\ud800")).text == "é\ufffd"
            assert (await call(servers, "a_authorization")).text == "Bearer token"
            assert (await call(servers, "a_echo")).is_error


async def test_questions_are_declined_also_those_with_defaults() -> None:
    async with remote(Server()) as url, opened(a={"url": url}) as servers:
        assert (await call(servers, "a_question")).text == "True, decline, decline"


async def test_older_servers_with_two_channels() -> None:
    async with (
        serving(Server().mcp.sse_app()) as url,
        opened(a={"url": f"{url}/sse", "type": "sse"}) as servers,
    ):
        assert (await call(servers, "a_echo", text="x")).text == "x"


async def test_a_cancelled_call_is_cancelled_there() -> None:
    server = Server()
    async with remote(server) as url, opened(a={"url": url}) as servers:
        await call(servers, "a_echo", text="x")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(call, servers, "a_sleep", seconds=1000))
            await server.started.wait()
            start = trio.current_time()
            nursery.cancel_scope.cancel()
        assert trio.current_time() - start < 20
        await until(lambda: not server.n_running)
    assert server.n_cancelled == 1


@pytest.mark.system
async def test_a_call_does_not_wait_for_a_server_that_is_slow_to_hear_of_another() -> None:
    heard = trio.Event()

    async def answer(request: Any, send: Send) -> None:
        if request["method"] == "tools/call" and "sleep" in request["params"]["arguments"]:
            await trio.sleep_forever()
        if request["method"] == "notifications/cancelled":
            heard.set()
            await trio.sleep_forever()
        content = [{"type": "text", "text": "x"}]
        await respond(send, {"jsonrpc": "2.0", "id": request["id"], "result": {"content": content}})

    async with serving(app_of(answer)) as url, opened(a={"url": url}) as servers:
        await call(servers, "a_tool")
        start = trio.current_time()
        with trio.move_on_after(0.1):
            await call(servers, "a_tool", sleep=1)
        await heard.wait()
        assert (await call(servers, "a_tool")).text == "x"
        assert trio.current_time() - start < 20


async def _serve(
    app: Any, bind: str, stop: trio.Event, stopped: trio.Event, task_status: trio.TaskStatus[str]
) -> None:
    async with serving(app, bind) as url:
        task_status.started(url)
        await stop.wait()
    stopped.set()


@pytest.mark.system
async def test_a_server_that_comes_back_is_used_again() -> None:
    stop, stopped, stop_again = trio.Event(), trio.Event(), trio.Event()
    async with trio.open_nursery() as nursery:
        app = Server().mcp.streamable_http_app()
        url = await nursery.start(_serve, app, "127.0.0.1:0", stop, stopped)
        async with opened(a={"url": f"{url}/mcp"}) as servers:
            await call(servers, "a_echo", text="x")
            stop.set()
            await stopped.wait()
            answer = await call(servers, "a_sleep", seconds=0)
            assert "'a' has failed: it cannot be reached" in answer.answer["error"]
            # The new one does not know the session that the client has.
            app = Server().mcp.streamable_http_app()
            bind = url.removeprefix("http://")
            await nursery.start(_serve, app, bind, stop_again, trio.Event())
            assert (await call(servers, "a_sleep", seconds=0)).text == "slept"
            stop_again.set()


def app_of(answer: Callable[[Any, Send], Awaitable[None]]) -> Any:
    """A server that introduces itself, and then answers as a function does."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"  # there is nothing to start
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        request = json.loads(body) if body else {"method": scope["method"]}
        if request["method"] == "initialize":
            info = {"name": "odd", "version": "1"}
            result = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": info}
            await respond(send, {"jsonrpc": "2.0", "id": request["id"], "result": result})
        elif request["method"] == "GET" and b"last-event-id" in dict(scope["headers"]):
            await answer(request, send)
        elif "id" not in request and request["method"] != "notifications/cancelled":
            await respond(send, None, status=405 if request["method"] == "GET" else 202)
        elif request["method"] == "tools/list":
            tool = {"name": "tool", "inputSchema": {"type": "object"}}
            await respond(
                send, {"jsonrpc": "2.0", "id": request["id"], "result": {"tools": [tool]}}
            )
        else:
            await answer(request, send)

    return app


async def respond(
    send: Send, body: Any, status: int = 200, content_type: str = "application/json", **headers: str
) -> None:
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    pairs = [(b"content-type", content_type.encode())]
    pairs += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": data})


async def error_of(answer: Callable[[Any, Send], Awaitable[None]]) -> str:
    async with serving(app_of(answer)) as url, opened(a={"url": url}) as servers:
        return str((await call(servers, "a_tool")).answer["error"])


async def test_answers_that_are_none() -> None:
    assert "status 500 " in await error_of(lambda _, send: respond(send, b"oops", 500, "text/html"))
    assert "mcp login a" in await error_of(lambda _, send: respond(send, b"", 401, "text/plain"))
    assert "Failed to parse" in await error_of(lambda _, send: respond(send, b"{"))
    assert "text/html" in await error_of(lambda _, send: respond(send, b"<p>", 200, "text/html"))
    compressed = partial(respond, body=b"no gzip", content_encoding="gzip")
    assert "is compressed by gzip" in await error_of(lambda _, send: compressed(send))
    assert "without a response" in await error_of(
        lambda _, send: respond(send, b": nothing\n\n", 200, "text/event-stream")
    )


async def test_an_answer_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_MESSAGE", 2**20)

    async def endless(request: Any, send: Send) -> None:
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(160):
            await send({"type": "http.response.body", "body": b" " * 2**16, "more_body": True})

    assert "its answer has more than 1,048,576 bytes" in await error_of(endless)


MANY = b"[" + b"[]," * 200_000 + b"[]]"


async def test_an_answer_of_too_many_values() -> None:
    for before, after, content_type in (
        (b"", b"", "application/json"),
        (b": a comment\r\n\r\ndata: ", b"\n\n", "text/event-stream"),
        (b": a comment\r\rdata: ", b"\n\r\n", "text/event-stream"),
    ):
        body = before + b'{"jsonrpc": "2.0", "id": 3, "result": %b}' % MANY + after
        answer = partial(respond, body=body, content_type=content_type)
        error = await error_of(lambda _, send, answer=answer: answer(send))
        assert "its answer has more than 100,000 values" in error


async def test_events_without_an_end_share_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_MESSAGE", 2**20)
    monkeypatch.setattr(http, "_MAX_INCOMPLETE", 2**21)
    n_calls, all_called = 0, trio.Event()
    problems = []

    async def endless(request: Any, send: Send) -> None:
        nonlocal n_calls
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x" * 900_000, "more_body": True})
        n_calls += 1
        if n_calls == 3:
            all_called.set()
        await all_called.wait()
        await trio.sleep_forever()

    async def fail() -> None:
        problems.append((await call(servers, "a_tool")).answer["error"])
        nursery.cancel_scope.cancel()

    async with (
        serving(app_of(endless)) as url,
        opened(a={"url": url}) as servers,
        trio.open_nursery() as nursery,
    ):
        for _ in range(3):
            nursery.start_soon(fail)
    assert "its answers together have more than 2,097,152 bytes" in problems[0]


async def test_the_body_of_a_redirection_is_not_read() -> None:
    n_redirected = 0

    async def redirect(request: Any, send: Send) -> None:
        nonlocal n_redirected
        if n_redirected:
            result = {"content": [{"type": "text", "text": "here"}]}
            await respond(send, {"jsonrpc": "2.0", "id": request["id"], "result": result})
            return
        n_redirected += 1
        headers = [(b"location", b"/elsewhere")]
        await send({"type": "http.response.start", "status": 307, "headers": headers})
        await send({"type": "http.response.body", "body": b"x" * 2**16, "more_body": True})
        await trio.sleep_forever()

    async with serving(app_of(redirect)) as url, opened(a={"url": url}) as servers:
        assert (await call(servers, "a_tool")).text == "here"


async def test_streams_are_not_begun_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_STREAMS_PER_SECOND", 1.0)
    n_resumed = 0

    async def ends(request: Any, send: Send) -> None:
        nonlocal n_resumed
        n_resumed += request["method"] == "GET"
        await respond(send, b"id: 1\nretry: 0\ndata:\n\n", 200, "text/event-stream")

    async with serving(app_of(ends)) as url, opened(a={"url": url, "timeout_ms": 500}) as servers:
        assert "no answer after" in (await call(servers, "a_tool")).answer["error"]
    assert n_resumed <= 3


async def test_an_answer_after_the_end_of_a_session_is_no_unforeseen_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked, ending = trio.Event(), trio.Event()

    async def answers_late(request: Any, send: Send) -> None:
        asked.set()
        await ending.wait()
        await respond(send, {"jsonrpc": "2.0", "id": request["id"], "result": {}})

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def in_session(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((b"mcp-session-id", b"1"))
            await send(message)

        if scope["method"] == "DELETE":
            ending.set()
            await trio.sleep_forever()
        await app_of(answers_late)(scope, receive, in_session)

    async with serving(app) as url, trio.open_nursery() as nursery:

        async def use(session: McpSession) -> None:
            nursery.start_soon(session.is_responsive)
            await asked.wait()

        with pytest.raises(ToolServerError, match="when its session had ended"):
            await with_session(HttpEntry(name="a", url=url), use)
    assert "foreseen" not in capsys.readouterr().err


async def test_nobody_listens() -> None:
    async with opened(a={"url": "http://127.0.0.1:9/mcp"}) as servers:
        assert not servers.tools
