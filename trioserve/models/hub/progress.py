"""`Progress`: how far a download is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import attrs
import trio

#: Seconds between two reports.
_INTERVAL = 0.1


@attrs.frozen(kw_only=True)
class Progress:
    """How far a download is: one of its files, and all of them together, in bytes."""

    url: str
    done: int
    total: int  # 0: not known
    all_done: int
    all_total: int


OnProgress = Callable[[Progress], None]


class Reporter:
    """Adds up how far the files of a download are, and reports it several times a second."""

    def __init__(self, sizes: Mapping[str, int], on_progress: OnProgress) -> None:
        self._sizes = sizes  # by URL
        self._done = dict.fromkeys(sizes, 0)
        self._on_progress = on_progress
        self._reported = -math.inf

    def __call__(self, url: str, n_bytes: int) -> None:
        """Take note of how many bytes of a file are there."""
        self._done[url] = n_bytes
        now = trio.current_time()
        if n_bytes != self._sizes[url] and now < self._reported + _INTERVAL:
            return
        self._reported = now
        self._on_progress(
            Progress(
                url=url,
                done=n_bytes,
                total=self._sizes[url],
                all_done=sum(self._done.values()),
                all_total=sum(self._sizes.values()),
            )
        )
