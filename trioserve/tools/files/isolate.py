"""`IsolateFiles`: the files of a place that only commands reach."""

from __future__ import annotations

import io
import posixpath
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

import trio

from trioserve.errors import ToolFileError, ToolRuntimeError
from trioserve.tools.files.host import JUNK
from trioserve.tools.files.store import (
    DirectoryEntry,
    DirectoryListing,
    FileStatus,
    FileStore,
    Kinds,
)
from trioserve.tools.process import CommandOutput

_MAX_BYTES = 64 * 2**20
_MAX_LISTING = 8 * 2**20
_MAX_ANSWER = 8192

_PWD = "pwd"

_STATUS = """
if [ -d "$1" ]; then echo dir 0
elif [ -f "$1" ]; then echo file $(wc -c < "$1")
elif [ -e "$1" ]; then echo other 0
else echo none 0; fi
"""

_READ = """
if ! [ -f "$1" ]; then echo "not a regular file" >&2; exit 1; fi
exec head -c "$2" < "$1"
"""

#: Writes only after all data has arrived. An existing file keeps its mode and owner.
_WRITE = """
mkdir -p -- "$(dirname -- "$1")" || exit
new="$1.trioserve-$$"
trap 'rm -f -- "$new"' EXIT
cat > "$new" && [ "$(wc -c < "$new")" -eq "$2" ] || exit
if [ -e "$1" ]; then cat "$new" > "$1"; else mv -- "$new" "$1"; fi
"""

_NAMES = " -o ".join(f"-name {name}" for name in sorted(JUNK))
_PRUNE = rf"-mindepth 1 $depth -type d \( {_NAMES} \) -prune"
_DEPTH = 'cd -- "$1" || exit; depth=; if [ "$2" -gt 0 ]; then depth="-maxdepth $2"; fi\n'
_DIRS = _DEPTH + f"find . {_PRUNE} -print0 -o -mindepth 1 -type d -print0\n"
_FILES = _DEPTH + f"find . {_PRUNE} -o -type f -print0\n"
#: A repository may name a program for Git to run; this prevents it.
_GIT_FILES = (
    'cd -- "$1" && git -c core.fsmonitor=false ls-files -z --cached --others --exclude-standard '
    "2>/dev/null"
)


class IsolateFiles(FileStore):
    """The files of a place that only commands reach."""

    def __init__(self, ask: Callable[..., Awaitable[CommandOutput]], cwd: str | None) -> None:
        """Reach them by `ask`, which is `Isolate.ask`.

        Relative paths begin in `cwd`, or where the place says.
        """
        self._ask = ask
        self._cwd = cwd

    def resolve(self, path: str) -> str:
        """The absolute path of `path`; links are not followed."""
        if path.startswith("/"):
            return path
        if self._cwd is None or not self._cwd.startswith("/"):
            home = self._run(_PWD, max_output=_MAX_ANSWER).text.rstrip("\n") or "/"
            self._cwd = posixpath.join(home, self._cwd or "")
        return posixpath.join(self._cwd, path)

    def status(self, path: str) -> FileStatus | None:
        output = self._run(_STATUS, self.resolve(path), max_output=_MAX_ANSWER)
        match output.text.split():
            case ["none", _]:
                return None
            case [("file" | "dir" | "other") as kind, size]:
                return FileStatus(kind, int(size))
        raise ToolRuntimeError(f"cannot stat file: {path} ({_reason(output)})")

    def open(self, path: str) -> io.BufferedReader:
        """Open a regular file for reading, up to its first 64 MiB."""
        output = self._run(_READ, self.resolve(path), str(_MAX_BYTES), max_output=_MAX_BYTES)
        if output.exit_code:
            raise ToolFileError(f"failed to open file: {path} ({_reason(output)})")
        return io.BufferedReader(io.BytesIO(output.data))

    def write(self, path: str, data: bytes) -> None:
        output = self._run(
            _WRITE, self.resolve(path), str(len(data)), max_output=_MAX_ANSWER, stdin=data
        )
        if output.exit_code:
            raise ToolFileError(f"failed to write file: {path} ({_reason(output)})")

    def list(self, path: str, kinds: Kinds, max_depth: int) -> DirectoryListing:
        base = self.resolve(path)
        status = self.status(base)
        if status is None or status.kind != "dir":
            raise ToolFileError(f"path does not exist or is not a directory: {path}")
        listing = DirectoryListing(iter(()))
        entries = set(self._entries(base, kinds, max_depth, listing))
        listing.entries = iter(sorted(entries, key=lambda one: one.path))
        return listing

    def _entries(
        self, base: str, kinds: Kinds, max_depth: int, listing: DirectoryListing
    ) -> Iterator[DirectoryEntry]:
        find = partial(self._find, base, max_depth, listing)
        if kinds == "file" and (found := self._find(base, 0, listing, _GIT_FILES)) is not None:
            names = (name for name in found if not max_depth or name.count("/") < max_depth)
            yield from (DirectoryEntry(name, is_dir=False) for name in names)
            return
        if kinds != "file":
            yield from (DirectoryEntry(name, is_dir=True) for name in find(_DIRS) or ())
        if kinds != "dir":
            yield from (DirectoryEntry(name, is_dir=False) for name in find(_FILES) or ())

    def _find(
        self, base: str, max_depth: int, listing: DirectoryListing, script: str
    ) -> Sequence[str] | None:
        """The names that a script has found; None if it has found nothing and failed."""
        output = self._run(script, base, str(max_depth), max_output=_MAX_LISTING)
        if output.exit_code and not output.data:
            return None
        listing.truncated |= output.truncated or output.exit_code != 0
        names = output.data.decode(errors="surrogateescape").split("\0")
        return [name.removeprefix("./") for name in names[:-1]]

    def _run(self, script: str, *args: str, max_output: int, stdin: bytes = b"") -> CommandOutput:
        for one in args:
            if "\0" in one:
                raise ToolFileError("a path cannot have a NUL character")
        ask = partial(self._ask, script, *args, max_output=max_output, stdin=stdin)
        return trio.from_thread.run(ask)


def _reason(output: CommandOutput) -> str:
    return output.errors.decode(errors="replace").strip() or f"exit code {output.exit_code}"
