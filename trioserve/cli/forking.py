"""The zygote of a router: the command, which has imported what a server needs. See
`trioserve.children.zygote`.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from trioserve.children.child import Child
from trioserve.children.parent import ParentSocket
from trioserve.children.zygote import CAN_FORK, fork_zygote, wait_for_orders
from trioserve.cli.memory import uncollected
from trioserve.cli.systemd import take_sockets

#: Modules that a router imports in any case, and shares with the processes of models.
_SHARED = ("hypercorn.trio", "hypercorn.utils", "trioserve.api.router.service", "trioserve.app")

#: Modules that a server imports when it needs them: a first request should not wait for that.
_OF_MODELS = (
    "trioserve.llama.backend",
    "trioserve.llama.devices",
    "trioserve.llama.embedding",
    "trioserve.llama.model",
)


def _import(names: Sequence[str]) -> None:
    # It would start a thread for each core, and a fork has none of them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with uncollected():
        for name in names:
            importlib.import_module(name)


def fork(
    environ: Mapping[str, str], serve: Callable[[list[str]], int], parent: ParentSocket | None
) -> Child | None:
    """Fork a zygote from this process, which must not have started anything yet.

    It never returns in the zygote and in its forks, which end with SystemExit. They have this
    environment, and no socket of `parent`. In a fork, `serve` serves a model.

    Returns None where a fork is unsafe or not possible; a zygote may be started as a program.
    """
    if not CAN_FORK:
        return None
    _import(_SHARED)
    if threading.active_count() > 1:  # an extension has started one
        return None
    made = fork_zygote()
    if made is None or isinstance(made, Child):
        return made
    if parent is not None:
        parent.connection.close()
    if "LISTEN_PID" in os.environ:
        os.environ["LISTEN_PID"] = str(os.getpid())
        for one in take_sockets(os.environ):
            one.close()
    os.environ.clear()
    os.environ.update(environ)
    sys.exit(wait(made, serve))


def wait(orders: socket.socket, serve: Callable[[list[str]], int]) -> int:
    """Carry out orders; returns the exit code of this process or of a fork, each at its end."""
    _import((*_SHARED, *_OF_MODELS))
    with orders:
        argv = wait_for_orders(orders)
    return 0 if argv is None else serve(argv)
