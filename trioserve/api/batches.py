"""Runs batches: requests of a file, which get what all others leave of the model.

A batch is a record with its body as clients see it and, as parts, the lines that are ``pending``.
The lines of its output and of its errors are those of two more records, which become files when it
ends. One transaction removes a pending line and adds its answer to one of these. So a process that
dies answers no line twice, and the next one continues with the rest.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import msgspec
import trio

from trioserve.api.base import answers, errors, request_log, sse
from trioserve.api.base.body import Incoming
from trioserve.api.base.caller import Caller
from trioserve.api.base.reply import LONG, Reply, value_of
from trioserve.concurrency import Feed, Jobs, Phase
from trioserve.errors import RecordDamagedError, StoreFullError, TrioServeError, UnavailableError
from trioserve.fair_limiter import FairLimiter, offload, set_client
from trioserve.log import get_logger
from trioserve.server.limits.memory import weight_of
from trioserve.store import Part, Record, Records, Store, damaged, new_id
from trioserve.whole_numbers import whole_number

if TYPE_CHECKING:
    from trioserve.api.service import AppState

_T = TypeVar("_T")
_log = get_logger("trioserve.api.batches")

KIND, FILE = "batch", "file"

#: A batch of messages, as Anthropic's API has them, and its results.
MESSAGES, RESULTS = "message_batch", "batch_results"
PENDING, DATA = "pending", "data"

#: A record that becomes a file when its batch ends, and the two kinds of such files.
_GROWING = "batch_output"
OUTPUT, ERRORS = "output", "error"

#: The lowest `priority` of a request.
_PRIORITY = -100

#: Seconds before a line is tried again that the server had no place for, or could not store.
_PAUSE = 1.0
_MAX_PAUSE = 30.0

#: The longest pause that the server can ask for. A budget may be raised before the day ends.
_MAX_WAIT = 60.0

#: Lines that one transaction gives up at most.
_MAX_GIVEN_UP = 100

#: Errors of lines that were not answered.
_EXPIRED = {"code": "batch_expired", "message": "The batch expired before this line was answered."}
_CANCELLED = {"code": "batch_cancelled", "message": "The batch was cancelled before this line."}
_FAILED = {"code": "batch_failed", "message": "The batch failed before this line was answered."}
_DAMAGED = {"code": "line_damaged", "message": "The line in the store is damaged."}

#: The errors of lines that were not answered, by how their batch ended.
_GIVEN_UP = {"expired": _EXPIRED, "cancelled": _CANCELLED, "failed": _FAILED}

#: By the code of such an error: what Anthropic's API has in its place, which is no error there.
_ENDS = {_EXPIRED["code"]: "expired", _CANCELLED["code"]: "canceled"}

#: Statuses below 500 that are not about the request itself: of its API key, or of what the server
#: does at the moment.
_PASSING = frozenset({401, 403, 408, 409, 429})


#: A line of the output, or of the errors: `OUTPUT` or `ERRORS`, and the line.
_Written: TypeAlias = tuple[str, Part]


def _is_final(status: int) -> bool:
    """True if the answer would be the same on another try."""
    cannot_be_done = 501  # by this model
    return (status < 500 and status not in _PASSING) or status == cannot_be_done


class Batches:
    """The batches of an app. They run as long as `run` does.

    Args:
        app: answers the lines. None begins once it drains.
    """

    def __init__(self, app: AppState) -> None:
        self._app = app
        self._store: Store
        self._places: FairLimiter
        self._jobs = Jobs()
        self._running: dict[str, trio.CancelScope] = {}

    async def run(self, store: Store) -> None:
        """Run the batches that are not over, and those that begin, until cancelled."""
        self._store, config = store, self._app.config
        # As many lines wait as run: those that begin together are computed together.
        n_waiting = max(1, min(config.parallel, config.max_queue // 4))
        # One task of each batch waits for a place, so their number needs no limit.
        self._places = FairLimiter(config.parallel + n_waiting, max_waiting=sys.maxsize)
        if config.store is not None:
            self._jobs.begin(self._resume)
        await self._jobs.run()

    async def _resume(self) -> None:
        """Run the batches that another process has left."""
        for kind in (KIND, MESSAGES):
            for record in await self._surely(partial(Records.open_ones, kind=kind)):
                self.start(record)

    def start(self, batch: Record) -> None:
        """Run a batch that is in the store, once the model is loaded. It is started once.

        Raises:
            ServerClosingError: the server ends.
        """
        if batch.id not in self._running:
            self._jobs.begin(partial(self._live, batch), partial(self._failed, batch))
            self._running[batch.id] = trio.CancelScope()

    def cancel(self, id_: str) -> None:
        """End a batch that the store has as ``cancelling``."""
        if (scope := self._running.get(id_)) is not None:
            scope.cancel()

    # -- the life of a batch

    async def _live(self, batch: Record) -> None:
        try:
            # It may be over: it was read some time ago.
            now = await self._surely(
                lambda records: records.find(batch.id, batch.kind, batch.owner)
            )
            if now is None or not now.is_open:
                return
            end = "cancelled"
            if now.body["status"] != "cancelling":
                with self._running[batch.id]:
                    end = await self._run(now)
            if end != "completed" or self._may_begin():
                await self._end(now, end)
        finally:
            del self._running[batch.id]

    def _failed(self, batch: Record, error: TrioServeError) -> None:
        """Note that a batch has failed, with what was answered until then."""
        _log.error("a batch has failed", id=batch.id, problem=error.message)
        self._jobs.begin(partial(self._end, batch, "failed", error))

    async def _end(self, batch: Record, end: str, error: TrioServeError | None = None) -> None:
        while await self._surely(partial(_give_up_some, batch=batch, end=end)):
            pass
        await self._surely(partial(_finish, batch=batch, end=end, error=error))

    async def _run(self, batch: Record) -> str:
        """Answer the lines of a batch in the time that it has; returns how it has ended."""
        left = max(0.0, batch.body["expires_at"] - time.time())
        with trio.move_on_after(left) as window:
            await self._answer_lines(batch)
        return "expired" if window.cancelled_caught else "completed"

    async def _answer_lines(self, batch: Record) -> None:
        """Answer the pending lines, those with the same beginning one after another."""
        numbers = await self._surely(lambda records: records.numbers_by_name(batch.id, PENDING))
        lines = _Lines(numbers, 2 * self._places.n_places)
        key, keys = "", self._app.keys
        async with trio.open_nursery() as nursery:
            async for n in lines.waiting:
                if keys.needed and keys.find(key) is None:
                    key = await self._key_of(batch)
                set_client(key or "batches")
                await lines.room.acquire()
                # Read here, and not at the same time as others: so lines are asked in their order.
                line = await self._surely(partial(Records.part, id=batch.id, side=PENDING, n=n))
                if line is None:  # the batch was deleted
                    lines.note_end()
                    lines.room.release()
                    continue
                if not self._may_begin():
                    return
                await nursery.start(self._answer_line, batch, key, lines, line)

    async def _key_of(self, batch: Record) -> str:
        """The API key that a batch is of. Waits until a client shows it: a file has only hashes."""

        def find(shown: frozenset[str]) -> str | None:
            return next((key for key in shown if self._store.owner_of(key) == batch.owner), None)

        keys = self._app.keys
        if (key := find(keys.shown.value)) is not None:
            return key
        _log.warning("a batch waits: its API key is not valid, or was not used since the start",
                     id=batch.id)  # fmt: skip
        shown = await keys.shown.wait_value(lambda value: find(value) is not None)
        key = find(shown)
        assert key is not None
        return key

    async def _answer_line(
        self,
        batch: Record,
        key: str,
        lines: _Lines,
        line: Part,
        *,
        task_status: trio.TaskStatus[None],
    ) -> None:
        """Try to answer a line, whose task has started when it has a place."""
        try:
            async with self._places.place():  # none is held in a pause: other keys may have a turn
                task_status.started()
                if not self._may_begin():
                    return
                result = await self._try(batch, key, line)
            if isinstance(result, Reply):
                await trio.sleep(lines.pause_after(result))
                lines.waiting.put(line.n)
            else:
                await self._surely(partial(_keep, batch=batch, written=result))
                lines.note_end()
        finally:
            lines.room.release()

    async def _try(self, batch: Record, key: str, line: Part) -> _Written | Reply:
        """Answer a line. Gives what is to be written, if the reply is final."""
        path = batch.body["endpoint"]
        with self._app.request() as held:
            caller = Caller.of_own(held, path, key)
            try:
                return await self._ask(batch, line, caller)
            except RecordDamagedError:
                return ERRORS, _line(batch, line.n, None, error=_DAMAGED)
            except TrioServeError as error:  # there is no memory, or too much waits for a thread
                reply, id_ = errors.reply(error, path), None
                if _is_final(reply.status):
                    id_ = await trio.to_thread.run_sync(_id_in, line)
                return await _written(batch, line.n, id_, caller, reply)

    async def _ask(self, batch: Record, line: Part, caller: Caller) -> _Written | Reply:
        held, keys = caller.held, self._app.keys
        held.grow(await offload(partial(weight_of, line.body), len(line.body)))
        id_, fields = await offload(partial(_request_in, line), len(line.body))
        is_reversed = self._app.config.priority_order == "lower-first"
        fields["priority"] = -_PRIORITY if is_reversed else _PRIORITY
        if keys.needed:
            caller.key = await keys.check(caller.api_key)
            held.belongs_to(caller.api_key)
        async with caller.resources:
            incoming = Incoming.of_fields(caller.path, fields, held)
            reply = await self._app.reply_to(incoming, caller)
            written = await _written(batch, line.n, id_, caller, reply)
        request_log.tell(caller, reply.status, batch=batch.id)
        return written

    def _may_begin(self) -> bool:
        return self._app.gate.phase.value is Phase.OPEN

    async def _surely(self, work: Callable[[Records], _T]) -> _T:
        """Run work on the store. If it cannot, such as when the disk is full, try again later.

        Raises:
            RecordDamagedError: what it reads is damaged.
        """
        pause = _PAUSE
        while True:
            try:
                return await self._store.do(work)
            except RecordDamagedError:
                raise
            except UnavailableError as error:
                _log.warning("a batch waits for the store", problem=error.message)
            await trio.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)


class _Lines:
    """The lines of a batch that have no answer. One that is tried again comes last."""

    def __init__(self, numbers: Sequence[int], n_at_once: int) -> None:
        self.waiting = Feed[int]()
        #: For those that have a task.
        self.room = trio.Semaphore(n_at_once)
        self._n_left = len(numbers)
        self._pause, self._until = 0.0, -math.inf
        for n in numbers:
            self.waiting.put(n)
        if not numbers:
            self.waiting.end()

    def note_end(self) -> None:
        """Note that a line needs no answer any longer."""
        self._pause = 0.0
        self._n_left -= 1
        if not self._n_left:
            self.waiting.end()

    def pause_after(self, reply: Reply) -> float:
        """The seconds before a line with this reply is tried again.

        Lines that fail during a pause have the same one; the next pause is longer, unless a line
        was answered meanwhile.
        """
        now = trio.current_time()
        wanted = min(whole_number(reply.headers.get("Retry-After", "")) or 0, _MAX_WAIT)
        if now >= self._until:
            self._pause = min(2 * self._pause, _MAX_PAUSE) or _PAUSE
            self._until = now + self._pause
        self._until = max(self._until, now + wanted)
        return self._until - now


def _request_in(line: Part) -> tuple[str, dict[str, Any]]:
    """Read the id and the fields of a line, which may be long. Raises RecordDamagedError."""
    value = line.value
    try:
        return value["custom_id"], {**value["body"]}
    except (TypeError, KeyError):
        raise damaged() from None


async def _written(
    batch: Record, n: int, id_: str | None, caller: Caller, reply: Reply
) -> _Written | Reply:
    """Write a line of the output, or of the errors, if the reply is final."""
    if not _is_final(reply.status):
        return reply
    make, size = await value_of(reply)

    def write() -> Part:
        told = {"status_code": reply.status, "request_id": caller.request_id, "body": make()}
        return _line(batch, n, id_, response=told)

    return OUTPUT if reply.status == 200 else ERRORS, await offload(write, size, LONG)


def _line(
    batch: Record,
    n: int,
    custom_id: str | None,
    *,
    response: Mapping[str, Any] | None = None,
    error: Mapping[str, str] | None = None,
) -> Part:
    """Write the answer to a line as the API of its batch has it."""
    written: dict[str, Any] = {"custom_id": custom_id}
    if batch.kind == MESSAGES:
        written["result"] = _result_of(response, error)
    else:
        id_ = f"batch_req_{batch.id.removeprefix('batch_')}_{n}"
        written = {"id": id_, **written, "response": response, "error": error}
    return Part(n, "", "".join(sse.encode_in_steps(written)).encode(errors="replace") + b"\n")


def _result_of(
    response: Mapping[str, Any] | None, error: Mapping[str, str] | None
) -> dict[str, Any]:
    """Write the result of one message."""
    if response is not None and response["status_code"] == 200:
        return {"type": "succeeded", "message": response["body"]}
    if response is not None:
        return {"type": "errored", "error": response["body"]}
    assert error is not None
    if (kind := _ENDS.get(error["code"])) is not None:
        return {"type": kind}
    told = {"type": "api_error", "message": error["message"]}
    return {"type": "errored", "error": {"type": "error", "error": told, "request_id": None}}


async def add_batch(
    store: Store, kind: str, owner: bytes, body: Mapping[str, Any], lines: Sequence[Part]
) -> Record:
    """Add a batch whose lines are to be answered. Raises StoreFullError."""
    id_, n_bytes = body["id"], sum(len(line.body) for line in lines)
    check = partial(Records.check_share, owner=owner, n_bytes=n_bytes)

    def add_files(records: Records) -> None:
        check(records)  # of two that were added at the same time, too
        for name in (OUTPUT, ERRORS):  # now: a batch must be able to end when the store is full
            file = file_body(f"{id_}_{name}.jsonl", 0, "batch_output", _file_id(id_, name))
            records.add(file["id"], _GROWING, owner, file, is_open=True)

    await store.do(check)
    await store.add(id_, kind, owner, body, parts=(PENDING, lines), is_open=True, then=add_files)
    # It is not read again: what is in the store is started, whatever happens to the store now.
    return Record(id_, kind, owner, body["created_at"], True, Part.of(0, "", body).body)


def _file_id(batch: str, name: str) -> str:
    """The id of a file of a batch: as hard to guess as that of the batch."""
    return f"file-{hashlib.blake2b(f'{batch} {name}'.encode(), digest_size=16).hexdigest()}"


# -- in the thread of the store


def _keep(records: Records, *, batch: Record, written: _Written) -> None:
    """Put an answer in the place of a pending line."""
    name, part = written
    if not records.remove(batch.id, PENDING, part.n):
        return
    records.check_share(batch.owner, len(part.body), has_begun=True)
    records.append(_file_id(batch.id, name), DATA, [part])
    _count(records, batch, "completed" if name == OUTPUT else "failed", 1)


def _count(records: Records, batch: Record, name: str, number: int) -> None:
    if (now := records.find(batch.id, batch.kind, batch.owner)) is not None:
        counts = now.body["request_counts"]
        counts[name] = counts.get(name, 0) + number
        records.change(batch.id, now.body, is_open=True)


def _give_up_some(records: Records, *, batch: Record, end: str) -> bool:
    """Remove some pending lines; errors take their place, but for some batches in OpenAI's form.

    Returns whether there were any.
    """
    has_errors = end == "expired" or batch.kind == MESSAGES
    lines = records.some(batch.id, PENDING)[:_MAX_GIVEN_UP]
    for line in lines:
        records.remove(batch.id, PENDING, line.n)
        if has_errors:
            error = _line(batch, line.n, _id_in(line), error=_GIVEN_UP[end])
            with suppress(StoreFullError):  # the bytes of the line are free, but it needs more
                records.append(_file_id(batch.id, ERRORS), DATA, [error])
    if lines and has_errors:
        code = _GIVEN_UP[end]["code"] if batch.kind == MESSAGES else ""
        _count(records, batch, _ENDS.get(code, "failed"), len(lines))
    return bool(lines)


def _id_in(line: Part) -> str | None:
    try:
        return str(line.value["custom_id"])
    except (RecordDamagedError, TypeError, KeyError):
        return None


def _finish(records: Records, *, batch: Record, end: str, error: TrioServeError | None) -> None:
    """End a batch whose lines are answered or given up, and show its files that have lines."""
    now = records.find(batch.id, batch.kind, batch.owner)
    if now is None or not now.is_open:
        return
    body, moment = body_of(now), int(time.time())
    for name in (OUTPUT, ERRORS):
        id_ = _file_id(batch.id, name)
        if n_bytes := records.size_of(id_, DATA):
            file = file_body(f"{batch.id}_{name}.jsonl", n_bytes, "batch_output", id_)
            records.change(id_, file, kind=FILE if batch.kind == KIND else RESULTS)
            body[f"{name}_file_id"] = id_
        else:
            records.delete(id_)
    body |= {"status": end, f"{end}_at": moment, "finalizing_at": moment}
    if error is not None:
        body["errors"] = errors_of(error.message)
    records.change(batch.id, body)


# -- what clients see

_WINDOW = 24 * 3600


def body_of(batch: Record) -> dict[str, Any]:
    """A batch as clients see it. One whose record is damaged has failed."""
    try:
        return batch.body
    except RecordDamagedError as error:
        return batch_body(batch.id, "failed", int(batch.created), errors=errors_of(error.message))


class _BatchError(answers.Answer):
    message: str
    code: str = "failed"
    line: int | None = None
    param: str | None = None


class _BatchErrors(answers.Answer):
    data: list[_BatchError]
    object: Literal["list"] = "list"


class _Counts(answers.Answer):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(answers.Answer, kw_only=True):
    """A batch as clients see it."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str = ""
    errors: _BatchErrors | None = None
    input_file_id: str = ""
    completion_window: str = "24h"
    status: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: _Counts = msgspec.field(default_factory=_Counts)
    metadata: dict[str, str] = msgspec.field(default_factory=dict)


def batch_body(id_: str, status: str, now: int, **fields: Any) -> dict[str, Any]:
    """Make a batch, with other fields than those of an empty one, as it is stored."""
    times: dict[str, Any] = {"expires_at": now + _WINDOW, f"{status}_at": now}
    batch = Batch(id=id_, status=status, created_at=now, **times, **fields)
    body: dict[str, Any] = msgspec.to_builtins(batch)
    return body


def errors_of(message: str) -> dict[str, Any]:
    """Make the errors of a batch that has failed."""
    body: dict[str, Any] = msgspec.to_builtins(_BatchErrors([_BatchError(message)]))
    return body


class File(answers.Answer, kw_only=True):
    """A file as clients see it."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: str = "processed"
    status_details: str | None = None


def file_body(name: str, n_bytes: int, purpose: str, id_: str | None = None) -> dict[str, Any]:
    """Make a file, by default with a new id, as it is stored."""
    now = int(time.time())
    file = File(
        id=id_ or new_id("file", "-"), bytes=n_bytes, created_at=now, filename=name, purpose=purpose
    )
    body: dict[str, Any] = msgspec.to_builtins(file)
    return body
