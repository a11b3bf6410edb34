"""The process between the server and a command, which ends the command and all it has started.

Its Python reads no settings and no packages, so that it starts quickly, and it imports nothing of
trioserve. Orphans of the command become its children, even those in other sessions, so that none
is lost. It kills them all, and then exits, when the command ends or exceeds a limit, when the
server requests it, and when the server has exited or died.

Its argument is the number of a socket. `trioserve.tools.process` sends the order there, and gets
frames back: ``pid PID``, ``started`` or ``failed REASON``, and ``ended STATUS [LIMIT]``.
"""

from __future__ import annotations

import fcntl
import marshal
import os
import select
import stat
import sys
import time

# Each command waits for these imports. `signal` and `typing` would take longer than all others.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn
else:
    import _signal as signal
if TYPE_CHECKING or __package__:
    from trioserve.children import inside
    from trioserve.tools import confinement
else:
    import confinement
    import inside

#: Seconds between two measurements of the command's use of resources.
_INTERVAL = 0.02

#: Seconds after which it looks more seldom at processes that do not die, as those that wait for a
#: disk, and after which it leaves the removal of many files to the server.
_PATIENCE = 4.0

#: Threads that all processes may have, for each process that there may be.
_THREADS_EACH = 16

#: Measurements after which it also looks into pipes and sockets.
_LOOKS = 5

#: Removes a folder, also one with folders that may not be changed.
REMOVE = 'rm -rf -- "$1" 2>/dev/null || { chmod -R u+rwx -- "$1"; rm -rf -- "$1"; }'

SYSTEM_PATH = "/usr/bin:/bin:/run/current-system/sw/bin"

#: The beginning of the names of private folders. A supervisor locks its folder while in use.
PREFIX = "trioserve-tool-"

#: The exit code of a supervisor that has not removed its folder in time.
FOLDER_LEFT = 3

#: Instead of a reason: the system does not allow namespaces.
_NOT_APART = b"\0"

# Of prctl.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# Of ioctl and fcntl.
_FIONREAD, _SIOCOUTQ, _F_GETPIPE_SZ = 0x541B, 0x5411, 1032


