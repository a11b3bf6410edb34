"""Long JSON is read and written in threads. What counts is its size, and no time."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

import trioserve
from tests.support.clients import client_of
from tests.support.scripts import answering
from tests.support.waiting import until
from trioserve.api.base import sse
from trioserve.api.base.reply import LONG

PACKAGE = str(Path(trioserve.__file__).parent)

#: Longer than what is read and written on the event loop. It is not in the prompt.
SCHEMA = {"type": "object", "description": "x" * (LONG + 2**16)}
FORMAT = {"name": "any", "schema": SCHEMA}
HI = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": HI, "response_format": {"type": "json_schema", "json_schema": FORMAT}}
RESPONSE = {"input": "Hi", "text": {"format": {"type": "json_schema", **FORMAT}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": {**RESPONSE, "store": False},
    "/v1/messages": {"messages": HI, "max_tokens": 9, "other": SCHEMA},
    "/api/chat": {"messages": HI, "format": SCHEMA},
    "/predict": {"instances": [{"@requestFormat": "responses", **RESPONSE, "store": False}]},
}


@contextmanager
def watched() -> Iterator[dict[str, int]]:
    """Watch the json module on this thread; gives the largest size by the line that asked for it.

    What code outside of the package asks for does not count.
    """
    found: dict[str, int] = {}
    thread, encode, decode = threading.get_ident(), json.JSONEncoder.encode, json.JSONDecoder.decode

    def see(size: int) -> None:
        frame = sys._getframe(2)
        while Path(frame.f_code.co_filename).parent.name == "json" and frame.f_back is not None:
            frame = frame.f_back
        if threading.get_ident() == thread and frame.f_code.co_filename.startswith(PACKAGE):
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            found[line] = max(found.get(line, 0), size)

    def watched_encode(self: json.JSONEncoder, value: Any) -> str:
        text = encode(self, value)
        see(len(text))
        return text

    def watched_decode(self: json.JSONDecoder, text: str, *args: Any) -> Any:
        see(len(text))
        return decode(self, text, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json.JSONEncoder, "encode", watched_encode)
        patch.setattr(json.JSONDecoder, "decode", watched_decode)
        patch.setattr(sse, "encode", partial(watched_encode, sse.encode.__self__))  # type: ignore[attr-defined]
        yield found


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> httpx.Response:
    return await client.post(path, content=json.dumps(body))


def assert_short(found: dict[str, int]) -> None:
    assert {line: size for line, size in found.items() if size > LONG} == {}


async def test_no_request_has_long_json_on_the_event_loop() -> None:
    async with client_of(answering("{}"), predict_route="/predict") as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
        known = [path for path, methods in paths.items() if "post" in methods and "{" not in path]
        assert {*BODIES} <= {*known, "/predict"}
        with watched() as found:
            for path in {*known, *BODIES}:
                body = BODIES.get(path, {"input": "Hi", "prompt": "Hi", "other": SCHEMA})
                for is_stream in (False, True):
                    answer = await post(client, path, {**body, "stream": is_stream})
                    assert path not in BODIES or answer.status_code == 200, (
                        path,
                        answer.text[:300],
                    )
        assert_short(found)


async def test_no_stored_response_has_long_json_on_the_event_loop() -> None:
    async with client_of(answering("{}")) as client:
        with watched() as found:
            for more in ({}, {"stream": True}, {"background": True}):
                answer = await post(client, "/v1/responses", {**RESPONSE, **more})
                assert answer.status_code == 200, answer.text[:300]
                id_ = "resp_" + answer.text.partition('"resp_')[2][:32]
                await until(lambda: is_completed(client, id_))  # noqa: B023
                for rest in ("", "/input_items"):
                    await client.get(f"/v1/responses/{id_}{rest}")
        assert_short(found)


async def is_completed(client: httpx.AsyncClient, id_: str) -> bool:
    return '"status":"completed"' in (await client.get(f"/v1/responses/{id_}")).text


async def test_no_line_of_a_batch_is_written_on_the_event_loop() -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
    data = json.dumps({**line, "body": CHAT})
    async with client_of(answering("{}")) as client:
        with watched() as found:
            sent = {"file": ("lines.jsonl", data)}
            file = (await client.post("/v1/files", files=sent, data={"purpose": "batch"})).json()
            wanted = {"endpoint": line["url"], "completion_window": "24h"}
            batch = (
                await post(client, "/v1/batches", {"input_file_id": file["id"], **wanted})
            ).json()

            async def is_over() -> bool:
                answer = await client.get(f"/v1/batches/{batch['id']}")
                return answer.json()["status"] == "completed"

            await until(is_over)
        assert_short(found)
