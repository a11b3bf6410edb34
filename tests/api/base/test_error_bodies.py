"""Every error that a client can meet, provoked over HTTP, with the whole of its body."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import attrs
import httpx
import pytest
import trio

from tests.support.clients import busy, client_and_service, client_of
from tests.support.http_server import connected, post, read_response, serving, serving_script
from tests.support.media_files import image_file, wav_file
from tests.support.scripted_embedder import ScriptedEmbedder
from tests.support.scripts import CHAT
from trioserve.api.base.errors import InternalError
from trioserve.api.llama import admin
from trioserve.api.sessions.ring import OffsetError
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.errors import (
    AbandonedError,
    AmbiguousModelError,
    AuthenticationError,
    BackendMismatchError,
    BridgeError,
    ConfigError,
    ContextLengthExceededError,
    DeadlineExceededError,
    DecodeError,
    DecodeInterruptedError,
    DiskFullError,
    EncodeError,
    EncodeInterruptedError,
    EngineError,
    GatedModelError,
    HashMismatchError,
    HubError,
    HubNotFoundError,
    HubUnavailableError,
    InputTooLongError,
    InvalidMediaError,
    InvalidRequestError,
    KVCacheFullError,
    MemoryFullError,
    MethodNotAllowedError,
    ModelFailedError,
    ModelLoadError,
    ModelLoadingError,
    ModelNotLoadedError,
    ModelProcessError,
    NotFoundError,
    NotSupportedError,
    OutputError,
    PayloadTooLargeError,
    PermissionDeniedError,
    ProxyError,
    ProxyTimeoutError,
    QueueFullError,
    RateLimitError,
    RequestEndedError,
    ServerClosingError,
    ServerSleepingError,
    StalledReaderError,
    StreamStoppedError,
    TemplateError,
    ToolCallDecidedError,
    ToolError,
    ToolFileError,
    ToolRuntimeError,
    ToolServerError,
    ToolTimeoutError,
    TooManyRequestsError,
    TranscriberError,
    TrioServeError,
    UnavailableError,
    UnknownModelError,
    UnknownQuantError,
    UnknownToolCallError,
    UnknownToolError,
    UnsupportedFieldError,
)
from trioserve.router.wire import NotTakenError
from trioserve.server.transcription import TranscriptStream
from trioserve.testing import ScriptedBackend, ScriptedProjector

#: Errors that no client sees as such, and why.
NEVER_SENT = {
    **dict.fromkeys((UnknownToolCallError, ToolCallDecidedError), "no route approves of calls yet"),
    **dict.fromkeys(
        (ToolRuntimeError, ToolError, ToolFileError, ToolTimeoutError, ToolServerError),
        "needs a tool that fails; the route has tests of its own",
    ),
    ProxyTimeoutError: "takes ten minutes; the route has tests of its own",
    ConfigError: "ends the command before there is a server",
    BridgeError: "ends the command before there is a server",
    RequestEndedError: "only its children are raised",
    AbandonedError: "its client has gone",
    StalledReaderError: "its client does not read; the connection is cut",
    DecodeInterruptedError: "the batch is decoded again, without the prompt that was cancelled",
    EncodeInterruptedError: "nobody waits for the image any more",
    TooManyRequestsError: "only its children are raised",
    ServerSleepingError: "the routes that need the model load it",
    UnknownModelError: "one model answers to all names, but for Ollama's form of /api/show",
    **dict.fromkeys(
        (
            AmbiguousModelError,
            ModelNotLoadedError,
            ModelFailedError,
            ModelProcessError,
            NotTakenError,
        ),
        "there is no choice of models; a router has tests of its own",
    ),
    **dict.fromkeys(
        (
            HubError,
            HubUnavailableError,
            HubNotFoundError,
            UnknownQuantError,
            GatedModelError,
            HashMismatchError,
            DiskFullError,
        ),
        "nothing is downloaded while it serves; a router has tests of its own",
    ),
}

#: The id of a request, and what a client reads of a failure that is none of its business.
ID = {"X-Request-Id": "mine"}
FAILED = "The inference engine failed. The log has more, under mine."

Provoke = Callable[[], Awaitable[httpx.Response]]


@attrs.frozen
class Case:
    """An error, how it comes about, and the status and body that it is answered with."""

    kind: type[TrioServeError]
    provoke: Provoke
    status: int
    error: dict[str, Any]


CASES: list[Case] = []


def answers(kind: type[TrioServeError], status: int, **error: Any) -> Callable[[Provoke], Provoke]:
    """Note what a function provokes. `code` in the body is the status unless it is given."""

    def note(provoke: Provoke) -> Provoke:
        CASES.append(Case(kind, provoke, status, {"code": status, "param": None, **error}))
        return provoke

    return note


def failing(error: Exception) -> ScriptedBackend:
    """A backend whose first decode fails."""

    def fail(_backend: ScriptedBackend) -> None:
        raise error

    backend = ScriptedBackend()
    backend.on_decode = fail
    return backend


def chat_with(image: str) -> dict[str, Any]:
    """A chat with an image."""
    part = {"type": "image_url", "image_url": {"url": image}}
    return {"messages": [{"role": "user", "content": [part]}]}


async def failed(error: Exception) -> httpx.Response:
    """Ask an engine that fails."""
    async with client_of(failing(error), on_engine_failure="stay") as client:
        return await client.post("/completion", json={"prompt": "a"}, headers=ID)


async def unloaded(error: TrioServeError) -> httpx.Response:
    """Ask an app whose model could not be loaded."""
    app = create_app(Config())
    app.extensions["trioserve"].failure = error
    answer = await app.test_client().get("/v1/models", headers=ID)
    body: Any = await answer.get_data()
    return httpx.Response(answer.status_code, content=body)


# -- the request is wrong


@answers(
    InvalidRequestError,
    400,
    message="'top_k' must be an integer.",
    type="invalid_request_error",
    param="top_k",
)
async def a_field_of_the_wrong_type() -> httpx.Response:
    async with client_of() as client:
        return await client.post("/completion", json={"prompt": "a", "top_k": "x"})


@answers(
    InvalidRequestError,
    400,
    message="'prompt' is required.",
    type="invalid_request_error",
    param="prompt",
)
async def a_field_that_is_missing() -> httpx.Response:
    async with client_of() as client:
        return await client.post("/completion", json={})


@answers(
    InvalidRequestError,
    400,
    message="'messages[0].content[0].type' is missing.",
    type="invalid_request_error",
    param="messages[0].content[0].type",
)
async def a_field_within_a_message() -> httpx.Response:
    async with client_of() as client:
        body = {"messages": [{"role": "user", "content": [{"text": "Hi"}]}]}
        return await client.post("/v1/chat/completions", json=body)


@answers(
    InvalidRequestError,
    400,
    message="The body is not valid JSON: Expecting value: line 1 column 1 (char 0).",
    type="invalid_request_error",
)
async def a_body_that_is_not_json() -> httpx.Response:
    async with client_of() as client:
        return await client.post("/completion", content=b"")


@answers(
    InvalidRequestError,
    408,
    message="The server closed the network connection because the browser didn't finish the "
    "request within the specified time.",
    type="invalid_request_error",
)
async def a_body_that_does_not_come() -> httpx.Response:
    async with serving_script(timeout=0.05) as (url, _), connected(url) as stream:
        await stream.send_all(post("/completion", b"{}")[:-1])
        return await read_response(stream)


@answers(
    ContextLengthExceededError,
    400,
    code="context_length_exceeded",
    message="The prompt has 64 tokens, which exceeds the available context size of 64 tokens, with "
    "room for at least one token of output.",
    type="exceed_context_size_error",
    param="prompt",
    n_prompt_tokens=64,
    n_ctx=64,
)
async def a_prompt_that_is_too_long() -> httpx.Response:
    backend = ScriptedBackend(n_slots=1, n_ctx=64, n_batch=64)
    async with client_of(backend) as client:
        return await client.post("/completion", json={"prompt": "a" * 64})


@answers(
    InputTooLongError,
    400,
    code="context_length_exceeded",
    message="A text of 65 tokens is too large: the context of the model holds 64.",
    type="exceed_context_size_error",
    param="input",
    n_prompt_tokens=65,
    n_ctx=64,
)
async def a_text_that_is_too_long_to_embed() -> httpx.Response:
    config = Config(embeddings=True)
    app = create_app(config, load=lambda config, progress=None: ScriptedEmbedder())  # type: ignore[arg-type,return-value]
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        await app.extensions["trioserve"].wait_loaded()
        return await client.post("/v1/embeddings", json={"input": "a" * 65})


@answers(
    UnsupportedFieldError,
    400,
    message="'n_cache_reuse' is not supported with this value; leave it out.",
    type="invalid_request_error",
    param="n_cache_reuse",
)
async def a_field_without_effect() -> httpx.Response:
    async with client_of() as client:
        return await client.post("/completion", json={"prompt": "a", "n_cache_reuse": 64})


@answers(
    TemplateError,
    400,
    message="The chat template refuses the messages: not like this",
    type="invalid_request_error",
    param="messages",
)
async def messages_that_the_template_refuses() -> httpx.Response:
    async with client_of(chat_template="{% if messages[0].content == 'Hi' %}"
                      "{{ raise_exception('not like this') }}{% endif %}") as client:  # fmt: skip
        return await client.post("/v1/chat/completions", json=CHAT)


@answers(
    NotSupportedError,
    501,
    message="This server does not support slots endpoint. Start it with `--slots`",
    type="not_supported_error",
)
async def a_route_that_is_switched_off() -> httpx.Response:
    async with client_of(slots_endpoint=False) as client:
        return await client.get("/slots")


@answers(
    AuthenticationError,
    401,
    message="Invalid API Key",
    type="authentication_error",
)
async def a_wrong_key() -> httpx.Response:
    async with client_of(api_keys=("key",)) as client:
        return await client.get("/v1/models", headers={"Authorization": "Bearer other"})


@answers(
    PermissionDeniedError,
    403,
    message="Pages of http://evil.com may not use this server. --cors-origins lets them.",
    type="permission_error",
)
async def a_page_of_another_site() -> httpx.Response:
    async with client_of() as client:
        return await client.get("/v1/models", headers={"Origin": "http://evil.com"})


@answers(
    NotFoundError,
    404,
    message="File Not Found",
    type="not_found_error",
)
async def a_route_that_is_not_there() -> httpx.Response:
    async with client_of() as client:
        return await client.get("/nothing")


@answers(
    MethodNotAllowedError,
    405,
    message="This route does not take this method.",
    type="invalid_request_error",
)
async def another_method() -> httpx.Response:
    async with client_of() as client:
        return await client.get("/completion")


@answers(
    OffsetError,
    400,
    message="No event of the stream has the id 1.",
    param="Last-Event-ID",
    type="invalid_request_error",
)
async def an_offset_that_a_stream_does_not_have() -> httpx.Response:
    async with client_of() as client:
        body = {"prompt": "a", "stream": True}
        await client.post("/completion", json=body, headers={"X-Conversation-Id": "a"})
        return await client.get("/v1/stream?conv_id=a", headers={"Last-Event-ID": "1"})


@answers(
    StreamStoppedError,
    409,
    code="stream_stopped",
    message="The stream was stopped.",
    type="invalid_request_error",
)
async def a_stream_that_is_stopped_before_it_begins() -> httpx.Response:
    async with busy() as where, trio.open_nursery() as nursery:

        async def stop() -> None:
            while where.service.streams.find("", "a") is None:
                await trio.sleep(0.001)
            await where.client.delete("/v1/stream?conv_id=a")

        nursery.start_soon(stop)
        headers = {"X-Conversation-Id": "a"}
        body = {**CHAT, "stream": True}
        return await where.client.post("/v1/chat/completions", json=body, headers=headers)


@answers(
    PayloadTooLargeError,
    413,
    message="The body is larger than max_body_size, which is 10 bytes.",
    type="invalid_request_error",
)
async def a_body_that_is_too_large() -> httpx.Response:
    async with client_of(max_body_size=10) as client:
        return await client.post("/completion", json={"prompt": "a" * 10})


# -- the server cannot take it


@answers(
    MemoryFullError,
    503,
    code="memory_full",
    message="Requests hold as much memory as they may, 1048576 bytes.",
    type="unavailable_error",
)
async def a_server_whose_memory_is_full() -> httpx.Response:
    async with client_and_service(max_request_memory=2**20) as (client, service):
        with service.memory.hold() as held:
            held.grow(2**20)
            answer = await client.post("/completion", json={"prompt": "a"})
        assert answer.headers["Retry-After"] == "1"
        return answer


@answers(
    QueueFullError,
    429,
    code="queue_full",
    message="0 requests are waiting, and the limit is 0.",
    type="rate_limit_error",
)
async def a_queue_that_is_full() -> httpx.Response:
    async with busy(max_queue=0) as (client, _):
        answer = await client.post("/completion", json={"prompt": "a"})
        assert int(answer.headers["Retry-After"]) >= 1
        return answer


@answers(
    RateLimitError,
    429,
    code="rate_limit_exceeded",
    message="Rate limit reached: 60 requests a minute. Try again in 1.0 seconds.",
    type="rate_limit_error",
)
async def a_minute_that_is_used_up() -> httpx.Response:
    async with client_and_service(rate_limit_requests=60) as (client, service):
        limits = service.server.parts.requests.rate_limits
        limits._clock = lambda: 0.0
        for _ in range(60):
            limits.admit("127.0.0.1")
        return await client.post("/completion", json={"prompt": "a"})


@answers(ModelLoadingError, 503, message="Loading model", type="unavailable_error")
async def a_model_that_loads() -> httpx.Response:
    gate = trio.Event()

    def load(_config: Config, *, progress: Any = None) -> ScriptedBackend:
        trio.from_thread.run(gate.wait)
        return ScriptedBackend()

    async with serving(create_app(Config(), load=load)) as url, httpx.AsyncClient() as client:
        answer = await client.get(f"{url}/v1/models")
        gate.set()
        return answer


@answers(ModelLoadError, 503, message="The file is cut short.", type="unavailable_error")
async def a_model_that_cannot_be_loaded() -> httpx.Response:
    return await unloaded(ModelLoadError("The file is cut short."))


@answers(
    BackendMismatchError,
    500,
    message="It lacks x. The log has more, under mine.",
    type="server_error",
)
async def a_library_that_cannot_be_used() -> httpx.Response:
    return await unloaded(BackendMismatchError("It lacks x."))


@answers(
    ServerClosingError,
    503,
    message="The server is shutting down",
    type="unavailable_error",
)
async def a_server_that_drains() -> httpx.Response:
    async with client_and_service() as (client, service):
        await service.drain()
        return await client.post("/completion", json={"prompt": "a"})


@answers(UnavailableError, 503, message="no slot available", type="unavailable_error")
async def no_slot_that_is_free() -> httpx.Response:
    async with busy() as (client, _):
        return await client.get("/slots?fail_on_no_slot=1")


# -- the request ends badly


@answers(
    DeadlineExceededError,
    504,
    code="deadline_exceeded",
    message="The request's deadline has passed.",
    type="timeout_error",
)
async def a_deadline_that_passes() -> httpx.Response:
    async with busy() as (client, _):
        return await client.post("/completion", json={"prompt": "a", "timeout": 0.05})


@answers(DecodeError, 500, message=FAILED, type="server_error")
async def a_decode_that_fails() -> httpx.Response:
    return await failed(DecodeError("llama_decode failed."))


@answers(
    KVCacheFullError,
    500,
    code="kv_cache_full",
    message="No room. The log has more, under mine.",
    type="server_error",
)
async def a_cache_that_is_full() -> httpx.Response:
    return await failed(KVCacheFullError("No room."))


@answers(
    OutputError,
    500,
    message="The grammar allows no token to follow. The log has more, under mine.",
    type="server_error",
)
async def an_output_that_cannot_be_made() -> httpx.Response:
    def script(prompt: str) -> str:
        raise OutputError("The grammar allows no token to follow.")

    async with client_of(ScriptedBackend(script)) as client:
        return await client.post("/completion", json={"prompt": "a"}, headers=ID)


@answers(EncodeError, 500, message=FAILED, type="server_error")
async def an_image_that_cannot_be_encoded() -> httpx.Response:
    projector = ScriptedProjector(fail_next=EncodeError("The image cannot be encoded."))
    async with client_of(ScriptedBackend(projector=projector)) as client:
        body = chat_with(b64encode(image_file()).decode())
        return await client.post("/v1/chat/completions", json=body, headers=ID)


@answers(
    InvalidMediaError,
    400,
    code="invalid_media",
    message="'messages[0].content[0].image_url' is not valid base64.",
    type="invalid_request_error",
    param="messages[0].content[0].image_url",
)
async def an_image_that_is_none() -> httpx.Response:
    async with client_of(ScriptedBackend(projector=ScriptedProjector())) as client:
        return await client.post("/v1/chat/completions", json=chat_with("?!"))


@answers(
    TranscriberError,
    500,
    message="The transcriber failed. The log has more, under mine.",
    type="server_error",
)
async def a_transcriber_that_fails() -> httpx.Response:
    async def read(stream: TranscriptStream) -> None:
        raise TranscriberError("The process has ended.")

    async with client_of(ScriptedBackend(projector=ScriptedProjector())) as client:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TranscriptStream, "read", read)
            return await client.post(
                "/v1/audio/transcriptions",
                files={"file": ("a.wav", wav_file())},
                data={"model": "m"},
                headers=ID,
            )


@answers(EngineError, 500, message=FAILED, type="server_error")
async def an_engine_that_breaks() -> httpx.Response:
    return await failed(RuntimeError("broken"))


@answers(
    InternalError,
    500,
    message="Internal error. The log has more, under mine.",
    type="server_error",
)
async def a_mistake_of_ours() -> httpx.Response:
    async with client_of() as client:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(admin, "_meta", lambda server: 1 / 0)
            return await client.get("/v1/models", headers=ID)


# -- tools, and other servers


@answers(
    UnknownToolError,
    404,
    code="tool_not_found",
    message='unknown tool "x"',
    type="invalid_request_error",
    param="tool",
)
async def a_tool_that_is_not_there() -> httpx.Response:
    async with client_of(tools=("read_file",)) as client:
        return await client.post("/tools", json={"tool": "x"})


@answers(
    ProxyError,
    502,
    code="proxy_failed",
    message="127.0.0.1:1 cannot be reached: all attempts to connect to 127.0.0.1:1 failed.",
    type="server_error",
)
async def a_server_that_a_page_cannot_reach() -> httpx.Response:
    hosts = ("127.0.0.1:1",)
    async with client_of(ui_mcp_proxy=True, ui_mcp_proxy_hosts=hosts) as client:
        return await client.get("/cors-proxy?url=http://127.0.0.1:1")


# -- the tests


#: Errors of these exist where they were imported, and are tested in tests/ray and tests/tools/mcp.
ELSEWHERE = ("trioserve.ray.", "trioserve.tools.mcp.")


def kinds(kind: type[TrioServeError]) -> Iterator[type[TrioServeError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__.startswith("trioserve.") and not child.__module__.startswith(ELSEWHERE):
            yield from kinds(child)


def test_every_error_has_a_case_or_is_never_sent() -> None:
    cases = {case.kind for case in CASES}
    assert cases | NEVER_SENT.keys() == set(kinds(TrioServeError)) - {TrioServeError}
    assert not cases & NEVER_SENT.keys()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.provoke.__name__)
async def test_an_error_has_this_body(case: Case) -> None:
    answer = await case.provoke()
    assert answer.status_code == case.status
    assert answer.json() == {"error": case.error}
    assert case.error["type"] == case.kind.type


@pytest.mark.parametrize(
    ("path", "body"), [("/completion", {"prompt": "a"}), ("/v1/chat/completions", CHAT)]
)
async def test_a_stream_that_has_begun_ends_with_the_error(path: str, body: Any) -> None:
    n_ticks = 0

    def fail_later(_backend: ScriptedBackend) -> None:
        nonlocal n_ticks
        n_ticks += 1
        if n_ticks > 3:
            raise DecodeError("llama_decode failed.")

    backend = ScriptedBackend(lambda prompt: "Hello there")
    backend.on_decode = fail_later
    async with client_of(backend) as client:
        answer = await client.post(path, json={**body, "stream": True}, headers=ID)
        assert answer.status_code == 200
        events = [line for line in answer.text.splitlines() if line]
        assert len(events) > 1
        error = {"code": 500, "message": FAILED, "type": "server_error"}
        name, _, data = events[-1].partition(": ")
        assert (name, json.loads(data)) == ("data", {"error": {**error, "param": None}})
