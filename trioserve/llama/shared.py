"""`Shared`: a pointer of C that several threads use, and that one frees when no one does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trioserve.errors import ServerClosingError


class Shared:
    """Keeps a pointer valid while a thread uses it.

    Closing waits for running calls; a later one raises `ServerClosingError`.
    """

    def __init__(self, handle: Any) -> None:
        self._handle: Any = handle
        self._users = 0
        self._idle = threading.Condition()

    @property
    def is_closed(self) -> bool:
        """Whether it is, or will be once nobody uses it."""
        return self._handle is None

    @contextmanager
    def in_use(self) -> Iterator[Any]:
        """Lend the pointer, which nobody frees meanwhile."""
        with self._idle:
            if (handle := self._handle) is None:
                raise ServerClosingError("The model is closed")
            self._users += 1
        try:
            yield handle
        finally:
            with self._idle:
                self._users -= 1
                self._idle.notify_all()

    def close(self) -> Any:
        """Wait for running calls, and refuse later ones.

        Returns the pointer, which is the caller's to free; None the second time.
        """
        with self._idle:
            handle, self._handle = self._handle, None
            self._idle.wait_for(lambda: self._users == 0)
        return handle