class CommandSupervisor:
    """Watches one command."""

    def __init__(self, control: int, parent: inside.Parent, order: dict[str, Any]) -> None:
        self._control = control
        self._parent = parent
        self._order = order
        self._folder = ""
        self._child = -1
        self._status: int | None = None
        #: With namespaces, a pipe from which the status comes.
        self._statuses = -1
        self._told_to_end = False
        self._n_looks = 0
        #: Bytes in pipes and sockets.
        self._queued = 0

    def run(self) -> None:
        """Start the command, wait for its end or a reason to end it, and leave nothing of it."""
        wakeups = self._prepare()
        try:
            self._start()
            _tell(self._parent, "started")
            limit = self._watch(wakeups)
        finally:
            self._end_all()
        if self._status is not None:
            _tell(self._parent, f"ended {os.waitstatus_to_exitcode(self._status)} {limit}")

    def _prepare(self) -> int:
        confinement.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        wakeups, ours = os.pipe()
        os.set_blocking(wakeups, False)
        os.set_blocking(ours, False)
        signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._note_end)
        return wakeups

    def _note_end(self, *_: object) -> None:
        self._told_to_end = True

    # -- the start

    def _start(self) -> None:
        self._make_folder()
        is_apart = self._order["sandbox"] is not None and self._fork(confinement.fork_apart)
        if not is_apart:
            self._fork(os.fork)
        # The reader of the command's output must see its end.
        _let_go_of_standard_streams()

    def _fork(self, fork: Callable[[], int]) -> bool:
        """Start the command. Returns whether the system allows this kind of fork."""
        user = os.geteuid(), os.getegid()
        failures, to_failures = os.pipe()
        statuses, to_statuses = os.pipe()
        is_apart = fork is not os.fork
        child = fork()
        if not child and is_apart:
            self._become_first(user, to_failures, to_statuses)
        if not child:
            self._become_command(to_failures, is_apart=False)
        os.close(to_failures)
        os.close(to_statuses)
        failure = b""
        while piece := os.read(failures, 4096):
            failure += piece
        os.close(failures)
        if child < 0 or failure == _NOT_APART:
            if child > 0:
                os.waitpid(child, 0)
            os.close(statuses)
            return False
        self._child = child
        if is_apart:
            self._statuses = statuses
            _tell(self._parent, f"pid {child}")
        if failure:
            raise RuntimeError(failure.decode())
        return True

    def _make_folder(self) -> None:
        parent = self._order["temporary"]
        if parent is not None:
            name = f"{os.getpid()}-{os.urandom(6).hex()}"
            unlocked = f"{parent}/trioserve-new-tool-{name}"  # a name that is not looked for
            os.mkdir(unlocked, 0o700)
            _lock(unlocked)
            self._folder = f"{parent}/{PREFIX}{name}"
            os.rename(unlocked, self._folder)
            for name in self._order["folder_variables"]:
                self._order["env"][name] = self._folder

    def _become_first(self, user: tuple[int, int], to_failures: int, to_statuses: int) -> NoReturn:
        """Be the first process of the namespaces. When it ends, the kernel kills all others."""
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            confinement.settle_apart(*user)
            confinement.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            command = os.fork()
        except OSError:
            os.write(to_failures, _NOT_APART)
            os._exit(127)
        if not command:
            self._become_command(to_failures, is_apart=True)
        os.close(to_failures)
        os.close(self._control)
        _let_go_of_standard_streams()
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == command:
                os.write(to_statuses, b"%d" % status)
                os._exit(0)

    def _become_command(self, to_failures: int, *, is_apart: bool) -> NoReturn:
        try:
            os.setsid()
            if not is_apart:  # before it could kill this process's parent
                _tell(self._parent, f"pid {os.getpid()}")
            confinement.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            for name, value in self._order["rlimits"]:
                inside.lower(name, value)
            if self._order["is_limited"]:
                inside.go_first()
            sandbox = self._order["sandbox"]
            if sandbox is not None:
                confinement.make_read_only([*sandbox["writable"], self._folder], is_apart=is_apart)
            os.chdir(self._order["cwd"])
            if sandbox is not None:
                confinement.drop_capabilities()
                confinement.confine(sandbox, self._folder)
                confinement.filter_calls(is_apart=is_apart)
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            _become(self._order["argv"], self._order["env"])
        except OSError as error:
            os.write(to_failures, (error.strerror or str(error)).encode())
        except BaseException as error:
            os.write(to_failures, repr(error).encode())
        finally:
            os._exit(127)

    # -- the watch

    def _watch(self, wakeups: int) -> str:
        """Wait until the command has ended or must end. Returns the limit that it has exceeded."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(wakeups, select.POLLIN)
        interval = int(_INTERVAL * 1000) if self._order["is_limited"] else None
        while True:
            ready = poll.poll(interval)
            if any(descriptor == wakeups for descriptor, _ in ready):
                os.read(wakeups, 4096)
            self._reap()
            if self._status is not None or self._told_to_end:
                return ""
            if any(descriptor == self._control for descriptor, _ in ready):
                return ""
            if limit := self._limit_reached():
                return limit

    def _reap(self) -> bool:
        """Take the ends of children. Returns whether there are children left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if not pid:
                return True
            if pid == self._child:
                told = os.read(self._statuses, 16) if self._statuses >= 0 else b""
                self._status = int(told or status)

    def _limit_reached(self) -> str:
        if not self._order["is_limited"]:
            return ""
        pids, most = self._pids(), self._order["processes"]
        if len(pids) > most or sum(map(_threads, pids)) > most * _THREADS_EACH:
            return "processes"
        memory = self._order["memory"]
        if not memory:
            return ""
        self._n_looks += 1
        if self._n_looks % _LOOKS == 0:
            self._queued = _queued(pids)
        # Only the second, which takes longer, counts once what a fork shares with its parent.
        room = memory - self._queued
        if sum(map(_resident, pids)) > room and sum(map(_proportional, pids)) > room:
            return "memory"
        return ""

    def _pids(self) -> list[int]:
        """The processes of the command, without the first one of its namespaces."""
        return [pid for pid in _descendants() if self._statuses < 0 or pid != self._child]

    # -- the end

    def _end_all(self) -> None:
        """Kill all that is left, in rounds: a process without a supervisor has no limits."""
        deadline = time.monotonic() + _PATIENCE
        while self._child > 0:
            for group in self._groups():
                _kill_group(group)
            if not self._reap():
                return
            time.sleep(0.0005 if time.monotonic() < deadline else _INTERVAL)

    def _groups(self) -> set[int]:
        # A group is killed as one: none of it can fork meanwhile.
        groups = set() if self._status is not None else {self._child}
        try:
            for pid in _descendants():
                groups.add(os.getpgid(pid))
        except ProcessLookupError:  # it has ended; the others are killed in the next round
            pass
        except OSError:  # without descriptors no process can be found
            _free_descriptors()
        return groups - {os.getpgrp()}

    def clean_up(self) -> bool:
        """Remove the folder, and run the last command. If one is run, this process becomes it.

        Returns whether the folder is removed.
        """
        if self._folder:
            try:
                os.rmdir(self._folder)
            except OSError:  # it is not empty
                self._remove_folder()
        if self._order["last"]:
            _become(self._order["last"], self._order["env"])
        return not os.path.lexists(self._folder)

    def _remove_folder(self) -> None:
        """Remove a folder that is not empty, or as much of it as there is time for."""
        remover = os.fork()
        if not remover:
            os.setsid()
            # The command may have put programs into folders of its PATH.
            _become(["sh", "-c", REMOVE, "sh", self._folder], {"PATH": SYSTEM_PATH})
        deadline = time.monotonic() + _PATIENCE
        while os.waitpid(remover, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                _kill_group(remover)
            time.sleep(0.001)


def _lock(folder: str) -> None:
    """Lock a folder until this process ends, if its file system has locks."""
    try:
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)
    except OSError:
        return


