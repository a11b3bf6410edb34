"""The limits of messages to and from an MCP server."""

from __future__ import annotations

import json
from typing import Any

import anyio
import msgspec
import pytest
import trio
import trio.testing
from hypothesis import given, strategies as st
from mcp.shared.message import SessionMessage
from mcp_types import (
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
)
from trio.testing import wait_all_tasks_blocked

from tests.support.json_values import JSON
from trioserve.tools.mcp import messages
from trioserve.tools.mcp.messages import MAX_VALUES, Intake, Outbox, Pace, count_values, fault_of


def n_values(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(n_values, value.values()))
    return 1 + sum(map(n_values, value)) if isinstance(value, list) else 1


@given(JSON, st.booleans(), st.integers(0, 12))
def test_values_are_counted(value: Any, ascii: bool, limit: int) -> None:
    data = json.dumps(value, ensure_ascii=ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "MAX_VALUES", limit)
        is_refused = count_values(data) > limit
    assert is_refused or n_values(value) - 1 <= limit
    assert not is_refused or 2 * n_values(value) > limit  # an empty list counts as two


TEXTS = ("," * 300_000, '[{"a": 1}, ' * 100_000, "\\" * 200_000 + '",', 'a\\",' * 100_000)


@pytest.mark.parametrize("text", TEXTS, ids=["commas", "json", "backslashes", "escapes"])
async def test_a_long_text_has_one_value(text: str) -> None:
    data = json.dumps({"jsonrpc": "2.0", "id": 1, "result": {"text": text}}).encode()
    message = await Intake().read(data)
    assert isinstance(message, JSONRPCResponse)
    assert message.result == {"text": text}


MANY = (
    "[" + "[]," * MAX_VALUES + "[]]",
    "[" + "1," * MAX_VALUES + "1]",
    json.dumps(["x"] * (2 * MAX_VALUES)),
    json.dumps([{"\\": '\\",'}] * MAX_VALUES),
)


@pytest.mark.parametrize("many", MANY, ids=["lists", "numbers", "texts", "objects"])
async def test_an_answer_with_too_many_values_is_an_error_for_its_call(many: str) -> None:
    line = f'{{"jsonrpc": "2.0", "result": {{"a": {many}}}, "id": 7}}'.encode()
    message = await Intake().read(line)
    assert isinstance(message, JSONRPCError)
    assert (message.id, message.error.code) == (7, messages.TRANSPORT_FAILED)
    assert "more than 100,000 values" in message.error.message
    with pytest.raises(msgspec.MsgspecError):  # nobody asked for that
        await Intake().read(many.encode())


async def test_long_messages_count_for_the_pace(autojump_clock: trio.testing.MockClock) -> None:
    intake, start = Intake(), trio.current_time()
    for _ in range(20):
        assert await intake.admit(b"x" * 2**23) is None
    assert 8 < trio.current_time() - start < 12  # 16 MiB a second
    start = trio.current_time()
    for _ in range(20):
        assert await intake.admit(b"," * MAX_VALUES) is None
    assert 4 < trio.current_time() - start < 7  # 400,000 values a second


async def test_a_pace(autojump_clock: trio.testing.MockClock) -> None:
    pace, start = Pace(10), trio.current_time()
    for _ in range(10):
        await pace.step()
    assert trio.current_time() == start
    for _ in range(10):
        await pace.step()
    assert trio.current_time() - start == pytest.approx(1)
    await trio.sleep(100)  # what was not used is not saved for later
    for _ in range(30):
        await pace.step()
    assert trio.current_time() - start == pytest.approx(103)


REQUEST = JSONRPCRequest(jsonrpc="2.0", id=1, method="tools/call", params={"a": "x" * 1000})
ANSWER = JSONRPCResponse(jsonrpc="2.0", id="x", result={"a": "x" * 1000})
GIVEN_UP = JSONRPCNotification(jsonrpc="2.0", method="cancelled", params={"requestId": 1})


async def send(outbox: Outbox, message: JSONRPCMessage) -> None:
    await outbox.send(SessionMessage(message))


async def test_a_server_that_does_not_read_gets_no_more_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "MAX_UNREAD", 10_000)
    outbox, n_kept = Outbox(), 0
    with pytest.raises(anyio.BrokenResourceError):  # which the SDK takes for a closed stream
        while True:
            await send(outbox, ANSWER)
            n_kept += 1
    assert 5 < n_kept <= 10
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send, outbox, REQUEST)  # waits
        await send(outbox, GIVEN_UP)
        await wait_all_tasks_blocked()
        sent = [(await anext(outbox.__aiter__()))[0].message for _ in range(n_kept + 1)]
        assert sent == [ANSWER] * n_kept + [GIVEN_UP]
    assert (await anext(outbox.__aiter__()))[0].message == REQUEST
    await send(outbox, ANSWER)


async def test_nothing_is_sent_after_the_end() -> None:
    outbox = Outbox()
    outbox.end()
    for message in (REQUEST, ANSWER, GIVEN_UP):
        with pytest.raises(anyio.BrokenResourceError):
            await send(outbox, message)


def test_ids_and_numbers_that_the_protocol_does_not_need() -> None:
    report = {"jsonrpc": "2.0", "method": "notifications/progress"}
    long, huge = "9" * 5000, 10**400
    assert fault_of(JSONRPCRequest(jsonrpc="2.0", id=long, method="ping"))
    assert fault_of(JSONRPCRequest(jsonrpc="2.0", id=huge, method="ping"))
    assert fault_of(JSONRPCNotification(**report, params={"progressToken": long}))
    assert fault_of(JSONRPCNotification(**report, params={"progressToken": 1, "total": -huge}))
    assert not fault_of(JSONRPCNotification(**report, params={"progressToken": 1, "total": 1e300}))
    assert not fault_of(JSONRPCResponse(jsonrpc="2.0", id=1, result={"id": long}))
