"""Recordings that are transcribed: what is told of each when it has ended.

A model that hears transcribes window by window, and each is a request of its own. Whisper makes no
requests, so without this nothing would be known of its work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Protocol, runtime_checkable

import attrs

from trioserve.errors import TrioServeError

#: How the work on a recording may end.
ENDS = ("finished", "cancelled", "failed")


@attrs.define(eq=False)
class RecordingWork:
    """The work on one recording. If nothing else is noted, it was cancelled."""

    seconds: float  # that the recording lasts
    total_s: float = 0.0  # that the work took
    is_finished: bool = False
    error: TrioServeError | None = None

    @property
    def end(self) -> str:
        """How it has ended: one of `ENDS`."""
        if self.error is not None:
            return "failed"
        return "finished" if self.is_finished else "cancelled"


@runtime_checkable
class RecordingObserver(Protocol):
    """An `Observer` that follows recordings, too."""

    def recording_ended(self, work: RecordingWork) -> None:
        """Note a recording that was transcribed, or was not. Called exactly once."""


@contextmanager
def observed_recording(observers: Iterable[object], seconds: float) -> Iterator[RecordingWork]:
    """Tell those observers of a recording that follow recordings, when the block has ended."""
    work, began = RecordingWork(seconds), monotonic()
    try:
        yield work
    finally:
        work.total_s = monotonic() - began
        for observer in observers:
            if isinstance(observer, RecordingObserver):
                observer.recording_ended(work)
