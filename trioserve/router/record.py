"""What a fleet knows of one model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import attrs

from trioserve.models.catalog import ModelEntry
from trioserve.router.child import Child
from trioserve.router.deaths import Deaths
from trioserve.router.states import ModelState, Status


@attrs.define(eq=False)
class Record:
    """A model, its process if it has one, and what became of the last one."""

    entry: ModelEntry
    child: Child | None = None
    is_ready: bool = False  # its process was ready once, though it may sleep
    status: Status = Status.UNLOADED
    args: tuple[str, ...] = ()
    progress: float | None = None
    info: Mapping[str, Any] = attrs.field(factory=dict)
    failed: bool = False
    exit_code: int | None = None
    message: str | None = None
    log_tail: tuple[str, ...] = ()
    last_used: float | None = None
    deaths: Deaths = attrs.field(factory=Deaths)

    def begin(self, child: Child) -> None:
        """A process is being started."""
        self.child, self.is_ready = child, False
        self.status = Status.LOADING
        self.args = (*self.entry.args, "--host", str(child.socket_path))
        self.progress, self.info = None, {}
        self.failed, self.exit_code, self.message, self.log_tail = False, None, None, ()
        self.use()

    def end(self, child: Child) -> None:
        """Its process has ended."""
        self.child, self.is_ready = None, False
        self.status = Status.UNLOADED
        self.progress = None
        self.exit_code = child.exit_code
        self.failed = not child.asked
        if self.failed:
            self.message, self.log_tail = child.last_words(), tuple(child.lines)

    def use(self) -> None:
        """Note that it is in use now."""
        self.last_used = time.time()

    def state(self, *, n_requests: int, n_waiting: int, memory: int | None) -> ModelState:
        """Show it to others, with what the schedule knows of it."""
        return ModelState(
            value=self.status,
            args=self.args,
            pid=self.child.pid if self.child is not None else None,
            socket_path=self.child.socket_path if self.child is not None else None,
            progress=self.progress,
            info=self.info,
            failed=self.failed,
            exit_code=self.exit_code,
            message=self.message,
            log_tail=self.log_tail,
            last_used=self.last_used,
            n_requests=n_requests,
            n_waiting=n_waiting,
            memory=memory,
        )
