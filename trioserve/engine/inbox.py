"""What the event loop asks of the engine: commands, and the queue they come through."""

from __future__ import annotations

import threading
from collections.abc import Callable

import attrs

from trioserve.engine.encoder import Encoded
from trioserve.types import EmbeddingTask, Task


@attrs.frozen
class Submit:
    """Run a task."""

    task: Task | EmbeddingTask


@attrs.frozen
class Cancel:
    """Drop a task, wherever it is. Unknown or finished ones are no error: the two may cross."""

    task_id: int


@attrs.frozen
class Pause:
    """Leave a task in its slot, but out of the steps: its reader is behind."""

    task_id: int


@attrs.frozen
class Resume:
    """Undo `Pause`."""

    task_id: int


@attrs.frozen
class Call:
    """Call a function on the inference thread, between two steps. It must not raise."""

    function: Callable[[], None]


@attrs.frozen
class SlotCall:
    """Call a function on the inference thread while a slot is idle. It must not raise."""

    slot_id: int
    function: Callable[[], None]


@attrs.frozen
class Stop:
    """End the loop."""


Command = Submit | Cancel | Pause | Resume | Call | SlotCall | Encoded | Stop


class Inbox:
    """A queue from any thread to the engine. Waiting on it uses no CPU."""

    def __init__(self) -> None:
        self._commands: list[Command] = []
        self._arrived = threading.Condition()
        #: Called after each `put`, for a driver that calls `Loop.step` itself.
        self.listener: Callable[[], None] | None = None

    def put(self, command: Command) -> None:
        """Append a command. Holds the lock for no longer than that."""
        with self._arrived:
            self._commands.append(command)
            self._arrived.notify()
        if self.listener is not None:
            self.listener()

    def take(self, *, wait: bool) -> list[Command]:
        """Take all commands; with `wait`, sleep until there is one."""
        if not wait and not self._commands:
            return []  # no lock on the way of every step
        with self._arrived:
            while wait and not self._commands:
                self._arrived.wait()
            commands, self._commands = self._commands, []
        return commands
