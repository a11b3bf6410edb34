"""Every error that a client can meet, provoked over HTTP, with the whole of its body."""

from __future__ import annotations

import json
import tempfile
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import attrs
import httpx
import pytest
import trio
from structlog.testing import capture_logs

from tests.server.test_keys import table
from tests.support.clients import busy, client_and_service, client_of
from tests.support.http_server import connected, post, read_response, serving, serving_script
from tests.support.media_files import image_file, wav_file
from tests.support.scripted_embedder import ScriptedEmbedder
from tests.support.scripts import CHAT
from trioserve import errors
from trioserve.api.base.errors import InternalError
from trioserve.api.llama import admin
from trioserve.api.sessions import OffsetError
from trioserve.api.stored.responses import PreviousResponseError
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.server.transcription.transcript import TranscriptStream
from trioserve.testing import ScriptedBackend, ScriptedProjector

#: Errors that no client sees as such, by why.
_NEVER_SENT = {
    "no route approves of calls yet": "UnknownToolCallError ToolCallDecidedError",
    "needs a tool that fails; tests/api/tools has tests of it": (
        "ToolRuntimeError ToolError ToolFileError ToolTimeoutError ToolServerError"
        " WebToolError FetchError"
    ),
    "on Anthropic's routes alone; tests/api/anthropic has a test of it": "ThreadsUnsupportedError",
    "of conversations that are compacted; tests/api/openai/responses has tests of it": (
        "NothingToSummarizeError NoSummaryError"
    ),
    "takes ten minutes; tests/api/tools has tests of it": "ProxyTimeoutError",
    "needs an adapter in use; tests/server has a test of it": "AdapterInUseError",
    "ends the command before there is a server": "ConfigError BridgeError StoreInUseError",
    "only its children are raised": "RequestEndedError TooManyRequestsError",
    "its client does not read; the connection is cut": "StalledReaderError",
    "the batch is decoded again, without the prompt that was cancelled": "DecodeInterruptedError",
    "no request waits for the image any more": "EncodeInterruptedError",
    "the routes that need the model load it": "ServerSleepingError",
    "one model answers to all names, but where they are described": "UnknownModelError",
    "there is no choice of models; tests/api/router has tests of it": (
        "AmbiguousModelError ModelNotLoadedError ModelFailedError ModelProcessError"
        " UpstreamError UpstreamTimeoutError UpstreamUnavailableError"
    ),
    "nothing is downloaded while it serves; tests/api/router has tests of it": (
        "HubError HubUnavailableError HubNotFoundError UnknownQuantError GatedModelError"
        " HashMismatchError DiskFullError"
    ),
}
NEVER_SENT: set[type[errors.TrioServeError]] = {
    *(getattr(errors, name) for names in _NEVER_SENT.values() for name in names.split()),
}

#: The id of a request, and the message of an internal error.
ID = {"X-Request-Id": "mine"}
FAILED = "The inference engine failed. The log has more, under mine."

