"""Landlock: the fence of the kernel, which a process puts around itself and all that it starts.

Like `supervisor`, which uses it, this imports nothing of trioserve.
"""

from __future__ import annotations

import ctypes
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_ONLY = 1
_BENEATH_PATH = 1

_EXECUTE, _WRITE, _READ, _LIST = 1, 2, 4, 8
#: Of a directory: to remove and make entries (bits 4 to 12), and from version 2 on to move them.
_CHANGE = 0x1FF0
_MOVE, _TRUNCATE, _DEVICE = 1 << 13, 1 << 14, 1 << 15
#: From version 6 on: not to signal processes outside, nor to reach their abstract sockets.
_SCOPES = 0b11

_PR_SET_NO_NEW_PRIVS = 38


def version() -> int:
    """The version of Landlock that the kernel has; 0 without it."""
    if sys.platform != "linux":
        return 0
    return max(0, int(_libc().syscall(_CREATE_RULESET, None, 0, _VERSION_ONLY)))


def confine(fence: dict[str, list[str]], folder: str) -> None:
    """Allow this process what the fence allows, and the folder.

    Raises:
        OSError: the kernel does not let us.
    """
    number = version()
    if not number:
        return  # the server has warned
    reads = _EXECUTE | _READ | _LIST
    known = reads | _WRITE | _CHANGE | (_MOVE if number > 1 else 0)
    known |= (_TRUNCATE if number > 2 else 0) | (_DEVICE if number > 4 else 0)
    rules = (ctypes.c_uint64 * 3)(known, 0, _SCOPES if number > 5 else 0)
    size = 24 if number > 5 else 8
    ruleset = _checked(_libc().syscall(_CREATE_RULESET, ctypes.byref(rules), size, 0))
    writable = [*fence["writable"], *([folder] if folder else [])]
    for rights, paths in ((known, writable), (reads, fence["readable"])):
        for path in paths:
            _allow(ruleset, path, rights)
    for path in fence["devices"]:
        _allow(ruleset, path, known & (_READ | _WRITE | _TRUNCATE | _DEVICE))
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _checked(_libc().syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


class _Rule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("parent", ctypes.c_int32))


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # there is no such thing on this system
        return
    try:
        if not os.path.isdir(path):
            rights &= _EXECUTE | _READ | _WRITE | _TRUNCATE | _DEVICE
        rule = _Rule(rights, parent)
        _checked(_libc().syscall(_ADD_RULE, ruleset, _BENEATH_PATH, ctypes.byref(rule), 0))
    finally:
        os.close(parent)


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def prctl(option: int, value: int) -> None:
    """Call prctl, on Linux. Raises OSError."""
    if sys.platform == "linux":
        _checked(_libc().prctl(option, value, 0, 0, 0))
