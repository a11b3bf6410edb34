"""`Outbox`: the messages to an MCP server that are not sent yet."""

from __future__ import annotations

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCRequest, JSONRPCResponse

from trioserve.concurrency import Feed

#: Bytes that a server leaves unread. Calls wait while there are more, and answers are dropped.
MAX_UNREAD = 16 * 2**20

#: Bytes that are counted for a message in addition to its text.
_OVERHEAD = 500


class Outbox(Feed[tuple[SessionMessage, bytes]]):
    """A queue of messages, each with its JSON and a newline.

    It has a limit, and never waits to say that a call was given up.
    """

    def __init__(self) -> None:
        super().__init__(MAX_UNREAD, weigh=lambda item: len(item[1]) + _OVERHEAD)

    async def send(self, item: SessionMessage) -> None:
        """Have a message sent. The answer to a request of a server that does not read is dropped.

        Raises:
            anyio.BrokenResourceError: the server has ended, or no longer reads.
        """
        data = item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
        if isinstance(item.message, JSONRPCRequest):
            await self.room()
        is_answer = isinstance(item.message, JSONRPCResponse | JSONRPCError)
        if self.is_over or (is_answer and self.is_full):
            raise anyio.BrokenResourceError
        self.put((item, data))

    async def aclose(self) -> None:
        self.end()

    async def __aenter__(self) -> Outbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()
