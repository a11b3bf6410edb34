"""`CommandFence`: the folders that a program may use."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from typing import Self

import attrs

from trioserve.tools.process import landlock

#: Where systems have programs, libraries and settings. What a user has is not there.
_SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix/store",
    "/gnu/store", "/snap", "/proc", "/sys", "/var/lib/dpkg",
    "/run/systemd/resolve", "/run/resolvconf",
    "/run/NetworkManager/resolv.conf",
)  # fmt: skip

_DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))


@attrs.frozen
class CommandFence:
    """What a program may open: the folders of tools to read and write, those of the system to read.

    The kernel keeps to it (Landlock), for all that the program starts, too. It cannot signal
    processes outside, nor look into them. Sockets are not fenced. Where the kernel has no Landlock,
    nothing is fenced: see `has_fences`.
    """

    writable: tuple[str, ...]
    readable: tuple[str, ...] = _SYSTEM
    devices: tuple[str, ...] = _DEVICES

    @classmethod
    def around(cls, folders: Iterable[str]) -> Self | None:
        """A fence around these folders. None, which is no fence, if one of them is the root."""
        real = tuple(os.path.realpath(folder) for folder in folders)
        return None if "/" in real else cls(real)

    def may_read(self, path: str) -> bool:
        """Whether a program may read what is at this path."""
        real = os.path.realpath(path)
        return any(
            os.path.commonpath([real, folder]) == folder
            for folder in map(os.path.realpath, (*self.writable, *self.readable))
        )


@cache
def has_fences() -> bool:
    """Whether the kernel keeps programs to a fence."""
    return landlock.version() > 0
