"""A zygote whose forks are `tests.support.tiny_child`; it has imported next to nothing."""

from __future__ import annotations

import socket
import sys

from tests.support.tiny_child import main
from trioserve.children.zygote import wait_for_orders

if __name__ == "__main__":
    argv = wait_for_orders(socket.socket(fileno=int(sys.argv[1])))
    sys.exit(0 if argv is None else main(argv))
