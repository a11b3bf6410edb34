"""Hostile media in requests: the refusal names the part, and other streams continue."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import trio

from tests.api.stored.test_uploads import ROUTES, upload
from tests.support.clients import client_and_service, client_of
from tests.support.media_bombs import BOMBS, huge_png
from tests.support.media_files import image_file
from tests.support.projectors import WordProjector
from tests.support.scripted_server import assert_at_rest
from tests.support.scripts import ENDLESS, TEMPLATE, answering
from tests.support.waiting import patiently, until
from trioserve.api.service import Service
from trioserve.testing import ScriptedBackend

pytestmark = pytest.mark.system

FILES = {name: BOMBS[name] for name in ("a PNG of 50,000 x 50,000", "boxes in boxes")}
FILES |= {"an image that is cut off": lambda: image_file(size=(99, 99))[:-50]}


def named_image(id_: str) -> dict[str, Any]:
    """A message with an uploaded image, in Anthropic's API."""
    block = {"type": "image", "source": {"type": "file", "file_id": id_}}
    return {"max_tokens": 9, "messages": [{"role": "user", "content": [block]}]}


IMAGE = ("/v1/messages", named_image, "messages[0].content[0].source.file_id")

#: Addresses that no request may reach, even if all hosts are allowed.
INSIDE = (
    "http://localhost/x.png",
    "http://127.0.0.1/x.png",
    "http://[::ffff:127.0.0.1]/x.png",
    "http://169.254.169.254/latest/meta-data/",
    "http://2130706433/x.png",
    "http://0177.0.0.1/x.png",
    "file:///etc/passwd",
    "file://localhost/etc/passwd",
    "ftp://example.org/x.png",
)


def chat(url: str) -> tuple[str, dict[str, Any], str]:
    part = {"type": "image_url", "image_url": {"url": url}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "?"}, part]}]
    return "/v1/chat/completions", {"messages": messages}, "messages[0].content[1].image_url"


def responses(url: str) -> tuple[str, dict[str, Any], str]:
    part = {"type": "input_image", "image_url": url}
    content = [{"type": "input_text", "text": "?"}, part]
    body = {"model": "m", "input": [{"role": "user", "content": content}]}
    return "/v1/responses", body, "input[0].content[1].image_url"


def anthropic(url: str) -> tuple[str, dict[str, Any], str]:
    source = {"type": "url", "url": url}
    if url.startswith("data:"):
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    content = [{"type": "text", "text": "?"}, {"type": "image", "source": source}]
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": content}]}
    return "/v1/messages", body, "messages[0].content[1]"


APIS = pytest.mark.parametrize("api", [chat, responses, anthropic])
Api = Callable[[str], tuple[str, dict[str, Any], str]]


async def assert_refused(client: httpx.AsyncClient, api: Api, url: str) -> None:
    path, body, param = api(url)
    answer = await client.post(path, json=body)
    assert answer.status_code == 400, (url[:100], answer.text)
    error = answer.json()["error"]
    assert param in error["message"], (url[:100], error)
    assert error.get("param", param).startswith(param)


def as_url(data: bytes) -> str:
    return f"data:image/png;base64,{b64encode(data).decode()}"


async def wait_until_held(service: Service, n_bytes: int) -> None:
    """A request gives back its memory when its answer has been sent."""
    await until(lambda: service.memory.n_held == n_bytes)


@APIS
async def test_bombs_and_addresses_inside_are_refused_beside_a_stream(api: Api) -> None:
    def script(prompt: str) -> str:
        return "x" * ENDLESS if "endless" in prompt else "Hello"

    backend = ScriptedBackend(
        script, n_ctx=2 * ENDLESS, chat_template=TEMPLATE, projector=WordProjector()
    )
    backend.on_decode = lambda backend: time.sleep(0.001)
    async with client_and_service(backend, media_urls=("all",)) as (client, service):
        async with service.server.stream_complete("endless") as stream:
            await anext(stream)
            held = service.memory.n_held
            for url in (*(as_url(make()) for make in FILES.values()), *INSIDE):
                await assert_refused(client, api, url)
                with patiently():
                    await anext(stream)
            await wait_until_held(service, held)
            path, body, _ = api(as_url(image_file()))
            assert (await client.post(path, json=body)).status_code == 200
        await wait_until_held(service, 0)
        await assert_at_rest(service.server)


# httpx leaves a generator behind where it is cancelled while it sends.
@pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning")
async def test_a_client_that_leaves_with_a_bomb_leaves_nothing() -> None:
    backend = answering("Hello", projector=WordProjector())
    async with client_and_service(backend) as (client, service):
        path, body, _ = chat(as_url(huge_png()))
        for delay in (0.01, 0.1, 0.3):
            with trio.move_on_after(delay):
                await client.post(path, json=body)
        await wait_until_held(service, 0)
        await assert_at_rest(service.server)
        path, body, _ = chat(as_url(image_file()))
        assert (await client.post(path, json=body)).status_code == 200


@pytest.mark.parametrize("name", FILES)
async def test_a_hostile_file_that_was_uploaded_is_refused(name: str) -> None:
    async with client_of(answering("A cat.", projector=WordProjector())) as client:
        id_ = await upload(client, FILES[name](), "cat.png")
        for path, body, param in (*ROUTES[:3], IMAGE):
            answer = await client.post(path, json=body(id_))
            assert answer.status_code == 400 and param in answer.json()["error"]["message"]
