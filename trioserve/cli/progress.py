"""Reports the progress of a start: to a terminal, the log, and the parent program.

A router or another program may start a server. ``TRIOSERVE_STATUS_FD`` names a
descriptor, on which each change of the status is a line of JSON with a ``state``: ``downloading``
and ``loading`` with the ``progress`` (0.0 to 1.0), ``ready`` with ``info`` about the model,
``sleeping``, ``draining``, ``usage`` with ``rows``, or ``failed`` with a ``message``. A line has at
most `trioserve.router.zygote.MAX_STATUS_LINE` bytes. With ``TRIOSERVE_LIFELINE``, the end of
standard input ends the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any, Self, TextIO

from trioserve import llama
from trioserve.cli.systemd import Notifier
from trioserve.config import Config
from trioserve.errors import ConfigError
from trioserve.log import get_logger
from trioserve.models import fetch as fetching
from trioserve.router.zygote import LIFELINE_VARIABLE, STATUS_VARIABLE
from trioserve.whole_numbers import whole_number

if TYPE_CHECKING:
    from trioserve.engine import AnyBackend
    from trioserve.models.hub import DownloadProgress
    from trioserve.server.lifecycle.engine import Loader

_log = get_logger("trioserve")

#: What systemd expects beside the text of a state.
_VARIABLES = {"ready": {"READY": "1"}, "draining": {"STOPPING": "1"}}

#: Seconds between two progress lines.
_INTERVAL = 0.1

#: Characters of a message: a line has at most `MAX_STATUS_LINE` bytes.
_MAX_MESSAGE = 2**16


class StatusPipe:
    """Reports the status to the program that started this process, if it passed a descriptor, and
    to systemd, if this is a service of the type ``notify``.

    Thread-safe.
    """

    def __init__(self, descriptor: int | None = None, *, systemd: str = "") -> None:
        self._descriptor = descriptor
        self._systemd = Notifier(systemd)
        self._told_at = 0.0
        self._writing = threading.Lock()  # a long line is not written at once

    @property
    def is_open(self) -> bool:
        """Whether there is a descriptor to write to."""
        return self._descriptor is not None

    def tell(self, state: str, **fields: Any) -> None:
        """Report a state and its fields."""
        share = f" {fields['progress']:.0%}" if "progress" in fields else ""
        text = fields.get("message", f"{state}{share}").replace("\n", " ")
        self._systemd.tell(STATUS=text, **_VARIABLES.get(state, {}))
        if self._descriptor is not None:
            if "message" in fields:
                fields["message"] = fields["message"][:_MAX_MESSAGE]
            report = json.dumps({"state": state, **fields}, ensure_ascii=False)
            line = report.encode(errors="replace") + b"\n"
            with self._writing, contextlib.suppress(BrokenPipeError):  # its reader has gone
                while line:
                    line = line[os.write(self._descriptor, line) :]

    def progress(self, share: float, state: str = "loading") -> None:
        """Report the loaded or downloaded fraction of the model, at limited intervals."""
        now = monotonic()
        if now - self._told_at >= _INTERVAL:
            self._told_at = now
            self.tell(state, progress=round(share, 3))


def take_status(environ: MutableMapping[str, str]) -> StatusPipe:
    """Remove the status variables from the environment, and watch the lifeline if there is one.

    Raises:
        ConfigError: the descriptor is invalid.
    """
    if environ.pop(LIFELINE_VARIABLE, ""):
        threading.Thread(target=_end_with_input, name="trioserve-lifeline", daemon=True).start()
    text, systemd = environ.pop(STATUS_VARIABLE, ""), environ.pop("NOTIFY_SOCKET", "")
    if not text:
        return StatusPipe(systemd=systemd)
    descriptor = whole_number(text, most=2**31 - 1)
    try:
        os.set_inheritable(-1 if descriptor is None else descriptor, False)
    except OSError:
        raise ConfigError(f"{STATUS_VARIABLE}: {text!r} is not an open descriptor") from None
    return StatusPipe(descriptor)


def _end_with_input() -> None:
    """End this process when standard input ends. A thread does this, so nothing can block it."""
    while os.read(0, 4096):
        pass  # a lifeline carries no data
    os._exit(1)


class ProgressReport:
    """Reports progress: a line that changes on a terminal, otherwise some log lines.

    Clears the terminal's line at the end of its block.
    """

    def __init__(self, stream: TextIO, *, n_log_lines: int) -> None:
        self._stream = stream
        self._n_log_lines = n_log_lines
        self._n_logged = 0
        self._has_line = False

    def tell(self, share: float, line: str, event: str, **fields: object) -> None:
        """Write `line` on a terminal; elsewhere log `event` when the share has grown."""
        if self._stream.isatty():
            self._has_line = True
            self._write(f"\r{line}")
        elif (n := int(share * self._n_log_lines)) > self._n_logged:
            self._n_logged = n
            _log.info(event, **fields, percent=n * 100 // self._n_log_lines)

    def end(self) -> None:
        """Clear the terminal's line."""
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


# -- downloading

_BAR = 20  # characters


async def fetch(status: StatusPipe, config: Config) -> Config:
    """Find the models that a configuration names, and report the progress of downloads.

    Raises:
        TrioServeError: as `trioserve.models.fetch.fetch`.
    """
    with DownloadReport(sys.stderr) as report:

        def both(progress: DownloadProgress) -> None:
            report(progress)
            status.progress(progress.all_done / max(progress.all_total, 1), "downloading")

        return await fetching.fetch(config, both)


class DownloadReport(ProgressReport):
    """Reports a download: a bar on a terminal, otherwise a log line for each tenth."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream, n_log_lines=10)
        self._first: tuple[float, int] | None = None  # the time and bytes of the first report

    def __call__(self, progress: DownloadProgress) -> None:
        """Print the progress of a download."""
        now, done, total = monotonic(), progress.all_done, progress.all_total
        if self._first is None:
            self._first = now, done
            if done == total:
                return  # already in the cache
        seconds, n_new = now - self._first[0], done - self._first[1]
        speed = n_new / seconds if seconds > 0 else 0.0
        name = progress.url.rpartition("/")[2].partition("?")[0]
        self.tell(
            done / total if total else 0.0,
            f"{_line(name, done, total, speed)}\x1b[K",
            "downloading",
            file=name,
            megabytes=round(total / 1e6),
            megabytes_per_second=round(speed / 1e6, 1),
        )


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


# -- loading


def load(
    status: StatusPipe, config: Config, *, progress: Callable[[float], bool] | None = None
) -> AnyBackend:
    """Load the model, and report the progress. Runs in a worker thread."""

    def all_of_them(share: float) -> bool:
        goes_on()
        report(share)
        status.progress(share)
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
def _ended_if_stalled(status: StatusPipe, seconds: float) -> Iterator[Callable[[], None]]:
    """End this process when loading stalls, because another machine does not answer.

    The block calls the function that it gets at each progress. 0 seconds disables this.
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


class LoadReport(ProgressReport):
    """Reports loading: the share on a terminal, otherwise a log line for each quarter.

    Silent for the first `patience` seconds, because most models load in that time.
    """

    def __init__(self, name: str, stream: TextIO, *, patience: float = 1.0) -> None:
        super().__init__(stream, n_log_lines=4)
        self._name = name
        self._speaks_at = monotonic() + patience

    def __call__(self, share: float) -> None:
        """Report that `share` (0.0 to 1.0) is loaded."""
        if monotonic() >= self._speaks_at:
            line = f"Loading {self._name}: {share:4.0%}"
            self.tell(share, line, "loading", model=self._name)
