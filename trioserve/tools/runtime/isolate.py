"""`Isolate`: tools in another place, which a program such as ``docker`` or ``ssh`` reaches."""

from __future__ import annotations

import os
import secrets
from abc import abstractmethod
from collections.abc import Callable, Sequence

from trioserve.errors import ToolRuntimeError, ToolTimeoutError
from trioserve.tools.files.store import FileStore
from trioserve.tools.process import Output, run
from trioserve.tools.runtime.isolate_files import IsolateFiles
from trioserve.tools.runtime.runtime import Runtime

_TIMEOUT = 15.0

#: Runs a command in a directory, until standard input ends, which is when nobody waits any more:
#: the program that reaches the place has ended, or the connection is lost. What the command has
#: started ends with it: it has a group of its own where there is ``setsid``, and processes that
#: left the group are known by a variable where there is ``/proc``. In the middle of ``exec``, a
#: process seems to have no variables, so it looks until it has found nothing three times.
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


class Isolate(Runtime):
    """A place that has a shell and the usual small programs: sh, cat, head, wc, mkdir, find."""

    @abstractmethod
    async def argv(self, command: Sequence[str]) -> list[str]:
        """What runs a command there.

        Raises:
            ToolRuntimeError: the place cannot be reached.
        """

    def files(self, cwd: str | None) -> FileStore:
        """The files there."""
        return IsolateFiles(self.ask, cwd)

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        timeout: float,
        max_output: int,
        on_output: Callable[[str], None] | None = None,
    ) -> Output:
        """Run a command there. It ends there, too, when this is cancelled."""
        return await run(
            await self.argv(["sh", "-c", WATCHED, "sh", cwd or "", secrets.token_hex(8), *argv]),
            timeout=timeout,
            max_output=max_output,
            on_output=on_output,
            stdin="held",
            env=os.environ,
        )

    async def ask(self, script: str, *args: str, max_output: int, stdin: bytes = b"") -> Output:
        """Run a small script there. Its standard error is kept apart.

        Raises:
            ToolRuntimeError: it cannot be started.
            ToolTimeoutError: it takes too long.
        """
        output = await run(
            await self.argv(["sh", "-c", script, "sh", *args]),
            timeout=_TIMEOUT,
            max_output=max_output,
            stdin=stdin,
            merged=False,
            env=os.environ,
        )
        if output.timed_out:
            raise ToolTimeoutError(f"the tool runtime took longer than {_TIMEOUT:g} seconds")
        return output


def check_alive(output: Output, what: str) -> Output:
    """The output of a script that cannot fail.

    Raises:
        ToolRuntimeError: it has failed, so the place is not what it should be.
    """
    if output.exit_code:
        raise ToolRuntimeError(f"{what}: {output.errors.decode(errors='replace').strip()}")
    return output
