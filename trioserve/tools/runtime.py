"""The place where the built-in tools run: this machine, in a container, or on another host.

A `Runtime` runs commands, and has a `FileStore` for the tools that read and write files. `Host` is
this machine, inside a sandbox. An `Isolate` is reached by a program such as ``docker`` or ``ssh``.
`Runtimes` finds the one for a call.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shlex
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

from trioserve.concurrency import Bell, alongside, repeat, run_in_worker
from trioserve.config import Config
from trioserve.errors import ToolRuntimeError, ToolTimeoutError
from trioserve.tools.files.host import HostFiles
from trioserve.tools.files.isolate import IsolateFiles
from trioserve.tools.files.store import FileStore
from trioserve.tools.process import (
    CommandLimits,
    CommandOutput,
    CommandSandbox,
    Process,
    clean_environment,
    open_process,
    run,
)
from trioserve.tools.sandbox import PathSandbox
from trioserve.tools.supervisor import PREFIX, REMOVE, SYSTEM_PATH

_ASK_TIMEOUT = 15.0

#: Runs a command in a directory until standard input ends: then the program that connects to the
#: place has ended, or the connection is lost. All processes that the command started are killed, as
#: a process group (with ``setsid``) and, if they left it, by a variable (with ``/proc``). During
#: ``exec`` a process seems to have no variables, so it searches until it found none three times.
WATCHED = """
if [ -n "$1" ]; then cd -- "$1" || exit 127; fi
call="TRIOSERVE_CALL=$2"
shift 2
exec 3<&0 </dev/null
group=
set -- env "$call" "$@"
if command -v setsid >/dev/null 2>&1; then group=-; set -- setsid "$@"; fi
"$@" 3<&- &
child=$!
end() {
    kill -KILL "$group$child"
    looks=50 nothing=0
    while [ "$nothing" -lt 3 ] && [ "$looks" -gt 0 ]; do
        looks=$((looks - 1)) nothing=$((nothing + 1))
        for file in $(grep -ls "$call" /proc/[0-9]*/environ); do
            file=${file%/environ}
            kill -KILL "${file#/proc/}" && nothing=0
        done
    done
} >/dev/null 2>&1
{ read -r _ <&3; end; } >/dev/null 2>&1 &
watcher=$!
exec 3<&-
wait "$child"
code=$?
kill "$watcher"
end
exit "$code"
"""
_log = logging.getLogger(__name__)
ENGINES = ("docker", "podman")

#: A text that begins with ``-`` would be an option.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9./:@_-]*")

#: Seconds to start a container, which may have to be downloaded.
_PATIENCE = 300.0
_READY = b"ready"
_MAX_WORDS = 2000

#: A text that begins with ``-`` would be an option.
_TARGET = re.compile(r"[A-Za-z0-9._@][A-Za-z0-9._@-]*")

#: No person answers a question, so keys must do, and the host must be known.
_OPTIONS = (
    "BatchMode=yes",
    "PasswordAuthentication=no",
    "KbdInteractiveAuthentication=no",
    "StrictHostKeyChecking=yes",
    "ConnectTimeout=10",
)


class Runtime(ABC):
    """A place where tools run. May be used by several tasks at the same time."""

    @abstractmethod
    def files(self, cwd: str | None) -> FileStore:
        """The files there; relative paths begin in `cwd`, or else in the runtime's directory.

        Raises:
            InvalidRequestError: tools may not use this directory.
        """

    def check(self, cwd: str | None) -> None:  # noqa: B027 - most places would have to be asked
        """Look whether tools may use a directory, where that is known without asking.

        Raises:
            InvalidRequestError: they may not.
        """

    @abstractmethod
    async def command(
        self, argv: Sequence[str], cwd: str | None
    ) -> tuple[Sequence[str], Mapping[str, Any]]:
        """The command that runs a program there, and options for `trioserve.tools.process.run`."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        timeout: float,
        max_output: int,
        on_output: Callable[[str], None] | None = None,
    ) -> CommandOutput:
        """Run a command to its end, or for some seconds. When cancelled, it ends the command first.

        Its standard input is empty, and its standard error goes to its output.

        Args:
            argv: the program, and its arguments.
            cwd: the directory that it starts in; None: the runtime's.
            timeout: seconds after which it is ended.
            max_output: bytes of its output that are kept.
            on_output: receives the kept output, piece by piece.

        Raises:
            InvalidRequestError: tools may not use this directory.
            ToolRuntimeError: it cannot be started.
        """
        command, options = await self.command(argv, cwd)
        return await run(
            command, timeout=timeout, max_output=max_output, on_output=on_output, **options
        )


