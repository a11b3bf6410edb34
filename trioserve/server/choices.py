"""Deprecated: `Server.stream_all` and `Server.stream_chats` make several outputs of one prompt."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from trioserve.server.generation.text import best_of
from trioserve.server.stream import read_all

__all__ = ["ManyOutputs", "best_of"]


class ManyOutputs:
    """What `Server.completions` and `Server.chats` were."""

    def __init__(
        self, open_streams: Callable[..., AbstractAsyncContextManager[list[Any]]], name: str
    ) -> None:
        message = f"Server.{name} goes with the next release: use Server.{open_streams.__name__}"
        warnings.warn(message, DeprecationWarning, stacklevel=3)
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
