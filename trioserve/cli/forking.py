"""What a zygote does: it imports what a server needs, and becomes servers by forking.

A router forks its first one from itself, which saves a start of Python and shares the memory of
what both have imported. Later ones are ``python -m trioserve.cli.zygote``. See
`trioserve.router.zygote`.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping

from trioserve.cli.memory import uncollected
from trioserve.router.zygote import FirstZygote, fork_zygote, wait_for_orders

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


def import_all() -> None:
    """Import what a server needs."""
    # It would start a thread for each core, and a fork has none of them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with uncollected():
        for name in _MODULES:
            importlib.import_module(name)


def first(environ: Mapping[str, str], serve: Callable[[list[str]], int]) -> FirstZygote | None:
    """Fork a zygote from this process, which must not have started anything yet.

    It never returns in the fork, which ends with SystemExit.

    Args:
        environ: the environment of the processes of models.
        serve: the command, which serves a model in a fork.

    Returns:
        None where a fork is unsafe or of no use; a zygote is then started as a program.
    """
    if sys.platform != "linux" or threading.active_count() > 1:
        return None
    if "LISTEN_FDS" in os.environ:
        return None  # processes of models would inherit the sockets of systemd
    import_all()
    if threading.active_count() > 1:  # an extension has started one
        return None
    made = fork_zygote()
    if made is None or isinstance(made, FirstZygote):
        return made
    os.environ.clear()
    os.environ.update({"OPENBLAS_NUM_THREADS": "1", **environ})
    sys.exit(wait(made, serve))


def wait(orders: socket.socket, serve: Callable[[list[str]], int]) -> int:
    """Carry out orders; returns the exit code of this process or of a fork, each at its end."""
    with orders:
        argv = wait_for_orders(orders)
    return 0 if argv is None else serve(argv)
