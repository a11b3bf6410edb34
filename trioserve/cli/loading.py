"""Loading the model, with a report of how far it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
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

    def both(share: float) -> bool:
        report(share)
        status.progress(share)
        return progress is None or progress(share)

    try:
        return llama.load(config, progress=both)
    finally:
        report.end()


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
