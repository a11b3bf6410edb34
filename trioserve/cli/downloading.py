"""Downloading models, with a report of how far it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, TextIO

import structlog

from trioserve.cli.status import StatusPipe
from trioserve.config import Config
from trioserve.models import fetch as fetching

if TYPE_CHECKING:
    from trioserve.models.hub import Progress

_log = structlog.stdlib.get_logger("trioserve")

_BAR = 20  # characters


async def fetch(status: StatusPipe, config: Config) -> Config:
    """Find the models that a configuration names, and tell how far the downloads are.

    Raises:
        TrioServeError: as `trioserve.models.fetch.fetch`.
    """
    with reporting(sys.stderr) as report:

        def both(progress: Progress) -> None:
            report(progress)
            status.progress(progress.all_done / max(progress.all_total, 1), "downloading")

        return await fetching.fetch(config, both)


@contextmanager
def reporting(stream: TextIO) -> Iterator[DownloadReport]:
    """Make a report that leaves the terminal's line clean."""
    report = DownloadReport(stream)
    try:
        yield report
    finally:
        report.end()


class DownloadReport:
    """Tells how far a download is: a bar on a terminal, else a log line each tenth."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._has_line = False
        self._tenths = 0
        self._first: tuple[float, int] | None = None  # when, and how many bytes were there

    def __call__(self, progress: Progress) -> None:
        """Report how far it is."""
        now, done, total = monotonic(), progress.all_done, progress.all_total
        if self._first is None:
            self._first = now, done
            if done == total:
                return  # it was there
        seconds, n_new = now - self._first[0], done - self._first[1]
        speed = n_new / seconds if seconds > 0 else 0.0
        name = progress.url.rpartition("/")[2].partition("?")[0]
        if self._is_terminal:
            self._has_line = True
            self._stream.write(f"\r{_line(name, done, total, speed)}\x1b[K")
            self._stream.flush()
        elif total and done * 10 // total > self._tenths:
            self._tenths = done * 10 // total
            _log.info(
                "downloading",
                file=name,
                percent=self._tenths * 10,
                megabytes=round(total / 1e6),
                megabytes_per_second=round(speed / 1e6, 1),
            )

    def end(self) -> None:
        """Leave the terminal's line clean."""
        if self._has_line:
            self._has_line = False
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def _line(name: str, done: int, total: int, speed: float) -> str:
    if len(name) > 40:
        name = f"{name[:18]}…{name[-21:]}"
    pace = f"{speed / 1e6:.1f} MB/s"
    if not total:
        return f"{name}: {done / 1e9:.2f} GB, {pace}"
    bar = ("#" * (done * _BAR // total)).ljust(_BAR)
    left = f", {_time((total - done) / speed)} left" if speed and done < total else ""
    return f"{name}: [{bar}] {done / total:4.0%} of {total / 1e9:.2f} GB, {pace}{left}"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
