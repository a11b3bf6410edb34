"""Tools that are run: what is told of each call when it has ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import attrs

from trioserve.server.context import RequestContext

#: How a call may end: it has a result; the result is an error; it was not allowed; a person has
#: stopped it; nobody waits for it any more.
ToolOutcome: TypeAlias = Literal["finished", "failed", "denied", "stopped", "cancelled"]

TOOL_OUTCOMES: tuple[ToolOutcome, ...] = ("finished", "failed", "denied", "stopped", "cancelled")


@attrs.define(eq=False)
class ToolWork:
    """The work on one call. If nothing else is noted, it was cancelled."""

    #: Empty if the server has no such tool: a model may call it anything.
    tool: str
    kind: str
    call_id: str = ""
    context: RequestContext = attrs.field(factory=RequestContext, repr=False)
    #: For how long the tool ran, without the time in which a person was asked.
    seconds: float = 0.0
    outcome: ToolOutcome = "cancelled"
    #: Whether the tool was run at all.
    ran: bool = False

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure a block: the tool runs."""
        self.ran, began = True, monotonic()
        try:
            yield
        finally:
            self.seconds = monotonic() - began


@runtime_checkable
class ToolObserver(Protocol):
    """An `Observer` that follows calls of tools, too."""

    def tool_ended(self, work: ToolWork) -> None:
        """Note a call that has ended. Called exactly once."""


@contextmanager
def observed_tool(observers: Iterable[object], work: ToolWork) -> Iterator[ToolWork]:
    """Tell those observers of a call that follow them, when the block has ended."""
    try:
        yield work
    finally:
        for observer in observers:
            if isinstance(observer, ToolObserver):
                observer.tool_ended(work)
