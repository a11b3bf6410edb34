"""The events of an engine, one by one."""

from __future__ import annotations

from trioserve.engine.loop import EngineLoop
from trioserve.types import Chunks, EngineEvent


def take_events(engine: EngineLoop) -> list[EngineEvent]:
    """Take all pending events."""
    events: list[EngineEvent] = []
    for one in engine.take():
        events += one if isinstance(one, Chunks) else [one]
    return events
