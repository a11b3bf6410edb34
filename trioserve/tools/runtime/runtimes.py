"""`Runtimes`: finds the place where a call is to run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs

from trioserve.config.tools import ToolsConfig
from trioserve.errors import ToolRuntimeError
from trioserve.tools.paths import Fence
from trioserve.tools.process import Limits
from trioserve.tools.runtime.container import ENGINES, Container, OwnContainer
from trioserve.tools.runtime.host import Host
from trioserve.tools.runtime.runtime import Runtime
from trioserve.tools.runtime.ssh import SshHost


@attrs.frozen
class Runtimes:
    """The place that a configuration names, and others that clients may name."""

    default: Runtime
    #: What the configuration calls it; None: this machine.
    default_name: str | None
    #: Whether clients may name others. They must not get out of a fence, or of a container.
    is_free: bool

    def find(self, name: str | None) -> Runtime:
        """The place of this name; None: that of the configuration.

        Raises:
            ToolRuntimeError: there is none, or clients may not use it.
        """
        if name is None or name == self.default_name:
            return self.default
        runtime = _existing(name)
        if not self.is_free:
            raise ToolRuntimeError(
                f"tool runtime {name} is not the one of --tools-runtime; clients may choose one "
                "only where tools may use all files of this machine (--tools-dir /)"
            )
        return runtime


@asynccontextmanager
async def open_runtimes(config: ToolsConfig, fence: Fence) -> AsyncIterator[Runtimes]:
    """Open the place that a configuration names, and close it at the end.

    A container is started by the first call.

    Raises:
        ToolRuntimeError: it names none.
    """
    limits = Limits(processes=config.tools_max_processes, memory=config.tools_max_memory)
    name = config.tools_runtime
    if name is None:
        yield Runtimes(Host(fence, limits), None, fence.is_open)
        return
    kind, _, target = name.partition(":")
    if kind not in ENGINES:
        yield Runtimes(_existing(name), name, is_free=False)
        return
    container = OwnContainer(kind, target, limits)
    try:
        yield Runtimes(container, name, is_free=False)
    finally:
        await container.aclose()


def _existing(name: str) -> Runtime:
    kind, _, target = name.partition(":")
    if kind in ENGINES:
        raise ToolRuntimeError(f"tool runtime must name a running container: {name}")
    if kind == "ssh":
        return SshHost(target)
    engine = kind.removesuffix("-container")
    if kind == f"{engine}-container" and engine in ENGINES:
        return Container(engine, target)
    # Never this machine: the caller wants to be apart from it.
    raise ToolRuntimeError(f"unknown tool runtime: {name}")
