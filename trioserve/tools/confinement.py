"""Confinement of a command by the kernel: Landlock, the rights of root, system calls.

Landlock is a sandbox that a process puts around itself and all that it starts. It does not keep a
command from changing the modes, owners and times of files outside of it, and root may change those
of all. A read-only file system prevents that. With some capabilities, root may also look into the
memory of other processes, such as the server. Neither concerns limits of other processes, memory
that the supervisor does not see, and keys: a filter refuses the system calls for these.

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

#: To use and own any file and process as far as the sandbox lets it, to become another user, and to
#: listen on low ports: chown, dac_override, fowner, fsetid, kill, setgid, setuid,
#: net_bind_service.
_KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 10})


def version() -> int:
    """The version of Landlock that the kernel has; 0 without it."""
    if sys.platform != "linux":
        return 0
    return max(0, int(_libc().syscall(_CREATE_RULESET, None, 0, _VERSION_ONLY)))


def confine(sandbox: dict[str, list[str]], folder: str) -> None:
    """Restrict this process to the sandbox and the folder.

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
    writable = [*sandbox["writable"], *([folder] if folder else [])]
    for rights, paths in ((known, writable), (reads, sandbox["readable"])):
        for path in paths:
            _allow(ruleset, path, rights)
    for path in sandbox["devices"]:
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


# -- system calls

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS, _ENOTSUP = 1, 38, 95
_CLONE_NEWUSER = 0x10000000
#: On x86-64, calls of the x32 interface have this bit; their numbers are others.
_X32 = 0x40000000

# Classic BPF: load a word of `seccomp_data`, compare it, return.
_LOAD, _EQUAL, _AT_LEAST, _BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE = 0, 4


def _low(argument: int) -> int:
    return 16 + 8 * argument


#: By `os.uname().machine`: the architecture as the kernel's audit names it, and the number of each
#: call. Memory of System V, of memfd_create and of io_uring counts for no process, and outlives it;
#: keys are the user's; the others show or change what other processes do.
_REFUSED = (
    "shmget", "semget", "msgget", "memfd_create", "memfd_secret", "add_key", "request_key",
    "keyctl", "unshare", "setns", "io_uring_setup", "bpf", "userfaultfd", "perf_event_open",
    "inotify_add_watch", "fanotify_init", "ioprio_set",
)  # fmt: skip
#: These Landlock does not know. Programs such as `cp -a` work where attributes are not supported.
_UNSUPPORTED = ("setxattr", "lsetxattr", "fsetxattr", "setxattrat")
#: These take the number of a process first: without a PID namespace, only 0, the caller, may be.
_SCHEDULING = ("sched_setparam", "sched_setscheduler", "sched_setaffinity", "sched_setattr")
_MACHINES: dict[str, tuple[int, tuple[int, ...], dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        (29, 64, 68, 319, 447, 248, 249, 250, 272, 308, 425, 321, 323, 298, 254, 300, 251, 188, 189,
         190, 463),
        {"prlimit64": 302, "clone": 56, "clone3": 435, "setpriority": 141, "sched_setparam": 142,
         "sched_setscheduler": 144, "sched_setaffinity": 203, "sched_setattr": 314},
    ),
    "aarch64": (
        0xC00000B7,
        (194, 190, 186, 279, 447, 217, 218, 219, 97, 268, 425, 280, 282, 241, 27, 262, 30, 5, 6, 7,
         463),
        {"prlimit64": 261, "clone": 220, "clone3": 435, "setpriority": 140, "sched_setparam": 118,
         "sched_setscheduler": 119, "sched_setaffinity": 122, "sched_setattr": 274},
    ),
}  # fmt: skip


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("first", ctypes.POINTER(_Instruction)))


def filter_calls(*, is_apart: bool) -> bool:
    """Refuse system calls to this process and its children; returns whether that was possible.

    Refused calls fail with EPERM. ``clone3``, whose flags a filter cannot see, does not exist:
    libraries then use ``clone``, which must not make a user namespace. ``prlimit64`` may set limits
    of the calling process only. Without namespaces (`fork_apart`), so may calls for the scheduler.

    Raises:
        OSError: the kernel refuses the filter.
    """
    machine = _machine()
    if machine is None:
        return False
    code = _filter(*machine, is_apart=is_apart)
    program = _Program(len(code), (_Instruction * len(code))(*code))
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _checked(_libc().prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0))
    return True


def _machine() -> tuple[int, tuple[int, ...], dict[str, int]] | None:
    return _MACHINES.get(os.uname().machine) if sys.platform == "linux" else None


