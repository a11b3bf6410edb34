"""Programs that are started for a model or a user, and end with all that they have started.

`open_process` starts one, and its block ends it. `run` waits for one, and has what it wrote, up to
a limit. Both go through `supervisor`, a process of its own for each, which does its work even when
this one is killed, and has the kernel confine the program (`confinement`). A `CommandSandbox` says
which folders a program may use, and `Limits` how much of what.
"""

from trioserve.tools.process.process import (
    CommandSandbox,
    Limits,
    Output,
    Process,
    clean_environment,
    has_landlock,
    open_process,
    run,
)

__all__ = [
    "CommandSandbox",
    "Limits",
    "Output",
    "Process",
    "clean_environment",
    "has_landlock",
    "open_process",
    "run",
]
