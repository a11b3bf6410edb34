"""What is taken of the messages of an MCP server."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import given, strategies as st
from mcp_types import JSONRPCError, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse

from tests.support.json_values import JSON
from trioserve.tools.mcp import messages
from trioserve.tools.mcp.messages import MAX_ID, MAX_VALUES, Intake, count_values, fault_of


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


LONG = "x" * (MAX_ID + 1)
FAULTY = [
    JSONRPCRequest(jsonrpc="2.0", id=LONG, method="ping"),
    JSONRPCRequest(jsonrpc="2.0", id=1, method=LONG),
    JSONRPCRequest(jsonrpc="2.0", id=10**400, method="ping"),
    JSONRPCResponse(jsonrpc="2.0", id="9" * 5000, result={}),
    JSONRPCNotification(
        jsonrpc="2.0", method="notifications/cancelled", params={"requestId": "9" * 5000}
    ),
    *(
        JSONRPCNotification(jsonrpc="2.0", method="notifications/progress", params=params)
        for params in (
            {"progressToken": "9" * 5000, "progress": 1},
            {"progressToken": 1, "progress": 10**400},
            {"progressToken": 1, "progress": 1, "total": -(10**400)},
        )
    ),
]


def test_ids_and_numbers_that_the_protocol_does_not_need() -> None:
    assert all(fault_of(message) for message in FAULTY)
    assert not fault_of(JSONRPCRequest(jsonrpc="2.0", id="x" * MAX_ID, method="ping"))
    progress = {"progressToken": "1", "progress": 2**53, "total": 1e300}
    assert not fault_of(
        JSONRPCNotification(jsonrpc="2.0", method="notifications/progress", params=progress)
    )
    assert not fault_of(JSONRPCResponse(jsonrpc="2.0", id=1, result={"id": LONG}))
