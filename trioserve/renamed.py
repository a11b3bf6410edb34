"""Renamed public names, which still work for one release, with a warning."""

from __future__ import annotations

import sys
import warnings

TYPE_CHECKING = False  # typing would take a third of the time that `import trioserve` takes
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def renamed_names(
    module: str, names: Mapping[str, str], find: Callable[[str], Any] | None = None
) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a module. `names` maps each old name to the new one.

    Args:
        find: returns the value of any other name, or raises `AttributeError`.
    """

    def get(name: str) -> Any:
        if name in names:
            warn_of_new_name(f"{module}.{name}", f"{module}.{names[name]}")
            return getattr(sys.modules[module], names[name])
        if find is not None:
            return find(name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get


def warn_of_new_name(old: str, new: str) -> None:
    """Warn the caller of a function or property that has the old name."""
    warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=3)
