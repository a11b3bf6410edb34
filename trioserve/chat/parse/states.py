"""A parser that goes from state to state, with the text that is not certain yet."""

from __future__ import annotations

from collections.abc import Callable


class StateParser:
    """Has a buffer, and a state that takes from it.

    A state is a method: it is told whether no more text comes, takes what is certain from the
    buffer, may put another state in its place, and returns whether to go on.
    """

    _step: Callable[[bool], bool]

    def __init__(self) -> None:
        self._buffer = ""

    def feed(self, text: str) -> None:
        """Take more text."""
        self._buffer += text
        while self._buffer and self._step(False):
            pass

    def finish(self) -> None:
        """Say that no more text comes."""
        while self._step(True):
            pass

    def _drop(self, count: int) -> str:
        """Take characters off the buffer."""
        dropped, self._buffer = self._buffer[:count], self._buffer[count:]
        return dropped
