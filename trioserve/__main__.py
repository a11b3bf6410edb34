"""``python -m trioserve``: the same as the command ``trioserve``."""

import sys

from trioserve.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
