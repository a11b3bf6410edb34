"""Programs that are started for a model or a user, and end with all that they have started.

`open_process` starts one, and its block ends it. `run` waits for one, and has what it wrote, up to
a limit. Both go through `supervisor`, a process of its own for each, which does its work even when
this one is killed. A `CommandFence` says which folders a program may use, and `Limits` how much of
what.
"""

from trioserve.tools.process.environment import clean_environment
from trioserve.tools.process.fence import CommandFence, has_fences
from trioserve.tools.process.limits import Limits
from trioserve.tools.process.process import Process, open_process
from trioserve.tools.process.run import Output, run

__all__ = [
    "CommandFence",
    "Limits",
    "Output",
    "Process",
    "clean_environment",
    "has_fences",
    "open_process",
    "run",
]
