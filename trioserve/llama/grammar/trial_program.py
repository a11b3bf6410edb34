"""The program that compiles one grammar, under limits. Its argument is the folder of `inside`.

It imports nothing of trioserve, so that it takes 20 MB and 0.1 s. Its exit code is 0 if the grammar
did not take too much; nothing is said of other errors.
"""

from __future__ import annotations

import json
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trioserve.children import inside
else:
    sys.path.append(sys.argv[1])
    import inside

_MAX_STACK = 2**28


def main() -> None:
    """Compile the grammar that the parent sends."""
    order = inside.Parent().receive()
    if order is None:
        return
    job = json.loads(order)
    tokenizer = LLTokenizer("byte")

    def work() -> None:
        limits = LLParserLimits(**job["limits"])
        matcher = LLMatcher(tokenizer, job["grammar"], log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()

    inside.limit_time(job["cpu_seconds"])
    if sys.platform != "win32":
        inside.limit_memory(_MAX_STACK + job["memory"])
        inside.lower("RLIMIT_CORE", 0)
    threading.stack_size(_MAX_STACK if sys.maxsize > 2**32 else 2**25)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
