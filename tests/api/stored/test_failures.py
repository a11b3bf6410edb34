"""A store whose disk is full, or whose file is damaged or locked: what fails, and what works."""

from __future__ import annotations

import random
import resource
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
import trio

from tests.support.clients import client_and_service, client_of, named_events_in
from tests.support.scripts import CHAT, answering
from tests.support.stored import CHATS, RESPONSES, begin, line, never, stored, until_over
from tests.support.waiting import until
from trioserve.api import batches as batches_module
from trioserve.api.base.reply import Reply
from trioserve.errors import QueueFullError, StoreError
from trioserve.store import Database, database as database_module
from trioserve.store.database import problems

PAGE = 4096  # bytes, as SQLite has them

Failure = Callable[[str], AbstractContextManager[None]]


async def fails(client: httpx.AsyncClient, method: str, path: str, **body: Any) -> None:
    answer = await client.request(method, path, json=body or None)
    assert answer.status_code == 503, (path, answer.text)
    assert answer.json()["error"]["code"] == "store_failed"
    assert "disk" not in answer.text  # the log has it


async def last_of_stream(client: httpx.AsyncClient, **body: Any) -> Any:
    answer = await client.post(RESPONSES, json={"input": "Hi", "stream": True, **body})
    return named_events_in(answer.text)[-1]


async def chats(client: httpx.AsyncClient) -> None:
    assert (await client.post(CHATS, json=CHAT)).status_code == 200


# -- a full disk


@contextmanager
def full_disk(path: str) -> Iterator[None]:
    """Let no file grow beyond what the log of a store has now: to SQLite, an error of the disk."""
    size = Path(f"{path}-wal").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold the lock that SQLite takes to write, as another program would."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


@pytest.mark.parametrize("failure", [full_disk, locked])
async def test_requests_that_need_the_store_fail_until_it_works_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Failure
) -> None:
    monkeypatch.setattr(database_module, "_PATIENCE", 0)
    monkeypatch.setattr(batches_module, "_PAUSE", 0.001)
    path = str(tmp_path / "a.db")
    async with client_and_service(answering("Hello"), store=path) as (client, service):
        before = (await stored(client, store=True))["id"]
        may_answer, reply_to, n_asked = trio.Event(), service.reply_to, 0

        async def reply_later(*request: Any) -> Reply:
            nonlocal n_asked
            n_asked += 1
            await may_answer.wait()
            return await reply_to(*request)

        service.reply_to = reply_later
        batch = (await begin(client, [line(n) for n in range(20)]))["id"]
        with failure(path):
            may_answer.set()
            await fails(client, "POST", RESPONSES, input="Hi", store=True)
            await fails(client, "POST", RESPONSES, input="Hi", background=True)
            await fails(client, "POST", "/v1/conversations", metadata={})
            answer = await client.post(RESPONSES, json={"input": "Hi"})
            assert answer.status_code == 200 and answer.json()["store"] is False
            assert (await last_of_stream(client))["type"] == "response.completed"
            assert (await last_of_stream(client, store=True))["type"] == "error"
            await fails(client, "POST", RESPONSES, input="Hi", previous_response_id=before)
            await chats(client)
            assert service.batches._running
        after = (await stored(client, store=True))["id"]
        await until(lambda: not service.batches._running)
        for id_ in (before, after):
            assert (await client.get(f"{RESPONSES}/{id_}")).status_code == 200
        found = await until_over(client, batch)
        assert (found["status"], found["request_counts"]["completed"]) == ("completed", 20)
        assert n_asked == 20  # the answers were kept meanwhile
    async with client_of(store=path) as client:
        assert (await client.get(f"{RESPONSES}/{after}")).status_code == 200
    assert problems(path) == []


def test_a_locked_file_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "_PATIENCE", 0)
    path = str(tmp_path / "a.db")
    Database(path).close()
    with locked(path), pytest.raises(StoreError, match="another program has locked it"):
        Database(path)
    Database(path).close()


# -- damage


async def filled(path: str) -> dict[str, str]:
    """Fill a store; returns the ids of its records, by kind. The lines of its batch are pending."""
    async with client_and_service(answering("Hello"), store=path) as (client, service):
        responses = [(await stored(client))["id"] for _ in range(8)]
        items = [{"role": "user", "content": f"Hi {n}"} for n in range(20)]
        made = await client.post("/v1/conversations", json={"items": items})
        service.reply_to = never
        batch = await begin(client, [line(n) for n in range(200)])
    return {
        "responses": responses[0],
        "conversations": made.json()["id"],
        "files": batch["input_file_id"],
        "batches": batch["id"],
    }


