"""Deprecated attributes of `Server`, under their former names."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from trioserve.server.stream import read_all

__all__ = ["ManyOutputs", "former_attribute"]

#: Attributes of `Server` that have moved to its `lifecycle`.
_MOVED = frozenset(
    {
        "check_live", "check_ready", "draining", "idle_since", "idle_until", "known_model",
        "load_progress", "ready", "wait_failure",
    }
)  # fmt: skip
_OUTPUTS = {"completions": "stream_all", "chats": "stream_chats"}


def former_attribute(server: Any, name: str) -> Any:
    """Find a former attribute of `Server`, and warn.

    Raises:
        AttributeError: `Server` never had this attribute.
    """
    if name in _OUTPUTS:
        return ManyOutputs(getattr(server, _OUTPUTS[name]), name)
    if name not in _MOVED:
        raise AttributeError(f"'Server' object has no attribute {name!r}", name=name, obj=server)
    message = f"Server.{name} is now Server.lifecycle.{name}"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return getattr(server.lifecycle, name)


class ManyOutputs:
    """The former `Server.completions` and `Server.chats`."""

    def __init__(
        self, open_streams: Callable[..., AbstractAsyncContextManager[list[Any]]], name: str
    ) -> None:
        message = f"Server.{name} goes with the next release: use Server.{open_streams.__name__}"
        warnings.warn(message, DeprecationWarning, stacklevel=4)
        self._open = open_streams

    def stream(self, *given: Any, n: int = 1) -> AbstractAsyncContextManager[list[Any]]:
        """Open all streams; the context comes last."""
        *arguments, context = given
        return self._open(*arguments, context=context, n=n)

    async def complete(self, *given: Any, n: int = 1) -> list[Any]:
        """Read all outputs."""
        outputs: list[Any] = await read_all(self.stream(*given, n=n))
        return outputs

    answer = complete
