"""The command ``trioserve``, and ``python -m trioserve``."""

# `signal` makes classes of enumerations first, in which Ctrl-C may come.
import _signal as signal  # type: ignore[import-not-found]
import os
import sys


def _end(number: int, _frame: object) -> None:
    os._exit(128 + number)


# Ctrl-C ends the command at once and says nothing, also while it imports and at its end. What has
# to be ended in order replaces this handler.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end)


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
