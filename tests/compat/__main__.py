"""``python -m tests.compat``."""

import sys

from tests.compat.run import main

if __name__ == "__main__":
    sys.exit(main())
