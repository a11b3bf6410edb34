"""Setting up the log: a line for each event on standard error, pretty on a terminal, else JSON.

Everything goes through structlog. What libraries write with `logging` (Hypercorn, Quart) comes out
in the same form. Fields bound with `structlog.contextvars`, such as ``request_id``, are on every
line that a request writes. A line that cannot be written is lost, and nothing else.
"""

from __future__ import annotations

import io
import logging
import os
import select
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor

from trioserve.config import Config
from trioserve.config.console import Console
from trioserve.errors import ConfigError
from trioserve.log import get_logger

#: The open log file, to be closed later.
_file: io.RawIOBase | None = None


#: Bytes that a pipe always takes without blocking if it takes any.
_MAX_WRITE = getattr(select, "PIPE_BUF", 512)

#: Milliseconds that a line waits for a slow reader.
_PATIENCE_MS = 20


def _poll_of(raw: io.RawIOBase | None) -> select.poll | None:
    """Make a poll object that shows whether a write would block, if the system supports it."""
    try:
        if raw is None or not hasattr(select, "poll"):
            return None
        poll = select.poll()
        poll.register(raw.fileno(), select.POLLOUT)
    except (OSError, ValueError):  # not a file, or closed
        return None
    return poll


class Sink:
    """Writes text without blocking.

    Lines that cannot be written (full disk, closed or slow reader) are counted, and the count is
    logged when writing works again. Bypasses the buffers of `stream`, which would keep failed text
    and fail again.
    """

    def __init__(self, stream: TextIO | io.RawIOBase, name: str) -> None:
        self.n_lost = 0
        self._stream = stream
        self._name = name
        # A raw file already, if Python does not buffer.
        buffer: Any = getattr(stream, "buffer", stream)
        is_raw = isinstance(buffer, io.RawIOBase)
        self._raw: io.RawIOBase | None = buffer if is_raw else getattr(buffer, "raw", None)
        self._poll = _poll_of(self._raw)
        self._is_stuck = False  # the reader accepted nothing the last time
        self._is_torn = False  # only a part of the last line was written
        self._is_telling = False
        self._lock = threading.RLock()

    def write(self, text: str) -> None:
        with self._lock:
            try:
                self._write(text)
            except (OSError, ValueError):  # ValueError: it is closed
                self.n_lost += 1
                return
            if self.n_lost and not self._is_telling:
                self._tell()

    def flush(self) -> None:
        """Do nothing: no line is buffered."""

    def _write(self, text: str) -> None:
        if self._raw is None:
            assert not isinstance(self._stream, io.RawIOBase)
            self._stream.write(text)
            self._stream.flush()
            return
        data = text.encode("utf-8", "backslashreplace")
        rest = b"\n" + data if self._is_torn else data
        while rest:
            self._wait()
            n_written = self._raw.write(rest[:_MAX_WRITE])
            if not n_written:  # it would block
                raise BlockingIOError
            rest = rest[n_written:]
            self._is_torn = bool(rest)

    def _wait(self) -> None:
        """Wait briefly for a slow reader, but not again until it has read something."""
        if self._poll is None:
            return
        self._is_stuck = not self._poll.poll(0 if self._is_stuck else _PATIENCE_MS)
        if self._is_stuck:
            raise BlockingIOError

    def _tell(self) -> None:
        """Log the number of lost lines. If that line is lost, the count is kept."""
        n_lost = self.n_lost
        self._is_telling = True
        get_logger("trioserve").error(f"{n_lost} log lines could not be written", to=self._name)
        self._is_telling = False
        if self.n_lost == n_lost:
            self.n_lost = 0


