"""The events of an engine, one by one."""

from __future__ import annotations

from trioserve.engine import Engine
from trioserve.engine.loop import Call, EngineLoop
from trioserve.engine.slot import Slot
from trioserve.types import Chunks, EngineEvent


def take_events(engine: EngineLoop) -> list[EngineEvent]:
    """Take all pending events."""
    events: list[EngineEvent] = []
    for one in engine.take():
        events += one if isinstance(one, Chunks) else [one]
    return events


def preempt(engine: Engine, slot: Slot) -> None:
    """Preempt the request of a slot, between two steps."""
    engine._take(Call(lambda: engine._scheduler.preempt(slot)))
