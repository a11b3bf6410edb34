"""No request holds the event loop for long, whatever is in it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest
import trio

from tests.support.http_server import connected, post, serving, serving_script
from tests.support.loop_probe import probing
from tests.support.media_files import wav_file
from tests.support.projectors import WordProjector
from tests.support.scripted_embedder import ScriptedEmbedder
from tests.support.scripts import CHAT, HI, answering
from tests.support.waiting import patiently
from trioserve.api.base import limits
from trioserve.app import create_app
from trioserve.config import Config

pytestmark = pytest.mark.system

#: Seconds of processor time that the loop may spend before it looks for others.
MOST = 0.1

MANY = 100_000
PART = {"type": "text", "text": "a"}
IMAGE = {"type": "image_url", "image_url": {"url": "AAAA" * 5 * 2**20}}


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def repeated(before: str, unit: str, after: str, n: int = MANY) -> bytes:
    return (before + unit * n + after).encode()


async def send(url: str, path: str, data: bytes, timeout: float = 120) -> httpx.Response:
    """Send a request from a thread: what it costs there is not the loop's."""
    headers = {"Content-Type": "application/json"}
    request = partial(httpx.post, url + path, content=data, timeout=timeout, headers=headers)
    return await trio.to_thread.run_sync(request)


def messages(n: int) -> bytes:
    return body(messages=HI * n, max_tokens=1)


COMPLETION, CHATS = "/completion", "/v1/chat/completions"
PROBS = {"prompt": "Once", "n_predict": 60, "n_probs": limits.MAX_PROBS, "ignore_eos": True}
TOOLS = [{"type": "function", "function": {"name": "f"}}] * MANY
STOPS = [f"{i}x" for i in range(limits.MAX_STOPS)]
BIASES = [["a", 1]] * limits.MAX_TEXT_BIASES + [[i, 1] for i in range(1500)]


def variables(n: int) -> bytes:
    return body(**CHAT, max_tokens=1, chat_template_kwargs={str(i): i for i in range(n)})


def saying(content: Any) -> bytes:
    return body(messages=[{"role": "user", "content": content}])


CASES: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "text to tokenize": ("/tokenize", lambda: body(content="word " * MANY, with_pieces=True), 200),
    "token ids to check": ("/tokenize", lambda: body(content=[5] * MANY), 200),
    "token ids for text": ("/detokenize", lambda: body(tokens=[5] * MANY), 200),
    "a prompt of text": (COMPLETION, lambda: body(prompt="a" * 30 * MANY), 400),
    "texts and ids": (COMPLETION, lambda: repeated('{"prompt":[1,', '"a",', "1]}"), 400),
    "ids": (COMPLETION, lambda: repeated('{"prompt":[', "1,", "1]}", 100 * MANY), 400),
    "many candidates": (COMPLETION, lambda: body(**PROBS), 200),
    "many candidates, streamed": (COMPLETION, lambda: body(**PROBS, stream=True), 200),
    "too many": (CHATS, lambda: body(**CHAT, logprobs=True, top_logprobs=2**31 - 1), 400),
    "variables of the template": (CHATS, lambda: variables(3 * MANY), 400),
    "variables that fit": (CHATS, lambda: variables(MANY), 200),
    "messages": (CHATS, lambda: messages(MANY), 400),
    "messages that fit": (CHATS, lambda: messages(9_999), 400),
    "Anthropic's messages": ("/v1/messages", lambda: messages(MANY), 400),
    "parts of a message": (CHATS, lambda: saying([PART] * MANY), 400),
    "a large image that cannot be decoded": (CHATS, lambda: saying([IMAGE]), 400),
    "items": ("/v1/responses", lambda: body(input=HI * MANY), 400),
    "tools": (CHATS, lambda: body(**CHAT, tools=TOOLS), 400),
    "stop strings": (COMPLETION, lambda: body(prompt="a", stop=["word"] * MANY), 400),
    "stop strings that fit": (COMPLETION, lambda: body(prompt="a", n_predict=30, stop=STOPS), 200),
    "biases": (
        COMPLETION,
        lambda: body(prompt="a", logit_bias=[[f"w{i}", 1] for i in range(MANY)]),
        400,
    ),
    "biases that fit": (COMPLETION, lambda: body(prompt="a", n_predict=3, logit_bias=BIASES), 200),
    "a field that is not known": (COMPLETION, lambda: repeated('{"x":[', "[],", "1]}"), 400),
    "escapes": (COMPLETION, lambda: repeated('{"prompt":"', "\\ud83d\\ude00", '"}'), 400),
    "brackets": (COMPLETION, lambda: repeated('{"prompt":', "[", ""), 400),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_request_does_not_hold_the_loop(name: str, bundled_url: str) -> None:
    path, make, status = CASES[name]
    data = make()
    async with probing() as probe:
        answer = await send(bundled_url, path, data)
    assert (answer.status_code, probe.held < MOST) == (status, True), (probe, answer.text[:200])


