"""The processes below a process, from /proc: nodes, replicas, and the servers of replicas.

Ray writes into the command line of a worker what it does: `ray::ServeReplica:default:Ingress`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import attrs

from tests.support.processes import all_processes, parent_of, words
from trioserve.children.reports import AT

_REPLICA = "ray::ServeReplica:"
_PROXY = "ray::ProxyActor"


@attrs.frozen
class Process:
    """A process. `parent` is None for the one at the top."""

    pid: int
    argv: tuple[str, ...]
    parent: Process | None = attrs.field(default=None, repr=False)

    @property
    def is_node(self) -> bool:
        """True for the process of a node of the cluster."""
        return Path(self.argv[0]).name == "raylet"

    @property
    def is_head(self) -> bool:
        """True for the node with Serve's controller and proxy."""
        return self.is_node and "--head" in self.argv

    @property
    def is_proxy(self) -> bool:
        """True for the proxy, which takes the requests of clients."""
        return self.argv[0].startswith(_PROXY)

    @property
    def is_replica(self) -> bool:
        """True for a replica of a deployment: an ingress, or one of a model."""
        return self.argv[0].startswith(_REPLICA)

    @property
    def socket(self) -> str | None:
        """The address of its socket, if it is the process of a model."""
        found = (word.removeprefix(AT) for word in self.argv if word.startswith(AT))
        return next(found, None) if "trioserve" in self.argv else None

    @property
    def node(self) -> Process | None:
        """The node that it belongs to."""
        return self if self.is_node or self.parent is None else self.parent.node

    def kill(self) -> None:
        """End it as a fault would, unless it has ended already."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def below(pid: int) -> list[Process]:
    """All processes that a process has started, directly or not; zombies are left out."""
    children: dict[int, list[int]] = {}
    for process in all_processes():
        children.setdefault(parent_of(process), []).append(process)

    def walk(parent: Process) -> Iterator[Process]:
        for child in children.get(parent.pid, ()):
            if argv := tuple(words(child, "cmdline")):
                process = Process(child, argv, parent)
                yield process
                yield from walk(process)

    return list(walk(Process(pid, ("",))))


def with_variable(name: str, value: str) -> list[Process]:
    """All processes with this in their environment, started by any process."""
    return [
        Process(process, tuple(words(process, "cmdline")))
        for process in all_processes()
        if f"{name}={value}" in words(process, "environ")
    ]
