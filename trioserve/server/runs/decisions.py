"""`Decisions`: what people say about the calls of a run."""

from __future__ import annotations

import attrs
import trio

from trioserve.errors import ToolCallDecidedError, UnknownToolCallError


@attrs.frozen
class Decision:
    """Whether a call may run, and why."""

    approved: bool
    reason: str = ""


@attrs.define(eq=False)
class _Call:
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    is_waiting: bool = False
    decided: trio.Event = attrs.field(factory=trio.Event)
    decision: Decision | None = None
    is_stopped: bool = False
    is_over: bool = False


class Decisions:
    """The calls of a run, by id, for those who approve them and stop them."""

    def __init__(self) -> None:
        self._calls: dict[str, _Call] = {}

    def begin(self, call_id: str) -> trio.CancelScope:
        """Know a call from now on. Returns the scope to run it in."""
        self._calls[call_id] = call = _Call()
        return call.scope

    def end(self, call_id: str) -> None:
        """Note that a call is over."""
        self._calls[call_id].is_over = True

    def is_stopped(self, call_id: str) -> bool:
        """Whether somebody has stopped it."""
        return self._calls[call_id].is_stopped

    async def wait(self, call_id: str, timeout: float) -> Decision:
        """Wait until somebody decides about a call; after `timeout` seconds it is refused."""
        call = self._calls[call_id]
        call.is_waiting = True
        try:
            with trio.move_on_after(timeout):
                await call.decided.wait()
        finally:
            call.is_waiting = False
        return call.decision or Decision(False, f"nobody has decided within {timeout:g} seconds")

    def decide(self, call_id: str, *, approved: bool, reason: str = "") -> None:
        """Decide about a call that waits for that.

        Raises:
            UnknownToolCallError: there is no such call.
            ToolCallDecidedError: it does not wait, or not any more.
        """
        call = self._find(call_id)
        if not call.is_waiting or call.decision is not None:
            raise ToolCallDecidedError(
                f"The call {call_id!r} does not wait for approval.", param="call_id"
            )
        call.decision = Decision(approved, reason)
        call.decided.set()

    def stop(self, call_id: str) -> None:
        """Cancel a call. Raises as `decide`, if it is over."""
        call = self._find(call_id)
        if call.is_over or call.is_stopped:
            raise ToolCallDecidedError(f"The call {call_id!r} has ended already.", param="call_id")
        call.is_stopped = True
        call.scope.cancel()

    def _find(self, call_id: str) -> _Call:
        call = self._calls.get(call_id)
        if call is None:
            raise UnknownToolCallError(
                f"There is no call {call_id!r:.80} in this answer.", param="call_id"
            )
        return call
