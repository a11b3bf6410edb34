"""Stores responses and files, and runs batches, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import trio

from tests.support.waiting import until
from trioserve.api.base.reply import Reply

CHATS, RESPONSES = "/v1/chat/completions", "/v1/responses"


async def stored(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """Make a response, which is stored by default."""
    answer = await client.post(RESPONSES, json={"input": "Hi", **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def upload(
    client: httpx.AsyncClient, data: bytes, name: str = "in.jsonl", purpose: str = "batch"
) -> str:
    """Upload a file; returns its id."""
    form = {"purpose": purpose}
    made = await client.post("/v1/files", data=form, files={"file": (name, data)})
    assert made.status_code == 200, made.text
    return str(made.json()["id"])


# -- batches


def line(n: int, text: str = "Hi", url: str = CHATS, **body: Any) -> dict[str, Any]:
    """A line of a batch, with a short chat."""
    asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **body}
    return {"custom_id": f"line-{n}", "method": "POST", "url": url, "body": asked}


def file_of(lines: Sequence[Any]) -> bytes:
    """The file of a batch; lines that are bytes stay as they are."""
    return b"\n".join(
        each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines
    )


async def begin(
    client: httpx.AsyncClient, lines: Sequence[Any], endpoint: str = CHATS, **fields: Any
) -> dict[str, Any]:
    """Upload lines, and begin a batch of them."""
    wanted = {"input_file_id": await upload(client, file_of(lines)), "endpoint": endpoint}
    made = await client.post("/v1/batches", json={**wanted, "completion_window": "24h", **fields})
    assert made.status_code == 200, made.text
    return dict(made.json())


async def shown(client: httpx.AsyncClient, id_: str) -> dict[str, Any]:
    """A batch as it is now."""
    return dict((await client.get(f"/v1/batches/{id_}")).json())


async def until_over(client: httpx.AsyncClient, id_: str) -> dict[str, Any]:
    """Wait for the end of a batch; returns it."""
    body: dict[str, Any] = {}

    async def is_over() -> bool:
        body.update(await shown(client, id_))
        return body["status"] not in ("in_progress", "cancelling")

    await until(is_over)
    return body


async def lines_of(client: httpx.AsyncClient, id_: str | None) -> list[dict[str, Any]]:
    """The lines of a file of answers or errors; none if there is no such file."""
    if id_ is None:
        return []
    content = (await client.get(f"/v1/files/{id_}/content")).text
    return [json.loads(each) for each in content.splitlines()]


async def never(*_request: Any) -> Reply:
    """Answer no line of a batch: a `reply_to` of its service."""
    await trio.sleep_forever()
    raise AssertionError
