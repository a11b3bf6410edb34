"""A zygote whose forks are servers, for a router in the process of the tests, which has threads."""

from __future__ import annotations

import importlib
import socket
import sys

from trioserve.children.zygote import wait_for_orders
from trioserve.cli import forking
from trioserve.cli.main import main

if __name__ == "__main__":
    for name in (*forking._SHARED, *forking._OF_MODELS):
        importlib.import_module(name)
    argv = wait_for_orders(socket.socket(fileno=int(sys.argv[1])))
    sys.exit(0 if argv is None else main(argv))
