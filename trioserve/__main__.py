"""The command ``trioserve``, and ``python -m trioserve``."""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)


def main() -> int:
    """Run the command. Returns the exit code."""
    if os.getpid() == 1:  # the kernel does not end the first process of a container by a signal
        signal.signal(signal.SIGTERM, _end)
    # numpy's BLAS would start a thread for each core; nothing here multiplies matrices with it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if sys.argv[1:2] == ["__complete"]:  # a shell waits for it at each press of Tab
        from trioserve.cli.commands.completions import answer

        answer(sys.argv[2:], os.environ)
        return 0
    from trioserve.cli.memory import uncollected

    with uncollected():
        from trioserve.cli.main import main as run  # takes a quarter of a second

    return run()


if __name__ == "__main__":
    sys.exit(main())
