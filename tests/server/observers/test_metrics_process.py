"""Metrics of the process."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import pytest

from tests.server.observers.test_metrics import read
from tests.support.clients import client_of
from trioserve.server.observers import metrics

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")


def test_memory_and_descriptors_are_those_of_this_process() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    before = read(metrics.render_process().decode())
    with open(os.devnull), open(os.devnull):
        after = read(metrics.render_process().decode())
    assert after["process_open_fds"] == before["process_open_fds"] + 2
    assert after["process_max_fds"] == limit
    resident = pages * os.sysconf("SC_PAGESIZE")
    assert before["process_resident_memory_bytes"] == pytest.approx(resident, rel=0.05)
    assert 0 < before["process_cpu_seconds_total"] <= after["process_cpu_seconds_total"]


async def test_a_server_has_them() -> None:
    async with client_of(metrics_endpoint=True) as client:
        seen = read((await client.get("/metrics")).text)
    assert seen["process_resident_memory_bytes"] > 2**20
    assert seen["process_start_time_seconds"] > 1.7e9