@pytest.fixture
async def bundled_url() -> Any:
    app = create_app(Config(threads=1))
    async with serving(app) as url:
        await app.extensions["trioserve"].wait_loaded()
        yield url


async def test_a_stored_conversation_does_not_hold_the_loop(bundled_url: str) -> None:
    items = [{"role": "user", "content": 'a "word" ' * 2000}] * 1400
    made = await send(bundled_url, "/v1/conversations", body(items=items))
    id_ = made.json()["id"]
    added = await send(bundled_url, f"/v1/conversations/{id_}/items", body(items=items))
    assert added.status_code == 200
    with_it = {"conversation": id_, "input": "Hi"}
    for fields in (with_it, {"input": items, "background": True}):
        data = body(**fields)
        async with probing() as probe:
            answer = await send(bundled_url, "/v1/responses", data)
        assert (answer.status_code in (200, 400), probe.held < MOST) == (True, True), probe


async def test_text_whose_client_has_gone_is_given_up(bundled_url: str) -> None:
    data = body(content="<|im_start|>" * 100_000)
    for _ in range(5):
        async with connected(bundled_url) as stream:
            await stream.send_all(post("/tokenize", data))
            await trio.sleep(0.02)
    with patiently():
        long_chat = [{"role": "user", "content": "Once upon a time. " * 300}]
        answer = await send(
            bundled_url, "/v1/chat/completions", body(messages=long_chat, max_tokens=1)
        )
        assert answer.status_code == 200
        answer = await send(bundled_url, "/tokenize", body(content="word " * 2000))
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("pooling", "path", "data", "status"),
    [
        ("mean", "/v1/embeddings", lambda: body(input=["a"] * 100_000), 400),
        ("mean", "/v1/embeddings", lambda: body(input=["a"] * limits.MAX_INPUTS), 200),
        ("mean", "/v1/embeddings", lambda: body(input=[["a", 98]] * limits.MAX_INPUTS), 200),
        ("mean", "/v1/embeddings", lambda: body(input=["a" * 10 * MANY]), 400),
        ("rank", "/v1/rerank", lambda: body(query="a", documents=["b"] * 100_000), 400),
        ("rank", "/v1/rerank", lambda: body(query="a", documents=["b"] * limits.MAX_INPUTS), 200),
        ("rank", "/v1/rerank", lambda: body(query="a" * MANY, documents=["b"] * 2000), 400),
    ],
)
async def test_many_texts_do_not_hold_the_loop(
    pooling: str, path: str, data: Callable[[], bytes], status: int
) -> None:
    backend = ScriptedEmbedder(pooling=pooling)
    config = Config(embeddings=pooling != "rank", reranking=pooling == "rank")
    app = create_app(config, load=lambda _config, progress=None: backend)  # type: ignore[arg-type,return-value]
    async with serving(app) as url:
        await app.extensions["trioserve"].wait_loaded()
        made = data()
        async with probing() as probe:
            answer = await send(url, path, made)
    assert (answer.status_code, probe.held < MOST) == (status, True), (probe, answer.text[:200])


async def test_a_long_recording_does_not_hold_the_loop() -> None:
    backend = answering("Hello", projector=WordProjector())
    recording = wav_file(0.1, rate=16_000, channels=1) + bytes(16 * 2**20)  # silence, mostly
    recording = recording.replace(recording[40:44], struct.pack("<I", len(recording) - 44), 1)
    async with serving_script(backend) as (url, _), probing() as probe:
        ask = partial(
            httpx.post,
            f"{url}/v1/audio/transcriptions",
            files={"file": recording},
            data={"response_format": "srt"},
            timeout=120,
        )
        answer = await trio.to_thread.run_sync(ask)
    assert answer.status_code == 200
    assert answer.text.startswith("1\n00:00:00,000 --> 00:00:00,100\nHello")
    assert probe.held < MOST, probe
