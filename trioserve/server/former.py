"""Former attributes of `Server`, which work for one release more."""

from __future__ import annotations

import warnings
from typing import Any

_NEW = {"stream": "stream_complete", "awake": "loaded"}

#: Attributes that belong to the APIs now.
_INNER = frozenset(
    {
        "adapters", "config", "end_reasoning", "infill", "lifecycle", "memory", "metrics",
        "observers", "params", "queue", "resources", "sleeping", "slots", "stream_all",
        "stream_chats", "tools", "transcriptions", "wake",
    }
)  # fmt: skip


def former_attribute(server: Any, name: str) -> Any:
    """Find a former attribute of `Server`, and warn.

    Raises:
        AttributeError: `Server` never had this attribute.
    """
    if name in _NEW:
        warnings.warn(f"Server.{name} is now {_NEW[name]}", DeprecationWarning, stacklevel=3)
        return getattr(server, _NEW[name])
    if name not in _INNER:
        raise AttributeError(f"'Server' object has no attribute {name!r}", name=name, obj=server)
    message = f"Server.{name} is not public any more, and goes with the next release"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return getattr(server._core, name)