def configure(
    config: Config,
    stream: TextIO | None = None,
    take: Callable[[EventDict], object] | None = None,
) -> None:
    """Write log lines to `stream` (standard error) in the form and from the level of `config`.

    With `take`, lines of trioserve go there as fields, and `stream` gets only what libraries write.
    Calling it again replaces the setup, except for loggers that were used before: structlog caches
    them, which makes filtered lines cheap.

    Raises:
        ConfigError: the log file cannot be opened.
    """
    file = _open(config.log_file)
    stream = sys.stderr if stream is None else stream
    sink = Sink(stream, "standard error")
    # There are no critical events, so this level disables all.
    name = "CRITICAL" if config.log_level == "off" else config.log_level.upper()
    level = logging.getLevelNamesMapping()[name]
    is_auto, is_terminal = config.log_format == "auto", stream.isatty()
    pretty = is_terminal if is_auto else config.log_format == "pretty"
    shared: list[Processor] = [structlog.contextvars.merge_contextvars]
    if config.log_prefix:
        shared += [structlog.stdlib.add_logger_name, structlog.processors.add_log_level]
    if config.log_timestamps:
        form = "%H:%M:%S" if pretty and file is None else "iso"
        shared += [structlog.processors.TimeStamper(fmt=form, utc=form == "iso")]
    is_colored = is_terminal and not os.environ.get("NO_COLOR")
    colors = is_colored if config.log_colors == "auto" else config.log_colors == "on"
    renderers: list[Processor] = _JSON
    if pretty:
        renderers = [structlog.processors.format_exc_info, Console(colors=colors)]
    if file is not None:
        renderers = [_copied_to(Sink(file, "the log file")), *renderers]
    ours = renderers if take is None else [structlog.processors.format_exc_info, _as_fields]
    write = _written_to(sink) if take is None else take
    structlog.configure(
        processors=[*shared, *ours],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *names: _Line(write, names[0] if names else "trioserve"),
        cache_logger_on_first_use=True,
    )
    _route_logging(sink, level, shared, renderers)


def _open(path: str | None) -> io.RawIOBase | None:
    """Open the log file without a buffer, and close the previous one."""
    global _file
    if _file is not None:
        _file.close()
    try:
        _file = None if path is None else open(path, "ab", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"the log file {path} cannot be opened: {error.strerror}") from None
    return _file


def _copied_to(sink: Sink) -> Processor:
    """Make a processor that also writes each line to a file, as JSON."""

    def copy(logger: Any, method: str, event: EventDict) -> EventDict:
        line: Any = dict(event)
        for processor in _JSON:
            line = processor(logger, method, line)
        sink.write(f"{line}\n")
        return event

    return copy


def _ordered(_logger: Any, _method: str, event: EventDict) -> EventDict:
    first = ("timestamp", "level", "logger", "event", "request_id")
    return {**{key: event[key] for key in first if key in event}, **event}


_JSON: list[Processor] = [
    structlog.processors.format_exc_info,
    _ordered,
    structlog.processors.JSONRenderer(),
]


def _as_fields(_logger: Any, _method: str, event: EventDict) -> tuple[Any, dict[str, Any]]:
    return (event,), {}


def _written_to(sink: Sink) -> Callable[[str], None]:
    return lambda message: sink.write(f"{message}\n")


class _Line:
    """Writes lines, and has the name that `add_logger_name` reads."""

    def __init__(self, write: Callable[[Any], object], name: str) -> None:
        self.name = name
        self.debug = self.info = self.warning = self.error = write
        self.critical = self.exception = self.msg = write


#: Libraries that log each request at the level of info, with the sessions of MCP servers.
_TALKATIVE = ("httpx2", "mcp")

#: Loggers of the MCP SDK that write a traceback for each message of a server that is invalid. Calls
#: that fail for it name it.
_UNTRUSTED = ("client", "mcp.client")


class _Handler(logging.StreamHandler[Sink]):
    """A distinct class, so that this handler can be found and replaced."""


def _has_no_handler_of_its_own(record: logging.LogRecord) -> bool:
    """Whether to log a record. Hypercorn's command adds handlers, which log its records."""
    return not logging.getLogger(record.name).handlers


def _route_logging(
    sink: Sink, level: int, shared: list[Processor], renderers: list[Processor]
) -> None:
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
    )
    handler = _Handler(sink)
    handler.setFormatter(formatter)
    handler.addFilter(_has_no_handler_of_its_own)
    root = logging.getLogger()
    for old in [one for one in root.handlers if isinstance(one, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(level if level <= logging.DEBUG else logging.WARNING)
    for name in _UNTRUSTED:
        logging.getLogger(name).setLevel(level if level <= logging.DEBUG else logging.CRITICAL)
