"""Stores responses and files, and runs batches, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import trio

from tests.support.waiting import until
from trioserve.api.base.body import Incoming
from trioserve.api.base.caller import Caller
from trioserve.api.base.reply import Reply, json as json_reply
from trioserve.api.batches import KIND
from trioserve.api.service import AppState
from trioserve.store import Record, Records

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


class Asked:
    """Plays the app to the batches of a service, with the statuses that a test chooses."""

    def __init__(self, service: AppState, status: Callable[[int], int] = lambda n: 200) -> None:
        self.n_asked, self._status = 0, status
        self.bodies: list[dict[str, Any]] = []
        service.reply_to = self._reply_to

    async def _reply_to(self, incoming: Incoming, caller: Caller) -> Reply:
        self.n_asked += 1
        self.bodies.append(await incoming.fields())
        await trio.lowlevel.checkpoint()
        return json_reply({}, self._status(self.n_asked), **{"Retry-After": "0"})


def expire(records: Records) -> Record:
    """End the window of the only open batch, which is returned."""
    (batch,) = records.open_ones(KIND)
    records.change(batch.id, {**batch.body, "expires_at": 1}, is_open=True)
    return batch
