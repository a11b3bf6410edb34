"""Reports the progress of a start: to a terminal, the log, and the parent program."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Self, TextIO

import msgspec

from trioserve import llama
from trioserve.children.parent import ParentSocket, take_parent
from trioserve.children.reports import Downloading, Draining, Failed, Loading, Ready, Report
from trioserve.cli.systemd import Notifier
from trioserve.config import Config
from trioserve.log import get_logger
from trioserve.models import fetch as fetching
from trioserve.units import bytes_text, duration_text, rate_text

if TYPE_CHECKING:
    from trioserve.engine import AnyBackend
    from trioserve.models.hub import DownloadProgress
    from trioserve.server.lifecycle.engine import Loader

_log = get_logger("trioserve")

#: Notifications for systemd beside the text of a state.
_VARIABLES = {Ready: {"READY": "1"}, Draining: {"STOPPING": "1"}}

#: Seconds between two reports of the progress.
_INTERVAL = 0.1


class Reporter:
    """Reports the status to the program that started this process, if that is a router, and to
    systemd, if this is a service of the type ``notify``.

    Thread-safe.
    """

    def __init__(self, parent: ParentSocket | None = None, *, systemd: str = "") -> None:
        self.parent = parent
        self._systemd = Notifier(systemd)
        self._told_at = 0.0

    def tell(self, report: Report) -> None:
        text = report.state
        match report:
            case Failed(message):
                text = message.replace("\n", " ")
            case Loading(share) | Downloading(share):
                text += f" {share:.0%}"
        self._systemd.tell(STATUS=text, **_VARIABLES.get(type(report), {}))
        if self.parent is not None:
            self.parent.send(msgspec.msgpack.encode(report))

    def progress(self, report: Loading | Downloading) -> None:
        """Send a report of the progress, at limited intervals."""
        now = monotonic()
        if now - self._told_at >= _INTERVAL:
            self._told_at = now
            self.tell(report)


def take_reporter(environ: MutableMapping[str, str]) -> Reporter:
    """Make the reporter to who has started this process, and remove their variables."""
    return Reporter(take_parent(environ), systemd=environ.pop("NOTIFY_SOCKET", ""))


_BAR = 20  # characters
_MAX_NAME = 40

#: Seconds between two lines where nothing can be overwritten.
_PLAIN_INTERVAL = 10.0


class ProgressReport:
    """Reports progress: a line that changes on a terminal, and elsewhere lines at intervals.

    Each tells the total, the speed and the time left, as far as they are known. The terminal's line
    is cleared at the end of the block.

    Args:
        stream: where the lines go.
        n_log_lines: write that many lines to the log instead, as a server does.
    """

    def __init__(self, stream: TextIO, *, n_log_lines: int = 0) -> None:
        self._stream, self._n_log_lines, self._n_logged = stream, n_log_lines, 0
        self._has_line = False
        self._began: tuple[float, float] | None = None  # the time, and what was done then
        self._wrote_at = 0.0

    def tell(
        self, what: str, done: float, total: float = 1.0, unit: str = "", **fields: object
    ) -> None:
        """Report how far it is.

        Args:
            what: is being done.
            done: of the total.
            total: 0 if it is not known.
            unit: of both, such as "bytes"; without, they are shares.
            fields: of a line of the log.
        """
        now = monotonic()
        began, n_before = self._began or self._begin(now, done)
        seconds, n_new = now - began, done - n_before
        line = _line(what, done, total, unit, n_new / seconds if seconds > 0 else 0.0)
        if self._stream.isatty():
            self._has_line = True
            columns = shutil.get_terminal_size().columns
            self._write(f"\r{line[: columns - 1]}\x1b[K")
        elif not self._n_log_lines:
            if now - self._wrote_at >= _PLAIN_INTERVAL:
                self._wrote_at = now
                self._write(f"{line}\n")
        elif total and (n := int(done / total * self._n_log_lines)) > self._n_logged:
            self._n_logged = n
            percent = n * 100 // self._n_log_lines
            _log.info(what.partition(" ")[0].lower(), **fields, percent=percent)

    def _begin(self, now: float, done: float) -> tuple[float, float]:
        self._began, self._wrote_at = (now, done), now
        return self._began

    def end(self) -> None:
        """Clear the terminal's line. The next report is the first one of another thing."""
        self._began = None
        self.clear()

    def clear(self) -> None:
        """Clear the terminal's line, for another text."""
        if self._has_line:
            self._has_line = False
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            self._stream.write(text)
            self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _line(what: str, done: float, total: float, unit: str, speed: float) -> str:
    in_bytes = unit == "bytes"
    parts = [bytes_text(done)] if in_bytes and not total else []
    if total:
        share = min(done / total, 1.0)
        bar = f"[{('#' * int(share * _BAR)).ljust(_BAR)}] " if unit else ""
        of = bytes_text(total) if in_bytes else f"{total:g} {unit}"
        counted = f"{done:g} of {of}" if unit and not in_bytes else f"{share:4.0%}"
        parts = [bar + counted + f" of {of}" * in_bytes]
    if in_bytes:
        parts.append(rate_text(speed))
    if speed > 0 and done < total:
        parts.append(f"{duration_text((total - done) / speed)} left")
    return f"{what}: {', '.join(parts)}"


