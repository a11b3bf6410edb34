"""nginx and Caddy with the files of examples/service, in front of a server."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trio

from tests.support.command import Running, serving
from tests.support.deployment import ROOT
from tests.support.prometheus import free_port
from tests.support.waiting import until

SERVICE = ROOT / "examples" / "service"
ENDLESS = {"prompt": "Once", "n_predict": 100_000, "ignore_eos": True, "stream": True}

pytestmark = [
    pytest.mark.system,
    # Streams that are left inside of httpx.
    pytest.mark.filterwarnings("ignore:Async generator 'http:ResourceWarning"),
]


def program(name: str) -> str:
    if (found := shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")) is None:
        pytest.skip(f"{name} is not installed")
    return found


def nginx(folder: Path, upstream: str, port: int) -> tuple[list[str], dict[str, str]]:
    site = (SERVICE / "nginx.conf").read_text(encoding="utf-8")
    site = site.replace("127.0.0.1:8080", upstream).replace("listen 8081", f"listen {port}")
    site = site.replace("Host $host", f"Host {upstream}")
    places = " ".join(
        f"{kind}_temp_path {folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}}\n"
        f"http {{ access_log off; {places}\n{site}\n}}"
    )
    return [program("nginx"), "-p", str(folder), "-c", str(folder / "nginx.conf")], {}


def caddy(folder: Path, upstream: str, port: int) -> tuple[list[str], dict[str, str]]:
    site = (SERVICE / "Caddyfile").read_text(encoding="utf-8")
    (folder / "Caddyfile").write_text("{\n\tadmin off\n}\n" + site)
    command = [program("caddy"), "run", "--config", str(folder / "Caddyfile"), "--adapter"]
    environ = {"SITE": f":{port}", "TRIOSERVE": upstream, "HOME": str(folder)}
    return [*command, "caddyfile"], environ


@asynccontextmanager
async def behind(kind: str, server: Running, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Start a proxy, and wait until it answers."""
    port = free_port()
    make = {"nginx": nginx, "caddy": caddy}[kind]
    command, environ = make(folder, server.url.removeprefix("http://"), port)
    url = f"http://127.0.0.1:{port}"
    process = await trio.lowlevel.open_process(
        command, env={**os.environ, **environ}, stderr=subprocess.DEVNULL
    )
    try:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:

            async def answers() -> bool:
                try:
                    return (await client.get("/health")).status_code == 200
                except httpx.TransportError:
                    return False

            await until(answers)
            yield client
    finally:
        process.terminate()
        with trio.CancelScope(shield=True):
            await process.wait()


@pytest.mark.parametrize("kind", ["nginx", "caddy"])
async def test_streams_pass_cancels_reach_the_slot_and_streams_resume(
    kind: str, tmp_path: Path
) -> None:
    program(kind)
    model = str(ROOT / "trioserve" / "models" / "bundled.gguf")
    async with (
        serving("-m", model, "--context-shift") as server,
        behind(kind, server, tmp_path) as client,
        server.client() as direct,
    ):

        async def is_idle() -> bool:
            slots = (await direct.get("/slots")).json()
            return not any(slot["is_processing"] for slot in slots)

        assert (await client.get("/slots")).status_code == 404
        # The stream has no end: its events pass while it runs.
        async with client.stream("POST", "/completion", json=ENDLESS) as answer:
            assert answer.status_code == 200
            async with aclosing(answer.aiter_raw()) as parts:
                assert len([await anext(parts) for _ in range(5)]) == 5
                assert not await is_idle()
        await until(is_idle)

        named = {"X-Conversation-Id": "a"}
        limited = {**ENDLESS, "n_predict": 300}
        async with (
            client.stream("POST", "/completion", json=limited, headers=named) as answer,
            aclosing(answer.aiter_raw()) as parts,
        ):
            part = await anext(parts)
        query = {"conv_id": "a", "from": len(part)}
        rest = (await client.get("/v1/stream", params=query)).content
        whole = (await direct.get("/v1/stream", params={"conv_id": "a"})).content
        assert part + rest == whole and b'"stop":true' in whole