class Host(Runtime):
    """This machine. Commands may use what is inside of the sandbox, and read the system's files."""

    def __init__(
        self,
        sandbox: PathSandbox,
        limits: CommandLimits,
        on_folder_left: Callable[[], object] = lambda: None,
    ) -> None:
        """Run commands inside the sandbox, each within these limits.

        `on_folder_left` is called when a command leaves a folder that takes long to remove.
        """
        self._sandbox = sandbox
        self._limits = limits
        self._on_folder_left = on_folder_left
        self._command_sandbox = CommandSandbox.around(sandbox.folders)

    def files(self, cwd: str | None) -> FileStore:
        return HostFiles(self._sandbox, cwd)

    def check(self, cwd: str | None) -> None:
        self._sandbox.folder(cwd)

    async def command(
        self, argv: Sequence[str], cwd: str | None
    ) -> tuple[Sequence[str], Mapping[str, Any]]:
        return argv, {
            "env": clean_environment(self._command_sandbox),
            "cwd": self._sandbox.folder(cwd),
            "limits": self._limits,
            "sandbox": self._command_sandbox,
            "on_folder_left": self._on_folder_left,
        }


class Isolate(Runtime):
    """A place that has a shell and the usual small programs: sh, cat, head, wc, mkdir, find."""

    def __init__(self, reach: Callable[[Sequence[str]], Awaitable[list[str]]]) -> None:
        """Run commands there, as `reach` rewrites them. It may raise ToolRuntimeError."""
        self._reach = reach

    def files(self, cwd: str | None) -> FileStore:
        return IsolateFiles(self.ask, cwd)

    async def command(
        self, argv: Sequence[str], cwd: str | None
    ) -> tuple[Sequence[str], Mapping[str, Any]]:
        words = ["sh", "-c", WATCHED, "sh", cwd or "", secrets.token_hex(8), *argv]
        return await self._reach(words), {"stdin": "held", "env": os.environ}

    async def ask(
        self, script: str, *args: str, max_output: int, stdin: bytes = b""
    ) -> CommandOutput:
        """Run a small script there. Its standard error is kept apart.

        Raises:
            ToolRuntimeError: it cannot be started.
            ToolTimeoutError: it takes too long.
        """
        output = await run(
            await self._reach(["sh", "-c", script, "sh", *args]),
            timeout=_ASK_TIMEOUT,
            max_output=max_output,
            stdin=stdin,
            merged=False,
            env=os.environ,
        )
        if output.timed_out:
            raise ToolTimeoutError(f"the tool runtime took longer than {_ASK_TIMEOUT:g} seconds")
        return output


def _in_container(engine: str, id_: str) -> Isolate:
    """A container that runs already. Raises ToolRuntimeError: its id is invalid."""
    if not _ID.fullmatch(id_):
        raise ToolRuntimeError(f"invalid container id: {id_}")

    async def reach(command: Sequence[str]) -> list[str]:
        return [engine, "exec", "-i", id_, *command]

    return Isolate(reach)


def _by_ssh(target: str) -> Isolate:
    """A host, ``user@host`` or a name in ssh's configuration. Raises ToolRuntimeError."""
    if not _TARGET.fullmatch(target):
        raise ToolRuntimeError(f"invalid ssh target: {target}")
    options = [word for option in _OPTIONS for word in ("-o", option)]

    async def reach(command: Sequence[str]) -> list[str]:
        # A shell there reads the command again.
        return ["ssh", "-T", *options, target, shlex.join(command)]

    return Isolate(reach)


