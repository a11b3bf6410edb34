"""A trial: a grammar that may take long to compile is compiled in a separate process first.

llguidance's limits do not cover all of its work. Finding out whether any text matches several
patterns at once may take hours, and this process could not stop it. The process of a trial runs
`trial_program`, has limits of time and memory, and compiles one grammar.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from trioserve.children.child import INSIDE, Child, ChildError, bare_environment

#: Limits of a trial: seconds of a CPU, and bytes.
CPU_SECONDS = 1.0
MEMORY = 200 * 2**20
_WALL_SECONDS = 8.0

_PROGRAM = str(Path(__file__).with_name("trial_program.py"))

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
    """Return True if a grammar in llguidance's form may take long to compile."""
    if kind in ("json_schema", "json_object", "tools"):
        return len(grammar) > _MAX_PLAIN_SCHEMA or _COSTLY.search(grammar) is not None
    if kind in ("lark", "structural") and _OF_LARK.search(grammar) is not None:
        return True
    if kind == "gbnf" and " & ~" in grammar:
        return True
    return len(grammar) > _MAX_PLAIN_SOURCE or _REPEATED.search(grammar) is not None


def run(grammar: str, limits: Mapping[str, Any]) -> None:
    """Compile a grammar in llguidance's form, with a vocabulary of bytes. Blocks for seconds.

    Raises:
        TrialError: it takes too much time or memory. Nothing is said of other errors.
        TrialDelayedError: it could not be tried now.
    """
    job = {"grammar": _TOKENS.sub("<[1]>", grammar), "limits": dict(limits),
           "cpu_seconds": CPU_SECONDS, "memory": MEMORY}  # fmt: skip
    command = [sys.executable, "-P", "-W", "ignore", _PROGRAM, INSIDE]
    deadline = monotonic() + _WALL_SECONDS
    try:
        # It says nothing, and ends.
        with Child.spawn(command, env=bare_environment()) as child, suppress(ChildError):
            child.send(json.dumps(job).encode(), deadline)
            child.receive(deadline)
    except TimeoutError:
        raise TrialDelayedError("other work has the CPU") from None
    except OSError as error:
        raise TrialDelayedError(f"no process can be started: {error.strerror}") from None
    if child.code:
        raise TrialError("it takes too much time or memory to compile")
