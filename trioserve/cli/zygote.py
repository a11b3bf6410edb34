"""``python -m trioserve.cli.zygote``: becomes servers by forking; see `trioserve.cli.forking`."""

from __future__ import annotations

import socket
import sys

from trioserve.cli import forking
from trioserve.cli.main import main

if __name__ == "__main__":
    sys.exit(forking.wait(socket.socket(fileno=int(sys.argv[1])), main))
