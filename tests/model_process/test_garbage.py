"""A hostile process: for any message, it is killed with a reason, or ignored."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio

from tests.support.event_source import gated
from tests.support.model_processes import InName, OneModel, one_model
from tests.support.waiting import patiently, until
from trioserve.children.frames import framed
from trioserve.errors import ModelProcessError, TrioServeError

pack = msgspec.msgpack.encode


async def after(said: bytes, *, half: bool = False) -> tuple[str | None, list[Exception], OneModel]:
    """Have a process send bytes while two streams run; gives why it was killed, and their errors.

    With `half`, it ends then.
    """
    backend, gate = gated("x" * 1000)
    errors: list[Exception] = []
    async with one_model(backend) as one, trio.open_nursery() as nursery:

        async def ask() -> None:
            try:
                await one.server.complete("a")
            except ModelProcessError as error:
                errors.append(error)

        for _ in range(2):
            nursery.start_soon(ask)
        await until(lambda: gate.n_asked)
        with trio.move_on_after(30):
            await send(one.process, said)
        if half:
            one.process.die()
        with patiently():
            await one.child.ended.wait()
            await until(lambda: len(errors) == 2)
        gate.open()
    return one.child.message, errors, one


async def send(process: InName, data: bytes) -> None:
    """Send bytes as they are."""
    assert process.end is not None
    with memoryview(data) as view:
        at = 0
        while at < len(view):
            try:
                at += process.end.send(view[at:], 0x40)  # it does not block
            except BlockingIOError:
                await trio.lowlevel.wait_writable(process.end)
            except OSError:
                return  # the app has closed it


OPENED = {"tasks": [[1, {"tokens": b"\0" * 4, "media": []}]], "opening": None}
MEDIA = {"tasks": [[7, {"tokens": b"\0" * 4, "media": [[0, "image", 2**40, 1]]}]], "opening": None}

GARBAGE: dict[str, bytes] = {
    "no length": b"\xff" * 100,
    "no msgpack": framed(b"nonsense"),
    "a frame of 100 MB": framed(b"x" * 100_000_000),
    "a number": framed(pack(5)),
    "an unknown report": framed(pack({"state": "unknown"})),
    "an unknown tag": framed(pack([[99, 1]])),
    "fields that are missing": framed(pack([[0, 1]])),
    "tokens that are text": framed(pack([[0, 1, "a", ["b"], 0.0, [0, 0]]])),
    "deep nesting": framed(b"\x91" * 100_000 + b"\xc0"),
    "an answer to no request": framed(pack([[6, 10**6, b""]])),
    "an error to no request": framed(pack([[7, -1, {"kind": "A", "fields": {}}]])),
    "an answer again": framed(pack([[6, 1, pack(OPENED)]])),
    "an answer of another type": framed(pack([[6, 2, pack(5)]])),
    "an event of a transcript to no request": framed(pack([[8, 10**9]])),
    "an event of speech to no request": framed(pack([[11, 10**6]])),
    "half a sample": framed(pack([[11, 1, b"abc"]])),
    "a sample that is no number": framed(pack([[11, 1, b"\0\0\xc0\x7f"]])),
    "more sound than there may be": framed(pack([[11, 1, b"\0" * 4]] * 5)),
    "no model": framed(pack([[9, {"info": 5}]])),
    "a malformed model": framed(pack([[9, [1, 2]]])),
    "no adapters": framed(pack([[10, {"paths": 5}]])),
    "a prompt of many cells": framed(pack([[6, 1, pack(MEDIA)]])),
    "more output than there may be": framed(pack([[0, 1, "x" * 2**25, [1], 0.0, [0, 0]]])),
    "scores of several lengths": framed(
        pack([[1, [1, "a", [1], [], 0.0, [0, 0], [2, [b"", b"", b"", b"", b"x" * 8], {}]]]])
    ),
}


@pytest.mark.parametrize("said", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_ends_the_process_and_each_stream_has_one_error(said: bytes) -> None:
    message, errors, one = await after(said)
    assert message is not None and message.startswith("Its socket is broken: ")
    assert len(errors) == 2 and errors[0] is not errors[1]
    assert not one.child.line._calls and not one.child.line._mailboxes


async def test_half_a_frame_is_ignored() -> None:
    message, errors, _ = await after(framed(b"x" * 1000)[:500], half=True)
    assert message is None and len(errors) == 2


HARMLESS: dict[str, Any] = {
    "nothing": [],
    "output of a task that is not there": [[0, 10**6, "a", [1], 0.0, [0, 0]]],
    "the end of a task that is not there": [[5, 10**6, {"kind": "A", "fields": {}}]],
    "a task that is not there moves": [[3, 10**6, True]],
}


@pytest.mark.parametrize("said", HARMLESS.values(), ids=HARMLESS.keys())
async def test_what_is_said_of_a_task_that_has_ended_is_ignored(said: Any) -> None:
    async with one_model() as one:
        one.process.say(pack(said))
        assert (await one.server.complete("a", max_tokens=2)).text
        assert one.child.message is None


@pytest.mark.parametrize(
    "fields",
    [
        {"message": "No.", "status": 99999, "type": 5, "code": 7, "param": 5, "retry_after": "x"},
        {"message": 5, "args": 1, "again": 2, "__class__": "x"},
        {},
    ],
)
@pytest.mark.parametrize("kind", ["RateLimitError", "BaseException", "nothing", "annotations"])
async def test_an_error_has_no_fields_that_its_class_has(kind: str, fields: dict[str, Any]) -> None:
    backend, gate = gated("x" * 100)
    async with one_model(backend) as one, trio.open_nursery() as nursery:

        async def fail() -> None:
            await until(lambda: gate.n_asked and one.child.line._mailboxes)
            (task_id,) = one.child.line._mailboxes
            one.process.say(pack([[5, task_id, {"kind": kind, "fields": fields}]]))

        nursery.start_soon(fail)
        with pytest.raises(TrioServeError) as caught:
            await one.server.complete("a")
        gate.open()
        error: Any = caught.value
        assert 400 <= error.status < 600 and isinstance(error.type, str)
        assert isinstance(error.message, str) and error.again() is not error
        assert error.param is None or isinstance(error.param, str)
        assert error.retry_after is None or isinstance(error.retry_after, float)


@pytest.mark.parametrize(
    "fields",
    [
        {"event": "a", "level": "info", "self": 1, "args": 1, "logger": 5, "exc_info": True},
        {"event": 1.5, "level": 5, "_record": None, "stack_info": "x", "name": 1},
        {},
    ],
)
async def test_any_line_of_a_log_is_written(fields: dict[str, Any]) -> None:
    async with one_model() as one:
        one.process.say(pack({"state": "logged", "fields": fields}))
        assert (await one.server.complete("a", max_tokens=2)).text
        assert one.child.message is None
