"""A replica, without Ray, and its separate process with the bundled model."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.lowlevel

from trioserve.concurrency import alongside
from trioserve.config import Config
from trioserve.config.parse import parse
from trioserve.errors import ModelLoadError, ModelProcessError
from trioserve.model_process.connection import Connection, ask, converse
from trioserve.model_process.messages import Introduced
from trioserve.model_process.server import model_of
from trioserve.ray.replica import Replica, argv_of_process
from trioserve.ray.replicas import Address
from trioserve.server.model import LoadedModel
from trioserve.server.model_server import ModelServer

pytestmark = pytest.mark.system

SMALL = Config(ctx_size=512, parallel=2, threads=1, threads_batch=1, drain_timeout=5.0)


async def started(config: Config = SMALL) -> Replica:
    replica = Replica.__new__(Replica)
    await replica.__init__(config, "127.0.0.1")  # type: ignore[misc]
    return replica


@asynccontextmanager
async def connected(address: Address, secret: str | None = None) -> AsyncIterator[Connection]:
    """Connect as an ingress does. Runs on Trio."""
    _, host, port, own = address
    line, told = Connection(), trio.Event()

    def learn(introduced: Introduced) -> LoadedModel:
        return introduced.learn(SMALL)

    with socket.create_connection((host, port)) as connection:
        connection.sendall(f"{own if secret is None else secret} me\n".encode())
        connection.setblocking(False)
        work = partial(converse, line, connection, learn, lambda _: told.set())
        async with alongside(work):
            if secret is None:
                await told.wait()
            yield line


def test_a_replica_from_its_start_to_the_end_of_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        exits = asyncio.Event()
        monkeypatch.setattr(os, "_exit", lambda code: exits.set())
        replica = await started()
        await replica.check_health()

        # an ingress has a lease, and asks over its own connection
        lease = replica.lease(None, "me")
        address = await anext(lease)
        assert (await replica.record_routing_stats())["running"] == 1
        rest = asyncio.create_task(anext(lease))

        async def use() -> None:
            async with connected(address) as line:
                assert model_of(line).n_slots == 2
                assert len((await ask(line, ModelServer.status)).slots) == 2

        await replica._guest.run(use)
        # its connection has broken, and so its lease ends
        with pytest.raises(StopAsyncIteration):
            await rest
        stats = await replica.record_routing_stats()
        assert (stats["slots"], stats["running"], stats["kv"]) == (2, 0, 0.0)

        # when the process ends, so does a connection, and then the replica
        async def lose() -> None:
            async with connected(address) as line:
                assert replica._child.pid is not None
                os.kill(replica._child.pid, signal.SIGKILL)
                with pytest.raises(ModelProcessError):
                    async with line.open(ModelServer.loaded):
                        await trio.sleep_forever()

        await replica._guest.run(lose)
        await exits.wait()
        with pytest.raises(ModelProcessError, match="SIGKILL"):
            await replica.check_health()
        await replica._guest.end()

    asyncio.run(main())


def test_who_does_not_know_the_secret_is_not_answered() -> None:
    async def main() -> None:
        replica = await started()

        async def use() -> None:
            async with connected(replica._address, "wrong") as line:
                while not line.has_ended:
                    await trio.lowlevel.checkpoint()

        await replica._guest.run(use)
        await replica.close()

    asyncio.run(main())


def test_no_connection_ends_a_replica() -> None:
    async def main() -> None:
        replica = await started()
        _, host, port, secret = replica._address

        async def use() -> None:
            for greeting in (b"", b"no", f"{secret} \xff\n".encode("latin-1")):
                with socket.create_connection((host, port)) as connection:
                    connection.sendall(greeting)
                    linger = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            async with connected(replica._address), connected(replica._address):
                pass  # an ingress that has come back before its old connection broke
            async with connected(replica._address) as line:
                await ask(line, ModelServer.status)

        await replica._guest.run(use)
        await replica.check_health()
        await replica.close()

    asyncio.run(main())


def test_serve_ends_a_replica_and_its_process() -> None:
    async def main() -> None:
        replica = await started()
        ended = replica.__del__()
        assert ended is not None
        await ended
        assert replica._child.exit_code == 0
        assert replica.__del__() is None

    asyncio.run(main())


def test_a_model_that_cannot_be_loaded_is_an_error_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"nothing")
    config = Config(model=str(tmp_path / "m.gguf"))
    with pytest.raises(ModelLoadError, match=r"m\.gguf"):
        asyncio.run(started(config))


def test_what_others_must_not_see_is_not_among_the_flags_of_a_process() -> None:
    servers = '{"mcpServers": {"a": {"command": "b", "env": {"KEY": "veiled"}}}}'
    config = Config(api_keys=("secret",), hf_token="hidden", mcp_servers_json=servers, ctx_size=512)
    argv = argv_of_process(config)
    assert not any(one in " ".join(argv) for one in ("secret", "hidden", "veiled"))
    assert parse(argv, {}).config.ctx_size == 512
    assert "--model" in argv  # or it would look for models to choose from
