"""Runs batches: requests of a file, which get what all others leave of the model.

A batch is a record with its body as clients see it and three sides of parts: the lines that are
``pending``, and the lines of the ``output`` and of the ``errors``. One transaction takes a line
from the first side and adds its answer to another one. So a process that dies answers no line
twice, and the next one continues with the rest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import trio

from trioserve.api.within import Answer
from trioserve.concurrency import Gate, Jobs, Phase
from trioserve.config import Config
from trioserve.errors import TrioServeError, UnavailableError
from trioserve.fair_limiter import FairLimiter, set_client
from trioserve.log import get_logger
from trioserve.server.keys import Keys
from trioserve.store import Part, Record, Records, Store, new_id
from trioserve.whole_numbers import whole_number

_T = TypeVar("_T")
_log = get_logger("trioserve.api.batches")

KIND, FILE = "batch", "file"
PENDING, OUTPUT, ERRORS, DATA = "pending", "output", "errors", "data"

#: Sends the body of a line to a path of the app, for the client with an API key.
Ask = Callable[[str, str, bytes], Awaitable[Answer]]

#: The lowest `priority` of a request.
_PRIORITY = -100

#: Seconds before a line is tried again that the server had no place for, or could not store.
_PAUSE = 1.0
_MAX_PAUSE = 30.0

#: The longest pause that the server can ask for. A budget may be raised before the day ends.
_MAX_WAIT = 60.0

#: What a line is answered with if nothing could be done with it.
_EXPIRED = {"code": "batch_expired", "message": "The batch expired before this line was answered."}


class Batches:
    """The batches of an app. They run as long as `run` does.

    Args:
        gate: of the app. No line begins once it drains.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        #: Set by what makes the app.
        self.ask: Ask
        self._store: Store
        self._config: Config
        self._keys: Keys
        self._places: FairLimiter
        self._jobs = Jobs()
        self._running: dict[str, trio.CancelScope] = {}

    async def run(self, store: Store, config: Config, keys: Keys) -> None:
        """Run the batches that are not over, and those that begin, until cancelled."""
        self._store, self._config, self._keys = store, config, keys
        # As many lines wait as run: those that begin together are computed together.
        n_waiting = max(1, min(config.parallel, config.max_queue // 4))
        self._places = FairLimiter(config.parallel + n_waiting)
        if config.store is not None:
            self._jobs.begin(self._resume)
        await self._jobs.run()

    async def _resume(self) -> None:
        """Run the batches that another process has left."""
        for record in await self._surely(_open_batches):
            self.start(record)

    def start(self, batch: Record) -> None:
        """Run a batch that is in the store, once the model is loaded. It is started once.

        Raises:
            ServerClosingError: the server ends.
        """
        if batch.id not in self._running:
            self._jobs.begin(partial(self._live, batch))
            self._running[batch.id] = trio.CancelScope()

    def cancel(self, id_: str) -> None:
        """End a batch that the store has as ``cancelling``."""
        if (scope := self._running.get(id_)) is not None:
            scope.cancel()

    # -- the life of a batch

    async def _live(self, batch: Record) -> None:
        end = "cancelled"
        try:
            if batch.body["status"] != "cancelling":
                with self._running[batch.id]:
                    end = await self._run(batch)
            if end != "completed" or self._may_begin():
                await self._surely(partial(_finish, batch=batch, end=end))
        finally:
            del self._running[batch.id]

    async def _run(self, batch: Record) -> str:
        """Answer the lines of a batch in the time that it has; returns how it has ended."""
        left = max(0.0, batch.body["expires_at"] - time.time())
        with trio.move_on_after(left) as window:
            await self._answer_lines(batch)
        return "expired" if window.cancelled_caught else "completed"

    async def _answer_lines(self, batch: Record) -> None:
        """Answer the pending lines, those with the same beginning one after another."""
        key = await self._key_of(batch) if self._keys.needed else ""
        set_client(key or "batches")
        numbers = await self._surely(lambda records: records.numbers_by_name(batch.id, PENDING))
        room = trio.Semaphore(2 * self._places.n_places)
        async with trio.open_nursery() as nursery:
            for n in numbers:
                await room.acquire()
                if not self._may_begin():
                    return
                nursery.start_soon(self._answer_line, batch, key, n, room)

    async def _key_of(self, batch: Record) -> str:
        """The API key that a batch is of. Waits until a client shows it: a file has only hashes."""

        def find(shown: frozenset[str]) -> str | None:
            of_batch = (key for key in shown if self._store.owner_of(key) == batch.owner)
            return next((key for key in of_batch if self._keys.find(key) is not None), None)

        if (key := find(self._keys.shown.value)) is not None:
            return key
        _log.warning("a batch waits: its API key is not valid, or was not used since the start",
                     id=batch.id)  # fmt: skip
        shown = await self._keys.shown.wait_value(lambda value: find(value) is not None)
        key = find(shown)
        assert key is not None
        return key

    async def _answer_line(self, batch: Record, key: str, n: int, room: trio.Semaphore) -> None:
        try:
            line = await self._surely(partial(_line_of, batch=batch, n=n))
            if line is None:
                return  # the batch was deleted
            answer = await self._answer_of(key, line)
            if answer is not None:
                await self._surely(partial(_keep, batch=batch, n=n, line=line, answer=answer))
        finally:
            room.release()

    async def _answer_of(self, key: str, line: Mapping[str, Any]) -> Answer | None:
        """Answer a line, however often the server has no place for it. None: the server ends."""
        lowest = -_PRIORITY if self._config.priority_order == "lower-first" else _PRIORITY
        body = json.dumps({**line["body"], "priority": lowest}).encode()
        pause = _PAUSE
        while True:
            async with self._places.place():  # none is held in a pause: other keys may have a turn
                if not self._may_begin():
                    return None
                try:
                    answer = await self.ask(key, line["url"], body)
                except TrioServeError as error:  # the answer broke off
                    answer = Answer(error.status, {}, json.dumps({"error": error.message}).encode())
            if answer.status not in (429, 503):
                return answer
            wanted = min(whole_number(answer.headers.get(b"retry-after", b"")) or 0, _MAX_WAIT)
            await trio.sleep(max(pause, wanted))
            pause = min(2 * pause, _MAX_PAUSE)

    def _may_begin(self) -> bool:
        return self._gate.phase.value is Phase.OPEN

    async def _surely(self, work: Callable[[Records], _T]) -> _T:
        """Run work on the store. If it cannot, such as when the disk is full, try again later."""
        pause = _PAUSE
        while True:
            try:
                return await self._store.do(work)
            except UnavailableError as error:
                _log.warning("a batch waits for the store", problem=error.message)
            await trio.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)


# -- in the thread of the store


def _open_batches(records: Records) -> list[Record]:
    return records.open_ones(KIND)


def _line_of(records: Records, *, batch: Record, n: int) -> dict[str, Any] | None:
    """A pending line, if it is still there."""
    part = records.part(batch.id, PENDING, n)
    return None if part is None else dict(part.value)


def _keep(
    records: Records, *, batch: Record, n: int, line: Mapping[str, Any], answer: Answer
) -> None:
    """Put an answer in the place of a pending line."""
    if not records.remove(batch.id, PENDING, n):
        return
    is_good = answer.status == 200
    try:
        body = json.loads(answer.body)
    except ValueError:
        body = answer.body.decode(errors="replace")
    request_id = answer.headers.get(b"x-request-id", b"").decode()
    written = {
        "id": f"batch_req_{batch.id.removeprefix('batch_')}_{n}",
        "custom_id": line["custom_id"],
        "response": {"status_code": answer.status, "request_id": request_id, "body": body},
        "error": None,
    }
    records.append(batch.id, OUTPUT if is_good else ERRORS, [_line(n, written)])
    _count(records, batch, "completed" if is_good else "failed", 1)


def _line(n: int, value: Mapping[str, Any]) -> Part:
    part = Part.of(n, "", value)
    return Part(n, "", part.body + b"\n")


def _count(records: Records, batch: Record, name: str, number: int) -> None:
    if (now := records.find(batch.id, KIND, batch.owner)) is not None:
        now.body["request_counts"][name] += number
        records.change(batch.id, now.body, is_open=True)


def _finish(records: Records, *, batch: Record, end: str) -> None:
    """End a batch, and make files of its output and its errors."""
    if end == "expired":
        late = records.parts(batch.id, PENDING)
        records.append(
            batch.id,
            ERRORS,
            [
                _line(
                    each.n,
                    {
                        "id": f"batch_req_{batch.id.removeprefix('batch_')}_{each.n}",
                        "custom_id": each.value["custom_id"],
                        "response": None,
                        "error": _EXPIRED,
                    },
                )
                for each in late
            ],
        )
        _count(records, batch, "failed", len(late))
    records.remove(batch.id, PENDING)
    if (now := records.find(batch.id, KIND, batch.owner)) is None:
        return
    body, moment = now.body, int(time.time())
    for side in (OUTPUT, ERRORS):
        n_bytes = records.size_of(batch.id, side)
        if n_bytes:
            name = "output" if side == OUTPUT else "error"
            made = file_body(f"{batch.id}_{name}.jsonl", n_bytes, "batch_output")
            records.add(made["id"], FILE, batch.owner, made)
            records.move(batch.id, side, made["id"], DATA)
            body[f"{name}_file_id"] = made["id"]
    body |= {"status": end, f"{end}_at": moment, "finalizing_at": moment}
    records.change(batch.id, body)


def file_body(name: str, n_bytes: int, purpose: str) -> dict[str, Any]:
    """Make a file as clients see it, with a new id."""
    return {
        "id": new_id("file", "-"),
        "object": "file",
        "bytes": n_bytes,
        "created_at": int(time.time()),
        "expires_at": None,
        "filename": name,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
    }