#: The type in a body, by its status, for most errors.
TYPES = {
    **dict.fromkeys((400, 405, 408, 409, 413), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    **dict.fromkeys((500, 502), "server_error"),
    501: "not_supported_error",
    503: "unavailable_error",
    504: "timeout_error",
}

Provoke = Callable[[], Awaitable[httpx.Response]]


@attrs.frozen
class Case:
    """An error, how it comes about, and the status and body that it is answered with."""

    kind: type[errors.TrioServeError]
    provoke: Provoke
    status: int
    error: dict[str, Any]


CASES: list[Case] = []


def answers(
    kind: type[errors.TrioServeError], status: int, message: str, **error: Any
) -> Callable[[Provoke], Provoke]:
    """Note what a function provokes. `code` in the body is the status unless it is given."""
    error = {"code": status, "message": message, "type": TYPES[status], "param": None, **error}

    def note(provoke: Provoke) -> Provoke:
        CASES.append(Case(kind, provoke, status, error))
        return provoke

    return note


def failing(error: Exception) -> ScriptedBackend:
    """A backend whose first decode fails."""

    def fail(_backend: ScriptedBackend) -> None:
        raise error

    backend = ScriptedBackend()
    backend.on_decode = fail
    return backend


def chat_of(**part: Any) -> dict[str, Any]:
    """A chat with one part."""
    return {"messages": [{"role": "user", "content": [part]}]}


def chat_with(image: str) -> dict[str, Any]:
    """A chat with an image."""
    return chat_of(type="image_url", image_url={"url": image})


def seeing(**settings: Any) -> ScriptedBackend:
    return ScriptedBackend(projector=ScriptedProjector(**settings))


def asking(
    path: str,
    json: Any = None,
    make_backend: Callable[[], ScriptedBackend | None] = lambda: None,
    *,
    sent: dict[str, Any] | None = None,
    **config: Any,
) -> Provoke:
    """Ask a server of this configuration; `sent` has other arguments of `client.request`."""

    async def provoke() -> httpx.Response:
        async with client_of(make_backend(), **config) as client:
            return await client.request(
                **{"method": "POST", "url": path, "json": json, "headers": ID, **(sent or {})}
            )

    return provoke


def failed(error: Exception) -> Provoke:
    """Ask an engine that fails."""
    return asking("/completion", PROMPT, lambda: failing(error), on_engine_failure="stay")


def refuse_output(prompt: str) -> str:
    raise errors.OutputError("The grammar allows no token to follow.")


def unloaded(error: errors.TrioServeError) -> Provoke:
    """Ask an app whose model could not be loaded."""

    async def provoke() -> httpx.Response:
        app = create_app(Config())
        app.extensions["trioserve"].failure = error
        answer = await app.test_client().get("/v1/models", headers=ID)
        body: Any = await answer.get_data()
        return httpx.Response(answer.status_code, content=body)

    return provoke


CHATS, COMPLETION, RESPONSES = "/v1/chat/completions", "/completion", "/v1/responses"
PROMPT = {"prompt": "a"}
LARGE = {"data": {"purpose": "batch"}, "files": {"file": ("a.jsonl", b"x" * 2**21)}}
NEVER = "{% if messages[0].content == 'Hi' %}{{ raise_exception('never') }}{% endif %}"
REACHABLE: dict[str, Any] = {"ui_mcp_proxy": True, "ui_mcp_proxy_hosts": ("127.0.0.1:1",)}

#: Errors of one request: the kind, the status, the message, the request, and the rest of the body.
ASKED: list[tuple[type[errors.TrioServeError], int, str, Provoke, dict[str, Any]]] = [
    (
        *(errors.InvalidRequestError, 400, "'top_k' must be an integer."),
        asking(COMPLETION, PROMPT | {"top_k": "x"}),
        {"param": "top_k"},
    ),
    (
        *(errors.InvalidRequestError, 400, "'prompt' is required."),
        asking(COMPLETION, {}),
        {"param": "prompt"},
    ),
    (
        *(errors.InvalidRequestError, 400, "'messages[0].content[0].type' is missing."),
        asking(CHATS, chat_of(text="Hi")),
        {"param": "messages[0].content[0].type"},
    ),
    (
        *(errors.InvalidRequestError, 400),
        "The body is not valid JSON: Expecting value: line 1 column 1 (char 0).",
        asking(COMPLETION, sent={"content": b""}),
        {},
    ),
    (
        *(errors.UnknownFileError, 400),
        "'messages[0].content[0].file.file_id' names no file that is stored here.",
        asking(CHATS, chat_of(type="file", file={"file_id": "file-none"})),
        {"param": "messages[0].content[0].file.file_id", "code": "file_not_found"},
    ),
    (
        *(errors.UnsupportedFieldError, 400),
        "'image_data' is not supported with this value; leave it out.",
        asking(COMPLETION, PROMPT | {"image_data": [1]}),
        {"param": "image_data"},
    ),
    (
        *(errors.ContextLengthExceededError, 400),
        "The prompt has 64 tokens, which exceeds the available context size of 64 tokens, with "
        "room for at least one token of output.",
        asking(
            COMPLETION,
            {"prompt": "a" * 64},
            lambda: ScriptedBackend(n_slots=1, n_ctx=64, n_batch=64),
        ),
        {
            "code": "context_length_exceeded",
            "type": "exceed_context_size_error",
            "param": "prompt",
            "n_prompt_tokens": 64,
            "n_ctx": 64,
        },
    ),
    (
        *(errors.TemplateError, 400, "The chat template refuses the messages: never"),
        asking(CHATS, CHAT, chat_template=NEVER),
        {"param": "messages"},
    ),
    (
        *(errors.InvalidMediaError, 400),
        "'messages[0].content[0].image_url' is not valid base64.",
        asking(CHATS, chat_with("?!"), seeing),
        {"code": "invalid_media", "param": "messages[0].content[0].image_url"},
    ),
    (
        *(PreviousResponseError, 400),
        "The response 'resp_1' is not stored here, or not any more.",
        asking(RESPONSES, {"input": "a", "previous_response_id": "resp_1"}),
        {"code": "previous_response_not_found", "param": "previous_response_id"},
    ),
    (
        *(errors.AuthenticationError, 401, "Invalid API Key"),
        asking(
            "/v1/models", sent={"method": "GET", "headers": {"x-api-key": "other"}}, api_keys=("k",)
        ),
        {},
    ),
    (
        *(errors.PermissionDeniedError, 403),
        "Pages of http://evil.com may not use this server; allow them with --cors-origins.",
        asking("/v1/models", sent={"method": "GET", "headers": {"Origin": "http://evil.com"}}),
        {},
    ),
    (
        *(errors.NotFoundError, 404, "There is no /nothing here."),
        asking("/nothing", sent={"method": "GET"}),
        {},
    ),
    (
        *(errors.UnknownToolError, 404, 'unknown tool "x"'),
        asking("/tools", {"tool": "x"}, tools=("read_file",)),
        {"code": "tool_not_found", "type": "invalid_request_error", "param": "tool"},
    ),
    (
        *(errors.PayloadTooLargeError, 413),
        "The body is larger than max_body_size, which is 10 bytes.",
        asking(COMPLETION, {"prompt": "a" * 10}, max_body_size=10),
        {},
    ),
    (
        *(errors.RecordTooLargeError, 413),
        "This cannot be stored: its fields take 4999907 bytes, and 4194304 is the most.",
        asking(RESPONSES, {"input": "a", "instructions": "x" * 5_000_000, "background": True}),
        {"code": "record_too_large"},
    ),
    (
        *(errors.NotSupportedError, 501),
        "This server does not support slots endpoint. Start it with `--slots`",
        asking("/slots", sent={"method": "GET"}, slots_endpoint=False),
        {},
    ),
    (
        *(errors.ProxyError, 502),
        "127.0.0.1:1 cannot be reached: all attempts to connect to 127.0.0.1:1 failed.",
        asking("/cors-proxy?url=http://127.0.0.1:1", sent={"method": "GET"}, **REACHABLE),
        {"code": "proxy_failed"},
    ),
    (
        *(errors.StoreFullError, 503, "The store is full: --store-size is 1048576 bytes."),
        asking("/v1/files", sent=LARGE, store_size=2**20),
        {"code": "store_full"},
    ),
    (errors.ModelLoadError, 503, "Cut short.", unloaded(errors.ModelLoadError("Cut short.")), {}),
    (
        *(errors.BackendMismatchError, 500, "It lacks x. The log has more, under mine."),
        unloaded(errors.BackendMismatchError("It lacks x.")),
        {},
    ),
    (errors.DecodeError, 500, FAILED, failed(errors.DecodeError("llama_decode failed.")), {}),
    (errors.EngineError, 500, FAILED, failed(RuntimeError("broken")), {}),
    (
        *(errors.KVCacheFullError, 500, "No room. The log has more, under mine."),
        failed(errors.KVCacheFullError("No room.")),
        {"code": "kv_cache_full"},
    ),
    (
        *(errors.OutputError, 500),
        "The grammar allows no token to follow. The log has more, under mine.",
        asking(COMPLETION, PROMPT, lambda: ScriptedBackend(refuse_output)),
        {},
    ),
    (
        *(errors.EncodeError, 500, FAILED),
        asking(
            CHATS,
            chat_with(b64encode(image_file()).decode()),
            lambda: seeing(fail_next=errors.EncodeError("The image cannot be encoded.")),
        ),
        {},
    ),
]
for kind, status, message, provoke, more in ASKED:
    answers(kind, status, message, **more)(provoke)


# -- errors that take more


@answers(errors.BodyTimeoutError, 408, "No more of the body came for 0.05 seconds.")
async def a_body_that_does_not_come() -> httpx.Response:
    async with serving_script(timeout=0.05) as (url, _), connected(url) as stream:
        await stream.send_all(post("/completion", b"{}")[:-1])
        return await read_response(stream)


@answers(
    errors.InputTooLongError,
    400,
    "'input' is too large: a text of 65 tokens, where the context of the model holds 64.",
    code="context_length_exceeded",
    type="exceed_context_size_error",
    param="input",
    n_prompt_tokens=65,
    n_ctx=64,
)
async def a_text_that_is_too_long_to_embed() -> httpx.Response:
    app = create_app(Config(embeddings=True), load=lambda config, progress=None: ScriptedEmbedder())  # type: ignore[arg-type,return-value]
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        await app.extensions["trioserve"].wait_loaded()
        return await client.post("/v1/embeddings", json={"input": "a" * 65})


@answers(errors.MethodNotAllowedError, 405, "This route does not take this method.")
async def another_method() -> httpx.Response:
    async with client_of() as client:
        answer = await client.get("/completion")
    assert answer.headers["Allow"] == "POST"
    return answer


@answers(OffsetError, 400, "No event of the stream has the id 1.", param="Last-Event-ID")
async def an_offset_that_a_stream_does_not_have() -> httpx.Response:
    async with client_of() as client:
        body = {"prompt": "a", "stream": True}
        await client.post("/completion", json=body, headers={"X-Conversation-Id": "a"})
        return await client.get("/v1/stream?conv_id=a", headers={"Last-Event-ID": "1"})


@answers(errors.StreamStoppedError, 409, "The stream was stopped.", code="stream_stopped")
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
    errors.MemoryFullError,
    503,
    "Requests hold as much memory as they may, 1048576 bytes.",
    code="memory_full",
)
async def a_server_whose_memory_is_full() -> httpx.Response:
    async with client_and_service(max_request_memory=2**20) as (client, service):
        with service.memory.hold() as held:
            held.grow(2**20)
            answer = await client.post("/completion", json={"prompt": "a"})
        assert answer.headers["Retry-After"] == "1"
        return answer