# -- downloading


async def fetch(status: Reporter, config: Config) -> Config:
    """Find the models that a configuration names, and report the progress of downloads.

    Raises:
        TrioServeError: as `trioserve.models.fetch.fetch`.
    """
    with DownloadReport(sys.stderr, n_log_lines=10) as report:

        def both(progress: DownloadProgress) -> None:
            report(progress)
            share = min(progress.all_done / max(progress.all_total, 1), 1.0)
            status.progress(Downloading(round(share, 3)))

        return await fetching.fetch(config, both)


class DownloadReport(ProgressReport):
    """Reports a download, unless all is in the cache already."""

    def __call__(self, progress: DownloadProgress) -> None:
        done, total = progress.all_done, progress.all_total
        if self._began is None and done == total:
            self._begin(monotonic(), done)
            return
        name = progress.url.rpartition("/")[2].partition("?")[0]
        shown = name if len(name) <= _MAX_NAME else f"{name[:18]}…{name[-21:]}"
        size = bytes_text(total)
        self.tell(f"Downloading {shown}", done, total, "bytes", file=name, size=size)


# -- loading


def load(
    status: Reporter, config: Config, *, progress: Callable[[float], bool] | None = None
) -> AnyBackend:
    """Load the model, and report the progress. Runs in a worker thread."""

    def all_of_them(share: float) -> bool:
        goes_on()
        report(share)
        status.progress(Loading(round(share, 3)))
        return progress is None or progress(share)

    if config.rpc:
        from trioserve.llama.rpc import library

        library.connect(config)
    with (
        _ended_if_stalled(status, config.watchdog_timeout if config.rpc else 0.0) as goes_on,
        LoadReport(config.model or "the bundled model", sys.stderr) as report,
    ):
        return llama.load(config, progress=all_of_them)


class EarlyLoad:
    """Loads a model in a thread, while the rest of the server is imported.

    A `Loader`: the first call gets that model, and later ones load it again. `close` frees a model
    that was not asked for.
    """

    def __init__(self, load: Loader, config: Config) -> None:
        self._load = load
        self._goes_on = True
        self._shares = SimpleQueue[float | None]()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trioserve-loading")
        self._loading: Future[AnyBackend] | None = None
        with contextlib.suppress(RuntimeError):  # no thread: the call has to load it
            self._loading = self._pool.submit(self._run, config)

    def __call__(
        self, config: Config, *, progress: Callable[[float], bool] | None = None
    ) -> AnyBackend:
        """Load the model, or wait for the one that is being loaded."""
        loading, self._loading = self._loading, None
        if loading is None:
            return self._load(config, progress=progress)
        try:
            while (share := self._shares.get()) is not None:
                self._goes_on = progress is None or progress(share)
        except BaseException:
            self._drop(loading)
            raise
        return loading.result()

    def _run(self, config: Config) -> AnyBackend:
        try:
            return self._load(config, progress=self._report)
        finally:
            self._shares.put(None)

    def _report(self, share: float) -> bool:
        self._shares.put(share)
        return self._goes_on

    def _drop(self, loading: Future[AnyBackend]) -> None:
        self._goes_on = False
        if loading.exception() is None:
            loading.result().close()

    def close(self) -> None:
        """Cancel the load if it was not asked for, and end the thread."""
        if self._loading is not None:
            self._drop(self._loading)
        self._pool.shutdown()


@contextmanager
def _ended_if_stalled(status: Reporter, seconds: float) -> Iterator[Callable[[], None]]:
    """End this process if the block does not call the yielded function for `seconds` (0: never)."""
    moved, over = threading.Event(), threading.Event()

    def watch() -> None:
        while moved.wait(seconds):
            moved.clear()
            if over.is_set():
                return
        message = f"Loading the model has made no progress for {seconds:g} seconds."
        _log.error(message)
        status.tell(Failed.of(message))
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


class LoadReport(ProgressReport):
    """Reports loading: the share on a terminal, otherwise a log line for each quarter.

    Silent for the first `patience` seconds, because most models load in that time.
    """

    def __init__(self, name: str, stream: TextIO, *, patience: float = 1.0) -> None:
        super().__init__(stream, n_log_lines=4)
        self._name = name
        self._speaks_at = monotonic() + patience

    def __call__(self, share: float) -> None:
        if monotonic() >= self._speaks_at:
            self.tell(f"Loading {self._name}", share, model=self._name)
