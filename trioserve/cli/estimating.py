"""``trioserve estimate``: how much memory a server would need, told to the router that asks.

It is not for people, who have ``trioserve show``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import trio

from trioserve.cli.downloading import fetch
from trioserve.cli.status import StatusPipe
from trioserve.config.parse import parse
from trioserve.router.child import ESTIMATE

__all__ = ["ESTIMATE", "tell_estimate"]


def tell_estimate(status: StatusPipe, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Tell the bytes that a server with these flags would need. Returns the exit code.

    Raises:
        ModelLoadError: the model cannot be used.
        HubError: it cannot be downloaded.
        ConfigError: a flag is wrong.
    """
    from trioserve.llama.estimate import estimate

    config = trio.run(fetch, status, parse(argv, environ).config)
    status.tell("estimated", bytes=estimate(config))
    return 0
