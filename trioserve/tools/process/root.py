"""What is taken from a command of a server that runs as root, beside what Landlock takes.

Landlock does not keep a command from changing the modes, owners and times of files outside of its
fence, and root may change those of all. On a read-only file system nobody can. With some
capabilities, root may also look into the memory of other processes, such as the server.

Like `supervisor`, which uses it, this imports nothing of trioserve.
"""

from __future__ import annotations

import ctypes
import os
import sys

# Of the kernel, since 5.2 and 5.12; the numbers are those of all processors.
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442

_CLONE_NEWNS = 0x20000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOUNT_ATTR_RDONLY = 1

_PR_CAPBSET_DROP = 24
#: To use and own any file and process as far as the fence lets it, to become another user, and to
#: listen on low ports: chown, dac_override, fowner, fsetid, kill, setgid, setuid,
#: net_bind_service.
_KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 10})


def make_read_only(writable: list[str]) -> bool:
    """Make all file systems read-only for this process and what it starts, but for some folders.

    Returns whether that was possible. If not, nothing has changed.

    Raises:
        OSError: it was, but then a folder could not be kept.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None):
        return False
    trees = []
    for path in writable:
        # With what is mounted below it, which stays as it is.
        flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE
        tree = libc.syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), flags)
        if tree < 0:
            return False
        trees.append(tree)
    # What to set, what to clear, and two fields that are not for us.
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY)
    size = ctypes.sizeof(attributes)
    arguments = (_AT_FDCWD, b"/", _AT_RECURSIVE, ctypes.byref(attributes), size)
    if libc.syscall(_MOUNT_SETATTR, *arguments):
        return False
    for path, tree in zip(writable, trees, strict=True):
        target = os.fsencode(path)
        if libc.syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, target, _MOVE_MOUNT_F_EMPTY_PATH):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), path)
        os.close(tree)
    return True


def drop_capabilities() -> None:
    """Have the program that this process becomes do without most of what root may do."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None)
    for number in range(64):  # those that the kernel does not know, it refuses
        if number not in _KEPT_CAPABILITIES:
            libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