def _let_go_of_standard_streams() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    if nothing > 2:
        os.close(nothing)


def _free_descriptors() -> None:
    """Make room for /proc where the limit was lowered: these are not used any more."""
    for standard in (0, 1, 2):
        try:
            os.close(standard)
        except OSError:  # it was closed before
            continue


def _become(argv: list[str], env: dict[str, str]) -> NoReturn:
    """Like `os.execvpe`, whose import a sandbox may refuse. Raises OSError."""
    names = [argv[0]]
    if "/" not in argv[0]:
        names = [f"{folder}/{argv[0]}" for folder in env.get("PATH", os.defpath).split(":")]
    failure: OSError | None = None
    for name in names:
        try:
            os.execve(name, argv, env)
        except (FileNotFoundError, NotADirectoryError) as error:
            failure = failure or error
        except PermissionError as error:
            failure = error
    raise failure or FileNotFoundError(argv[0])


def _tell(parent: inside.Parent, words: str) -> None:
    try:
        parent.send(words.encode())
    except OSError:  # the server has gone, or has closed the socket
        return


# -- processes and descriptors


def _descendants() -> Iterator[int]:
    waiting = [os.getpid()]
    while waiting:
        children = _children(waiting.pop())
        yield from children
        waiting += children


def _children(pid: int) -> list[int]:
    folder = f"/proc/{pid}/task"
    found: list[int] = []
    try:
        for thread in os.listdir(folder):
            with open(f"{folder}/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        pass
    return found


def _threads(pid: int) -> int:
    return _number(f"/proc/{pid}/status", (b"Threads:",))


def _resident(pid: int) -> int:
    """Bytes of memory that are no file's."""
    return _number(f"/proc/{pid}/status", (b"RssAnon:", b"RssShmem:")) * 1024


def _proportional(pid: int) -> int:
    """The same, where a page that N processes share counts as 1/N."""
    names = (b"Pss_Anon:", b"Pss_Shmem:")
    return _number(f"/proc/{pid}/smaps_rollup", names) * 1024


def _queued(pids: list[int]) -> int:
    """Bytes that wait in the pipes and sockets of processes."""
    pipes = sent = received = 0
    for pid, number in _queues(pids):
        descriptor = confinement.descriptor_of(pid, number)
        if descriptor is None:
            continue
        try:
            waiting = _measured(descriptor, _FIONREAD)
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                pipes += fcntl.fcntl(descriptor, _F_GETPIPE_SZ) if waiting else 0
            else:
                received += waiting
                sent += _measured(descriptor, _SIOCOUTQ)
        finally:
            os.close(descriptor)
    # The bytes that one has sent are those that another can receive; either may be closed.
    return pipes + max(sent, received)


def _queues(pids: list[int]) -> Iterator[tuple[int, int]]:
    """A process and a descriptor for each pipe and each socket."""
    known: set[str] = set()
    for pid in pids:
        try:
            numbers = os.listdir(f"/proc/{pid}/fd")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        for number in numbers:
            try:
                target = os.readlink(f"/proc/{pid}/fd/{number}")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if target.startswith(("pipe:", "socket:")) and target not in known:
                known.add(target)
                yield pid, int(number)


def _measured(descriptor: int, request: int) -> int:
    try:
        return int.from_bytes(fcntl.ioctl(descriptor, request, bytes(4)), sys.byteorder)
    except OSError:  # it has no such queue, as one that listens
        return 0


def _number(path: str, names: tuple[bytes, ...]) -> int:
    try:
        with open(path, "rb") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith(names))
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended, or is of sudo
        return 0


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it has ended; of another user, by sudo
        return


# -- as a program


def main() -> None:
    """Run the command that is ordered."""
    control = int(sys.argv[-1])
    os.set_inheritable(control, False)
    parent, supervisor = inside.Parent(control), None
    try:
        order = parent.receive()
        if order is not None:  # the server has not gone before
            supervisor = CommandSupervisor(control, parent, marshal.loads(order))
            supervisor.run()
    except BaseException as error:
        _tell(parent, f"failed {error}")
    code = 0
    if supervisor is not None:
        try:
            code = 0 if supervisor.clean_up() else FOLDER_LEFT
        except OSError:  # there is no such program
            code = 1
    os._exit(code)
