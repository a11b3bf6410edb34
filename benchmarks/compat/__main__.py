"""``python -m benchmarks.compat``."""

import sys

from benchmarks.compat.run import main

if __name__ == "__main__":
    sys.exit(main())
