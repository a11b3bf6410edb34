"""A trial: a grammar that may take long to compile is compiled in a separate process first.

llguidance's limits do not cover all of its work. Finding out whether any text matches several
patterns at once may take hours, and this process could not stop it. A trial's process takes 20 MB
and 0.1 s to start, has limits of time and memory, and compiles one grammar.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

#: What a grammar may take: seconds of a CPU, and bytes.
CPU_SECONDS = 1.0
MEMORY = 200 * 2**20
_WALL_SECONDS = 8.0
_MAX_STACK = 2**28

#: Keywords of a schema that intersect sets of texts, or multiply others.
_COSTLY = re.compile(r'"(allOf|patternProperties|multipleOf|pattern)\\*"|& /')
_OF_LARK = re.compile(rf"[&~]|{_COSTLY.pattern}")
_REPEATED = re.compile(r"(?<!x)\{[0-9]")
_MAX_PLAIN_SCHEMA = 2**16  # characters
_MAX_PLAIN_SOURCE = 2048
_TOKENS = re.compile(r"<\[\^?[0-9,]+\]>")


class TrialError(Exception):
    """The grammar takes too much. The message is a part of a sentence."""


class TrialDelayedError(Exception):
    """The process could not start, or did not get the CPU: nothing is known of the grammar."""


def is_needed(kind: str, grammar: str) -> bool:
    """Whether a grammar in llguidance's form may take long to compile."""
    if kind in ("json_schema", "json_object", "tools"):
        return len(grammar) > _MAX_PLAIN_SCHEMA or _COSTLY.search(grammar) is not None
    if kind in ("lark", "structural") and _OF_LARK.search(grammar) is not None:
        return True
    return len(grammar) > _MAX_PLAIN_SOURCE or _REPEATED.search(grammar) is not None


def run(grammar: str, limits: Mapping[str, Any]) -> None:
    """Compile a grammar in llguidance's form, with a vocabulary of bytes. Blocks for seconds.

    Raises:
        TrialError: it takes too much time or memory. Nothing is said of other errors.
        TrialDelayedError: it could not be tried now.
    """
    job = json.dumps({"grammar": _TOKENS.sub("<[1]>", grammar), "limits": dict(limits)})
    command = [sys.executable, "-P", "-W", "ignore", __file__]
    try:
        done = subprocess.run(
            command, input=job.encode(), capture_output=True, timeout=_WALL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise TrialDelayedError("other work has the CPU") from None
    except OSError as error:
        raise TrialDelayedError(f"no process can be started: {error.strerror}") from None
    if done.returncode:
        raise TrialError("it takes too much time or memory to compile")


def _main() -> None:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    job = json.loads(sys.stdin.buffer.read())
    tokenizer = LLTokenizer("byte")

    def work() -> None:
        limits = LLParserLimits(**job["limits"])
        matcher = LLMatcher(tokenizer, job["grammar"], log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()

    _limit()
    threading.stack_size(_MAX_STACK if sys.maxsize > 2**32 else 2**25)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _limit() -> None:
    """Have the system end this process when it takes too much."""
    try:
        import resource
    except ImportError:  # Windows; the parent still limits the time
        return
    # SIGPROF ends a process that does not handle it.
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    size = 2**30
    try:
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        pass
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = size + _MAX_STACK + MEMORY
    if hard in (resource.RLIM_INFINITY, -1) or limit <= hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    _main()