def _filter(
    architecture: int, refused: tuple[int, ...], calls: dict[str, int], *, is_apart: bool
) -> list[_Instruction]:
    refuse = _Instruction(_RETURN, 0, 0, _ERRNO | _EPERM)
    code = [
        _Instruction(_LOAD, 0, 0, _ARCHITECTURE),
        _Instruction(_EQUAL, 1, 0, architecture),
        refuse,
        _Instruction(_LOAD, 0, 0, _NUMBER),
        _Instruction(_AT_LEAST, 0, 1, _X32),
        refuse,
        _Instruction(_EQUAL, 0, 1, calls["clone3"]),
        _Instruction(_RETURN, 0, 0, _ERRNO | _ENOSYS),
        # Its first argument has the flags.
        _Instruction(_EQUAL, 0, 4, calls["clone"]),
        _Instruction(_LOAD, 0, 0, _low(0)),
        _Instruction(_BITS, 0, 1, _CLONE_NEWUSER),
        refuse,
        _Instruction(_RETURN, 0, 0, _ALLOW),
        # A process (0: the caller), a resource, and the address of new limits (0: it only asks).
        _Instruction(_EQUAL, 0, 8, calls["prlimit64"]),
        _Instruction(_LOAD, 0, 0, _low(0)),
        _Instruction(_EQUAL, 4, 0, 0),
        _Instruction(_LOAD, 0, 0, _low(2)),
        _Instruction(_EQUAL, 0, 3, 0),
        _Instruction(_LOAD, 0, 0, _low(2) + 4),
        _Instruction(_EQUAL, 0, 1, 0),
        _Instruction(_RETURN, 0, 0, _ALLOW),
        refuse,
    ]
    if not is_apart:
        for name in _SCHEDULING:
            code += [_Instruction(_EQUAL, 0, 4, calls[name]), *_only_zero(0, refuse)]
        # Its first argument says that the second is a process, a group or a user.
        code += [
            _Instruction(_EQUAL, 0, 6, calls["setpriority"]),
            _Instruction(_LOAD, 0, 0, _low(0)),
            _Instruction(_EQUAL, 0, 3, 0),
            *_only_zero(1, refuse),
        ]
    for name, number in zip((*_REFUSED, *_UNSUPPORTED), refused, strict=True):
        error = _ENOTSUP if name in _UNSUPPORTED else _EPERM
        code += [
            _Instruction(_EQUAL, 0, 1, number),
            _Instruction(_RETURN, 0, 0, _ERRNO | error),
        ]
    return [*code, _Instruction(_RETURN, 0, 0, _ALLOW)]


def _only_zero(argument: int, refuse: _Instruction) -> list[_Instruction]:
    """Allow the call if the argument is 0, and else refuse it."""
    return [
        _Instruction(_LOAD, 0, 0, _low(argument)),
        _Instruction(_EQUAL, 0, 1, 0),
        _Instruction(_RETURN, 0, 0, _ALLOW),
        refuse,
    ]


# -- namespaces

_CLONE_NEWIPC, _CLONE_NEWPID = 0x08000000, 0x20000000
_SIGCHLD = 17
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8


def fork_apart() -> int:
    """Fork a child with PID, IPC and mount namespaces, where the system allows it; -1 if not.

    An ordinary user needs a user namespace for that. Root without CAP_SYS_ADMIN gets none: there,
    it would have capabilities that were taken from it, or lose the files of other users.
    Call `settle_apart` in the child.
    """
    machine = _machine()
    if machine is None:
        return -1
    flags = _CLONE_NEWPID | _CLONE_NEWIPC | _CLONE_NEWNS | _SIGCHLD
    flags |= _CLONE_NEWUSER if os.geteuid() else 0
    # With the GIL held, as in os.fork. There are no other threads.
    return int(ctypes.PyDLL(None).syscall(machine[2]["clone"], flags, 0, 0, 0, 0))


def settle_apart(uid: int, gid: int) -> None:
    """Give the child of `fork_apart` its user, and a /proc that has its own processes only.

    Raises:
        OSError: the system does not allow that, as in many containers.
    """
    if uid:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    mount = _libc().mount
    _checked(mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
    _checked(mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None))


# -- descriptors of other processes

_PIDFD_GETFD = 438


def descriptor_of(pid: int, number: int) -> int | None:
    """A copy of a descriptor of another process; None if it has ended, or has closed it."""
    try:
        process = os.pidfd_open(pid)
    except (ProcessLookupError, PermissionError):
        return None
    copy = int(_libc().syscall(_PIDFD_GETFD, process, number, 0))
    os.close(process)
    return copy if copy >= 0 else None


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


def make_read_only(writable: list[str], *, is_apart: bool = False) -> bool:
    """Make all file systems read-only for this process and its children, except some folders.

    Root may do that, and the children of `fork_apart`. Returns whether that was possible. If not,
    nothing has changed.

    Raises:
        OSError: it was, but then a folder could not be kept.
    """
    if sys.platform != "linux" or not (is_apart or os.geteuid() == 0):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None):
        return False
    trees = []
    for path in writable:
        # With the mounts below it, which do not change.
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
    """Drop most of root's capabilities for the program that this process becomes."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None)
    for number in range(64):  # the kernel refuses those that it does not have
        if number not in _KEPT_CAPABILITIES:
            libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