class OwnContainer:
    """A container that is started when it is needed, again if it ended, and removed at the end."""

    def __init__(self, engine: str, image: str, limits: CommandLimits) -> None:
        """Make it of an image, with limits for all that runs in it.

        Raises:
            ToolRuntimeError: this is no name of an image.
        """
        if not _IMAGE.fullmatch(image):
            raise ToolRuntimeError(f"invalid image: {image}")
        self._engine = engine
        self._image = image
        self._limits = limits
        self._name = ""
        self._starting = trio.Lock()
        self._client: Process | None = None
        self._stack = AsyncExitStack()

    async def reach(self, command: Sequence[str]) -> list[str]:
        """The command that runs another one there, once it runs.

        Raises:
            ToolRuntimeError: it cannot be started.
        """
        async with self._starting:
            if self._client is None or self._client.has_ended:
                await self.aclose()
                await self._start()
        return [self._engine, "exec", "-i", self._name, *command]

    async def aclose(self) -> None:
        """Remove it, if it runs. Is done within a time, also if cancelled."""
        self._client = None
        await self._stack.aclose()

    async def _start(self) -> None:
        self._name = f"trioserve-tools-{os.getpid()}-{secrets.token_hex(4)}"
        argv = [self._engine, "run", "--rm", "-i", "--name", self._name]
        argv += [f"--pids-limit={self._limits.processes}"]
        argv += [f"--memory={self._limits.memory}"] if self._limits.memory else []
        # It is removed even when this process is killed, and ends even when all processes are: its
        # shell ends with standard input.
        last = [self._engine, "rm", "-f", self._name]
        try:
            with trio.fail_after(_PATIENCE):
                self._client = await self._stack.enter_async_context(
                    open_process([*argv, self._image, "sh"], env=os.environ, last=last)
                )
                await self._until_ready(self._client)
        except trio.TooSlowError:
            await self.aclose()
            raise ToolRuntimeError(
                f"{self._engine} has not started {self._image} within {_PATIENCE:g} seconds"
            ) from None
        except BaseException:
            await self.aclose()
            raise
        _log.info("tools run in the container %s of %s", self._name, self._image)

    async def _until_ready(self, client: Process) -> None:
        assert client.stdin is not None and client.stderr is not None
        with suppress(trio.BrokenResourceError):
            await client.stdin.send_all(b"echo %s\n" % _READY)
        heard = b""
        async for piece in client.stdout:
            heard = (heard + piece)[-_MAX_WORDS:]
            if _READY in heard:
                return
        words = b""
        async for piece in client.stderr:
            words = (words + piece)[-_MAX_WORDS:]
        reason = words.decode(errors="replace").strip()
        raise ToolRuntimeError(f"{self._engine} cannot start {self._image}: {reason}")


@attrs.frozen
class Runtimes:
    """The place that a configuration names, and others that clients may name."""

    default: Runtime
    #: Its name in the configuration; None: this machine.
    default_name: str | None
    #: Clients may name others. They must not get out of a sandbox, or of a container.
    is_free: bool

    def find(self, name: str | None) -> Runtime:
        """The place of this name; None: that of the configuration.

        Raises:
            ToolRuntimeError: it does not exist, or clients may not use it.
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
async def open_runtimes(config: Config, sandbox: PathSandbox) -> AsyncIterator[Runtimes]:
    """Open the place that a configuration names, and close it at the end.

    A container is started by the first call.

    Raises:
        ToolRuntimeError: it names none.
    """
    limits = CommandLimits(processes=config.tools_max_processes, memory=config.tools_max_memory)
    name = config.tools_runtime
    if name is None:
        async with removing_folders() as remove:
            yield Runtimes(Host(sandbox, limits, remove), None, sandbox.is_open)
        return
    kind, _, target = name.partition(":")
    if kind not in ENGINES:
        yield Runtimes(_existing(name), name, is_free=False)
        return
    container = OwnContainer(kind, target, limits)
    try:
        yield Runtimes(Isolate(container.reach), name, is_free=False)
    finally:
        await container.aclose()


def _existing(name: str) -> Runtime:
    kind, _, target = name.partition(":")
    if kind in ENGINES:
        raise ToolRuntimeError(f"tool runtime must name a running container: {name}")
    if kind == "ssh":
        return _by_ssh(target)
    engine = kind.removesuffix("-container")
    if kind == f"{engine}-container" and engine in ENGINES:
        return _in_container(engine, target)
    # Never this machine: the caller wants to be apart from it.
    raise ToolRuntimeError(f"unknown tool runtime: {name}")


# -- the private folders of commands that could not be removed when the command ended

#: Seconds that a removal may take. The next start continues it.
_REMOVAL_SECONDS = 600.0


@asynccontextmanager
async def removing_folders() -> AsyncIterator[Callable[[], None]]:
    """Remove folders that no command uses, while a block runs: at its start, and when called.

    One is removed after the other, in a process that ends with the block. The first are those of
    servers that were killed.
    """
    bell = Bell()

    async def remove() -> None:
        found: list[Path] = []
        await run_in_worker(partial(_find, found))
        for folder in found:
            await _remove(folder)
        await bell.wait()

    async with alongside(partial(repeat, remove)):
        yield bell.ring


def _find(found: list[Path]) -> None:
    """Look for folders that belong to our user and that no supervisor has locked."""
    found += filter(_is_left, Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))


def _is_left(folder: Path) -> bool:
    try:
        if folder.lstat().st_uid != os.geteuid():
            return False
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # it is gone, or no folder
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


async def _remove(folder: Path) -> None:
    command = ["nice", "sh", "-c", REMOVE, "sh", str(folder)]
    try:
        output = await run(
            command, timeout=_REMOVAL_SECONDS, max_output=500, env={"PATH": SYSTEM_PATH}
        )
    except ToolRuntimeError as error:
        _log.warning("the folder %s of a command stays: %s", folder, error)
        return
    if output.exit_code:
        _log.warning("the folder %s of a command stays: %s", folder, output.text.strip())
