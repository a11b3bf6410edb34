"""Loading the model, with a report of how far it is."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, TextIO

import structlog

from trioserve import llama
from trioserve.cli.status import StatusPipe
from trioserve.config import Config

if TYPE_CHECKING:
    from trioserve.engine import AnyBackend

_log = structlog.stdlib.get_logger("trioserve")


def load(
    status: StatusPipe, config: Config, *, progress: Callable[[float], bool] | None = None
) -> AnyBackend:
    """Load the model, and tell how far it is. Runs in a worker thread."""
    report = LoadReport(config.model or "the bundled model", sys.stderr)

    def all_of_them(share: float) -> bool:
        goes_on()
        report(share)
        status.progress(share)
        return progress is None or progress(share)

    if config.rpc:
        from trioserve.llama.rpc import library

        library.connect(config)
    with _ended_if_stalled(status, config.watchdog_timeout if config.rpc else 0.0) as goes_on:
        try:
            return llama.load(config, progress=all_of_them)
        finally:
            report.end()


@contextmanager
def _ended_if_stalled(status: StatusPipe, seconds: float) -> Iterator[Callable[[], None]]:
    """End this process when loading makes no progress, because another machine does not answer.

    The block calls the function that it gets whenever there is some. With 0 seconds, nothing is
    ended.
    """
    moved, over = threading.Event(), threading.Event()

    def watch() -> None:
        while moved.wait(seconds):
            moved.clear()
            if over.is_set():
                return
        message = f"Loading the model has made no progress for {seconds:g} seconds."
        _log.error(message)
        status.tell("failed", message=message)
        os._exit(1)

    if not seconds:
        yield moved.set
        return
    thread = threading.Thread(target=watch, name="trioserve-loading", daemon=True)
    thread.start()
    try:
        yield moved.set
    finally:
        over.set()
        moved.set()
        thread.join()


class LoadReport:
    """Tells how far loading is: a line that changes on a terminal, else a log line each quarter.

    Says nothing in the first `patience` seconds, because most models are there by then.
    """

    def __init__(self, name: str, stream: TextIO, *, patience: float = 1.0) -> None:
        self._name = name
        self._stream = stream
        self._speaks_at = monotonic() + patience
        self._quarters = 0
        self._has_line = False

    def __call__(self, share: float) -> None:
        """Report that `share` (0.0 to 1.0) is loaded."""
        if monotonic() < self._speaks_at:
            return
        if self._stream.isatty():
            self._has_line = True
            self._stream.write(f"\rLoading {self._name}: {share:4.0%}")
            self._stream.flush()
        elif int(share * 4) > self._quarters:
            self._quarters = int(share * 4)
            _log.info("loading", model=self._name, percent=self._quarters * 25)

    def end(self) -> None:
        """Leave the terminal's line clean."""
        if self._has_line:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
