"""``python -m trioserve.cli.zygote``: imports what a server needs, and becomes servers by forking.

See `trioserve.router.zygote`.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys

#: What a server imports only when it needs it: a first request should not have to wait for that.
_MODULES = (
    "hypercorn.trio",
    "hypercorn.utils",
    "trioserve.app",
    "trioserve.llama.backend",
    "trioserve.llama.devices",
    "trioserve.llama.embedding",
    "trioserve.llama.model",
)


def main() -> int:
    """Wait for orders on the socket whose number is the argument."""
    # It would start a thread for each core, and a fork has none of them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for name in _MODULES:
        importlib.import_module(name)
    from trioserve.cli.main import main as serve
    from trioserve.router.zygote import wait_for_orders

    with socket.socket(fileno=int(sys.argv[1])) as orders:
        argv = wait_for_orders(orders)
    return 0 if argv is None else serve(argv)


if __name__ == "__main__":
    sys.exit(main())