@answers(
    errors.QueueFullError, 429, "0 requests are waiting, and the limit is 0.", code="queue_full"
)
async def a_queue_that_is_full() -> httpx.Response:
    async with busy(max_queue=0) as (client, _):
        answer = await client.post("/completion", json={"prompt": "a"})
        assert int(answer.headers["Retry-After"]) >= 1
        return answer


@answers(
    errors.RateLimitError,
    429,
    "Rate limit reached: 60 requests a minute. Try again in 1.0 seconds.",
    code="rate_limit_exceeded",
)
async def a_minute_that_is_used_up() -> httpx.Response:
    async with client_and_service(rate_limit_requests=60) as (client, service):
        limits = service.server.resources.rate_limits
        limits._clock = lambda: 0.0
        for _ in range(60):
            limits.admit("127.0.0.1")
        return await client.post("/completion", json={"prompt": "a"})


@answers(
    errors.InsufficientQuotaError,
    429,
    "The API key 'one' has used up its 1 tokens of this day, which ends at midnight UTC.",
    code="insufficient_quota",
    type="insufficient_quota",
)
async def a_day_that_is_used_up() -> httpx.Response:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(table("one", "1", "tokens-per-day = 1"))
        file.flush()
        async with client_of(keys_file=file.name) as client:
            client.headers["Authorization"] = "Bearer 1"
            first = await client.post("/completion", json={"prompt": "a", "n_predict": 1})
            assert first.status_code == 200
            answer = await client.post("/completion", json={"prompt": "a"})
    assert 1 <= int(answer.headers["Retry-After"]) <= 86400
    return answer


