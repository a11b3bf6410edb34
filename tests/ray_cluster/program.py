"""Runs a Ray cluster on this machine, with the application on it, until standard input ends.

The argument is a JSON object: ``nodes``, ``models`` and ``options`` are those of `Plan`. What
happens is written to standard output, a line of JSON each: ``{"url": …}`` when the application is
there. The line ``add`` on standard input adds a node, and ``{"added": true}`` says that it did.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any, TextIO

#: The CPUs that Ray assumes for each node, on any machine. It starts as many workers at once.
_CPUS = 4
_OBJECT_STORE = 80 * 2**20

#: Ports of a node that are chosen here. Where Ray chooses them, a node that is slow to start gives
#: up after 15 seconds.
_PORTS = (
    "dashboard_agent_listen_port",
    "metrics_agent_port",
    "metrics_export_port",
    "runtime_env_agent_port",
)

#: The address of the nodes: only this machine reaches it, and Ray takes this one literally. For
#: 127.0.0.1 it puts the address of the network in some places.
_HOST = "127.0.0.2"


def main(argument: str) -> None:
    """Run the program."""
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray and Serve print what they do
    _run(json.loads(argument), said)


def _run(plan: dict[str, Any], said: TextIO) -> None:
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from trioserve.ray import build

    cluster = Cluster(initialize_head=True, head_node_args={**_node(), "include_dashboard": False})
    try:
        for _ in range(plan["nodes"] - 1):
            cluster.add_node(**_node())
        ray.init(address=cluster.address, _node_ip_address=_HOST, log_to_driver=False)
        port = _free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        serve.run(build(plan["models"], **plan["options"]), route_prefix="/")
        print(json.dumps({"url": f"http://127.0.0.1:{port}"}), file=said)
        for line in sys.stdin:
            if line.strip() == "add":
                cluster.add_node(**_node())
                print(json.dumps({"added": True}), file=said)
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()


def _node() -> dict[str, Any]:
    """The arguments for a node."""
    ports = {name: _free_port() for name in _PORTS}
    options = {"num_cpus": _CPUS, "object_store_memory": _OBJECT_STORE, "node_ip_address": _HOST}
    return ports | options


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main(sys.argv[1])
