"""What waits to be sent to an MCP server."""

from __future__ import annotations

import anyio
import pytest
import trio
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCMessage, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse
from trio.testing import wait_all_tasks_blocked

from trioserve.tools.mcp import outbox as module
from trioserve.tools.mcp.outbox import Outbox

REQUEST = JSONRPCRequest(jsonrpc="2.0", id=1, method="tools/call", params={"a": "x" * 1000})
ANSWER = JSONRPCResponse(jsonrpc="2.0", id="x", result={"a": "x" * 1000})
GIVEN_UP = JSONRPCNotification(
    jsonrpc="2.0", method="notifications/cancelled", params={"requestId": 1}
)


async def send(outbox: Outbox, message: JSONRPCMessage) -> None:
    await outbox.send(SessionMessage(message))


async def test_a_server_that_does_not_read_gets_no_more_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_UNREAD", 10_000)
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
        messages = [(await anext(outbox.__aiter__()))[0].message for _ in range(n_kept + 1)]
        assert messages == [ANSWER] * n_kept + [GIVEN_UP]
    assert (await anext(outbox.__aiter__()))[0].message == REQUEST
    await send(outbox, ANSWER)


async def test_nothing_is_sent_after_the_end() -> None:
    outbox = Outbox()
    outbox.end()
    for message in (REQUEST, ANSWER, GIVEN_UP):
        with pytest.raises(anyio.BrokenResourceError):
            await send(outbox, message)
