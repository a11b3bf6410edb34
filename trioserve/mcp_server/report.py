"""`Report`: tells a client every now and then that its call is being worked on."""

from __future__ import annotations

import trio
from mcp.server.session import ServerSession

#: Seconds between two notifications of one call.
_INTERVAL = 0.5

#: Characters of a message.
_MAX_MESSAGE = 4000


class Report:
    """The progress of a call: seconds, and the text that has come since the last notification.

    A client that asks for progress starts its timeout again with each. Nothing is sent to others.
    """

    def __init__(self, session: ServerSession) -> None:
        self._session = session
        self._state = ""
        self._text = ""

    def waits(self, state: str) -> None:
        """Take what the call is waiting for; empty: it is worked on."""
        self._state = state

    def comes(self, text: str) -> None:
        """Take text that has come."""
        self._text = (self._text + text)[-_MAX_MESSAGE:]

    async def run(self) -> None:
        """Notify the client until cancelled."""
        begun = trio.current_time()
        while True:
            await trio.sleep(_INTERVAL)
            message, self._text = self._text or self._state, ""
            seconds = round(trio.current_time() - begun, 3)
            await self._session.report_progress(seconds, message=message or None)