@answers(errors.ModelLoadingError, 503, "Loading model")
async def a_model_that_loads() -> httpx.Response:
    gate = trio.Event()

    def load(_config: Config, *, progress: Any = None) -> ScriptedBackend:
        trio.from_thread.run(gate.wait)
        return ScriptedBackend()

    async with serving(create_app(Config(), load=load)) as url, httpx.AsyncClient() as client:
        answer = await client.get(f"{url}/v1/models")
        gate.set()
        return answer


@answers(errors.ServerClosingError, 503, "The server is shutting down")
async def a_server_that_drains() -> httpx.Response:
    async with client_and_service() as (client, service):
        await service.drain()
        return await client.post("/completion", json={"prompt": "a"})


@answers(errors.UnavailableError, 503, "no slot available")
async def no_slot_that_is_free() -> httpx.Response:
    async with busy() as (client, _):
        return await client.get("/slots?fail_on_no_slot=1")


@answers(
    errors.DeadlineExceededError,
    504,
    "The request's deadline has passed.",
    code="deadline_exceeded",
)
async def a_deadline_that_passes() -> httpx.Response:
    async with busy() as (client, _):
        return await client.post("/completion", json={"prompt": "a", "timeout": 0.05})


@answers(errors.TranscriberError, 500, "The transcriber failed. The log has more, under mine.")
async def a_transcriber_that_fails() -> httpx.Response:
    async def read(stream: TranscriptStream) -> None:
        raise errors.TranscriberError("The process has ended.")

    async with client_of(ScriptedBackend(projector=ScriptedProjector())) as client:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TranscriptStream, "read", read)
            return await client.post(
                "/v1/audio/transcriptions",
                files={"file": ("a.wav", wav_file())},
                data={"model": "m"},
                headers=ID,
            )


