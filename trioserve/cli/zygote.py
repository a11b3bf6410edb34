"""``python -m trioserve.cli.zygote``: becomes servers by forking; see `trioserve.cli.forking`."""

from __future__ import annotations

import socket
import sys

from trioserve.cli.forking import import_all, wait
from trioserve.cli.main import main as serve


def main() -> int:
    """Wait for orders on the socket whose number is the argument."""
    import_all()
    return wait(socket.socket(fileno=int(sys.argv[1])), serve)


if __name__ == "__main__":
    sys.exit(main())
