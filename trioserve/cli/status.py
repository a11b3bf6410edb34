"""The command as a part of something larger: it tells its status, and ends with who started it.

A router starts servers in this way, and other programs may do so. ``TRIOSERVE_STATUS_FD`` names a
descriptor, on which each change of the status is a line of JSON with a ``state``: ``downloading``
and ``loading`` with the ``progress`` (0.0 to 1.0), ``ready`` with ``info`` about the model,
``sleeping``, or ``failed`` with a ``message``. With ``TRIOSERVE_LIFELINE``, the end of standard
input ends the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import MutableMapping
from time import monotonic
from typing import Any

from trioserve.errors import ConfigError
from trioserve.router.zygote import LIFELINE_VARIABLE, STATUS_VARIABLE

#: Seconds between two lines about the progress.
_INTERVAL = 0.1


class StatusPipe:
    """Tells the status to whoever started this process, if that wants to know.

    May be used by any thread.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor
        self._told_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether somebody listens."""
        return self._descriptor is not None

    def tell(self, state: str, **fields: Any) -> None:
        """Tell a state, with what belongs to it."""
        if self._descriptor is not None:
            line = json.dumps({"state": state, **fields}) + "\n"
            with contextlib.suppress(BrokenPipeError):  # nobody listens any more
                os.write(self._descriptor, line.encode())

    def progress(self, share: float, state: str = "loading") -> None:
        """Tell how much of the model is loaded, or of its files downloaded, but not too often."""
        now = monotonic()
        if now - self._told_at >= _INTERVAL:
            self._told_at = now
            self.tell(state, progress=round(share, 3))


def take_status(environ: MutableMapping[str, str]) -> StatusPipe:
    """Take what is for us out of the environment, and hold on to the lifeline if there is one.

    Raises:
        ConfigError: the descriptor is none.
    """
    if environ.pop(LIFELINE_VARIABLE, ""):
        threading.Thread(target=_end_with_input, name="trioserve-lifeline", daemon=True).start()
    text = environ.pop(STATUS_VARIABLE, "")
    if not text:
        return StatusPipe()
    try:
        descriptor = int(text)
        os.set_inheritable(descriptor, False)
    except (ValueError, OSError):
        raise ConfigError(f"{STATUS_VARIABLE}: {text!r} is not an open descriptor") from None
    return StatusPipe(descriptor)


def _end_with_input() -> None:
    """End this process when standard input ends. In a thread, so that nothing can be in its way."""
    while os.read(0, 4096):
        pass  # nothing is said on a lifeline
    os._exit(1)