@answers(InternalError, 500, "Internal error. The log has more, under mine.")
async def a_mistake_of_ours() -> httpx.Response:
    async with client_of() as client:
        with pytest.MonkeyPatch.context() as patch, capture_logs() as logs:
            patch.setattr(admin, "page", lambda models: 1 / 0)
            answer = await client.get("/v1/models", headers=ID)
    assert isinstance(logs[0]["exc_info"], ZeroDivisionError)
    return answer


@answers(
    errors.StoreError,
    503,
    "The server cannot store anything now. Its log has the reason.",
    code="store_failed",
)
async def a_store_that_is_read_only() -> httpx.Response:
    async with client_and_service() as (client, service):
        await service.store.do(lambda records: records._sql("PRAGMA query_only = ON"))
        files = {"file": ("a.jsonl", b"{}")}
        return await client.post("/v1/files", data={"purpose": "batch"}, files=files)


@answers(
    errors.RecordDamagedError,
    503,
    "The content of a record in the store is damaged.",
    code="store_failed",
)
async def a_record_that_is_damaged() -> httpx.Response:
    async with client_and_service() as (client, service):
        made = (await client.post("/v1/conversations", json={})).json()
        await service.store.do(lambda records: records._sql("UPDATE records SET body = x'ff'"))
        return await client.get(f"/v1/conversations/{made['id']}")


# -- the tests


#: Errors of these exist where they were imported, and are tested in tests/ray, tests/tools/mcp,
#: tests/llama and tests/api/router.
ELSEWHERE = ("trioserve.ray.", "trioserve.tools.mcp.", "trioserve.llama.", "trioserve.remote.")


def kinds(kind: type[errors.TrioServeError]) -> Iterator[type[errors.TrioServeError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__.startswith("trioserve.") and not child.__module__.startswith(ELSEWHERE):
            yield from kinds(child)


def test_every_error_has_a_case_or_is_never_sent() -> None:
    cases = {case.kind for case in CASES}
    assert cases | NEVER_SENT == set(kinds(errors.TrioServeError)) - {errors.TrioServeError}
    assert not cases & NEVER_SENT


@pytest.mark.system
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind.__name__)
async def test_an_error_has_this_body(case: Case) -> None:
    with capture_logs():  # tracebacks take long to write
        answer = await case.provoke()
    assert answer.status_code == case.status
    assert answer.json() == {"error": case.error}
    assert case.error["type"] == case.kind.type


@pytest.mark.parametrize(
    ("path", "body"), [("/completion", {"prompt": "a"}), ("/v1/chat/completions", CHAT)]
)
async def test_a_stream_that_has_begun_ends_with_the_error(path: str, body: Any) -> None:
    n_steps = 0

    def fail_later(_backend: ScriptedBackend) -> None:
        nonlocal n_steps
        n_steps += 1
        if n_steps > 3:
            raise errors.DecodeError("llama_decode failed.")

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
