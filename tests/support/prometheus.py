"""Debian's Prometheus, in a separate process, for a test."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
import trio
import yaml

from tests.support.deployment import DEPLOY
from tests.support.waiting import patiently

EXAMPLE = DEPLOY / "prometheus"

needs_prometheus = pytest.mark.skipif(
    None in map(shutil.which, ("prometheus", "promtool")),
    reason="prometheus and promtool are not installed: apt-get install prometheus",
)


@attrs.frozen
class Prometheus:
    """One that runs."""

    client: httpx.AsyncClient

    async def get(self, path: str, **query: object) -> Any:
        """Ask its API."""
        answer = await self.client.get(f"/api/v1/{path}", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    async def ask(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """The series of an expression now, each with its labels."""
        found = (await self.get("query", query=expr))["result"]
        return [(one["metric"], float(one["value"][1])) for one in found]


@asynccontextmanager
async def scraping(folder: Path, targets: Sequence[str]) -> AsyncIterator[Prometheus]:
    """Run it with the configuration of the example, but with these targets, each second."""
    port = free_port()
    (folder / "prometheus.yml").write_text(yaml.safe_dump(_config(targets)))
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    process = await trio.lowlevel.open_process(command, stdin=subprocess.DEVNULL)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            await until_ready(client, "/-/ready")
            yield Prometheus(client)
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


def _config(targets: Sequence[str]) -> Mapping[str, Any]:
    config = yaml.safe_load((EXAMPLE / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(EXAMPLE / name) for name in config["rule_files"]]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": list(targets)}]
    return config


async def until_ready(client: httpx.AsyncClient, path: str) -> None:
    """Ask until the answer is 200."""
    with patiently():
        while True:
            with suppress(httpx.ConnectError):
                if (await client.get(path)).status_code == 200:
                    return
            await trio.sleep(0.1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