@attrs.frozen
class Sound:
    """A store that is not damaged: its bytes, and the ids of its records, by kind."""

    data: bytes
    names: Mapping[str, str]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    path = tmp_path_factory.mktemp("sound") / "a.db"
    names = trio.run(filled, str(path))
    return Sound(path.read_bytes(), names)


async def statuses(client: httpx.AsyncClient, names: Mapping[str, str]) -> set[int]:
    """Read and change each record; returns the statuses of the answers."""
    found = set()
    for kind, id_ in names.items():
        found.add((await client.get(f"/v1/{kind}/{id_}")).status_code)
    response, conversation = names["responses"], names["conversations"]
    for method, path, body in (
        ("GET", f"{RESPONSES}/{response}/input_items", None),
        ("GET", f"/v1/conversations/{conversation}/items", None),
        ("GET", f"/v1/files/{names['files']}/content", None),
        ("GET", "/v1/files", None),
        ("GET", "/v1/batches", None),
        ("POST", RESPONSES, {"input": "Hi", "previous_response_id": response}),
        ("POST", RESPONSES, {"input": "Hi", "conversation": conversation}),
        ("POST", "/v1/batches", {"input_file_id": names["files"], "endpoint": CHATS}),
        ("DELETE", f"{RESPONSES}/{response}", None),
    ):
        found.add((await client.request(method, path, json=body)).status_code)
    return found


@pytest.mark.parametrize(
    ("content", "is_asked_for"),
    [
        (b'"object":"response"', True),
        (b'"text":"Hi"', True),
        (b'"content":"Hi 7"', True),
        (b'"object":"batch"', False),  # the batch has failed
        (b'"custom_id":"line-', False),  # its lines are errors
    ],
)
async def test_damaged_content_is_an_error_of_the_store(
    tmp_path: Path, sound: Sound, content: bytes, is_asked_for: bool
) -> None:
    path = tmp_path / "a.db"
    assert content in sound.data
    path.write_bytes(sound.data.replace(content, b"\xff" * len(content)))
    async with client_of(answering("Hello"), store=str(path), drain_timeout=0) as client:
        found = await statuses(client, sound.names)
        assert found <= {200, 400, 503} and (503 in found) is is_asked_for
        await chats(client)
    path.write_bytes(sound.data)
    async with client_of(answering("Hello"), store=str(path), drain_timeout=0) as client:
        assert await statuses(client, sound.names) == {200}


@pytest.mark.parametrize("seed", range(4))
async def test_random_bytes_in_pages(tmp_path: Path, sound: Sound, seed: int) -> None:
    path, rng, data = tmp_path / "a.db", random.Random(seed), bytearray(sound.data)
    for page in rng.sample(range(1, len(data) // PAGE), 2):
        first = page * PAGE + rng.randrange(PAGE // 2)
        data[first : (page + 1) * PAGE] = rng.randbytes((page + 1) * PAGE - first)
    path.write_bytes(data)
    try:
        Database(str(path)).close()
    except StoreError:  # its message names the damage
        with pytest.raises(StoreError, match="damaged"):
            Database(str(path))
        return
    async with client_of(answering("Hello"), store=str(path), drain_timeout=0) as client:
        assert await statuses(client, sound.names) <= {200, 400, 404, 503}
        await chats(client)


@pytest.mark.parametrize("share", [0.001, 0.3, 0.7, 0.9])
def test_a_truncated_file_is_no_store(tmp_path: Path, sound: Sound, share: float) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(sound.data[: int(len(sound.data) * share)])
    with pytest.raises(StoreError, match="damaged"):
        Database(str(path))


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("streams", [True, False])
async def test_too_much_work_for_the_threads_costs_no_answer(
    monkeypatch: pytest.MonkeyPatch, asks: bool, streams: bool
) -> None:
    async def add(*args: Any, **more: Any) -> None:
        raise QueueFullError("Too much waits for a thread.", retry_after=1)

    async with client_and_service(answering("Hello")) as (client, service):
        monkeypatch.setattr(service.store, "add", add)
        body = {"input": "Hi", "stream": streams, **({"store": True} if asks else {})}
        answer = await client.post(RESPONSES, json=body)
        assert answer.status_code == (429 if asks and not streams else 200)
        assert ("Too much waits" in answer.text) == asks
        assert ("Hello" in answer.text) == (streams or not asks)
