"""`Decoder`: a process that decodes media, as its server sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import attrs

from trioserve.errors import InvalidMediaError
from trioserve.media.answer import Answer, Order
from trioserve.media.limits import MediaLimits
from trioserve.media.pipe import PipeError, write_data, write_message
from trioserve.types import DecodedDocument, DecodedMedia

#: The program that decodes. It imports what this process must not have.
_MODULE = "trioserve.media.child"

#: Variables without which a Python may not find its libraries. No others are passed on.
_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT")


#: Seconds for a process to end by itself when it has closed its pipe.
_LAST = 0.5

#: Bytes of RAM that a process may have between two files; it begins with some 40 MiB.
_MAX_KEPT = 192 * 2**20
_PAGE = 4096 if sys.platform == "win32" else os.sysconf("SC_PAGE_SIZE")


class DecoderError(Exception):
    """The process could not be started, or ended before it had answered.

    Args:
        message: what happened, for the log.
        by_signal: whether a signal has ended it: it did what it must not, or took too much.
    """

    def __init__(self, message: str, *, by_signal: bool = False) -> None:
        super().__init__(message)
        self.by_signal = by_signal


class Decoder:
    """A process that decodes one file after another. It is started for the first one.

    One thread at a time may have it decode. `kill` may be called from any.
    """

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self._lock = threading.Lock()

    @property
    def is_usable(self) -> bool:
        """Whether it can decode another file."""
        return not self._ended and (self._process is None or self._process.poll() is None)

    @property
    def pid(self) -> int | None:
        """The number of the process, if it was started."""
        return None if self._process is None else self._process.pid

    def decode(self, data: bytes, order: Order) -> DecodedMedia | DecodedDocument:
        """Have a file decoded. Blocks for as long as that takes.

        Raises:
            InvalidMediaError: it cannot be used. The message is a part of a sentence.
            DecoderError: the process has ended, by itself or by `kill`.
        """
        most = self._limits.max_bytes
        if len(data) > most:
            raise InvalidMediaError(f"has more than {most} bytes")
        try:
            process = self._start()
            assert process.stdin is not None and process.stdout is not None
            try:
                write_message(process.stdin, attrs.asdict(order))
                write_data(process.stdin, data)
                process.stdin.flush()
                return Answer(order, self._limits).read(process.stdout)
            except (PipeError, OSError) as error:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LAST)
                self.close()
                code = process.returncode
                raise DecoderError(f"{error}; exit code {code}", by_signal=code < 0) from error
        finally:
            if self._ended or self._has_grown():
                self.close()

    def kill(self) -> None:
        """End the process at once, whatever it does; then `decode` raises, in its own thread."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """End the process, and wait until it has ended. Not from beside `decode`."""
        self.kill()
        if (process := self._process) is not None:
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with suppress(OSError):  # it has not read everything
                    stream.close()

    def _has_grown(self) -> bool:
        """Whether the process keeps more memory than it needs, as after a leak in a decoder."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_bytes().split()[1])
        except (OSError, IndexError):  # other systems than Linux do not say, nor do the dead
            return False
        return pages * _PAGE > _MAX_KEPT

    def _start(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._ended:
                raise DecoderError("it was ended before it began")
            if self._process is None:
                try:
                    self._process = _open(self._limits)
                except OSError as error:
                    raise DecoderError(f"no process can be started: {error.strerror}") from error
            return self._process


def _open(limits: MediaLimits) -> subprocess.Popen[bytes]:
    environ = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-P", "-s", "-m", _MODULE, json.dumps(attrs.asdict(limits))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environ,
        start_new_session=True,
    )
