"""A replica and its child, without Ray: a process of its own with the bundled model."""

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trioserve.children.frames import framed
from trioserve.children.reports import Ready
from trioserve.config import Config
from trioserve.config.parse import parse
from trioserve.errors import ModelLoadError, ModelProcessError
from trioserve.ray import replica as module
from trioserve.ray.calls import HEAD, LOST, TAKEN, UNSENT
from trioserve.ray.replica import Replica, ServerProcess, child_argv

pytestmark = pytest.mark.system

SMALL = Config(ctx_size=512, parallel=2, threads=1, threads_batch=1, drain_timeout=5.0)
LONG = {"prompt": "Once", "n_predict": 400, "ignore_eos": True, "stream": True}


def sent(method: str, target: str, body: Any = None) -> tuple[Any, ...]:
    return method, target, [(b"content-type", b"application/json")], json.dumps(body).encode()


async def _ask(replica: Replica, method: str, target: str, body: Any = None) -> tuple[int, Any]:
    parts = [part async for part in replica.forward(sent(method, target, body))]
    assert parts[0] == (TAKEN,)
    assert parts[1][0] == HEAD
    return parts[1][1], b"".join([parts[1][3], *parts[2:]])


async def _busy(replica: Replica) -> int:
    _, body = await _ask(replica, "GET", "/slots")
    return sum(slot["is_processing"] for slot in json.loads(body))


def test_a_replica_from_its_start_to_the_end_of_its_child(monkeypatch) -> None:
    exits = asyncio.Event()
    monkeypatch.setattr(os, "_exit", lambda code: exits.set())

    async def run() -> None:
        replica = Replica.__new__(Replica)
        await replica.__init__(SMALL)
        await replica.check_health()

        # a whole answer comes in one piece
        body = {"prompt": "Once", "n_predict": 4}
        parts = [part async for part in replica.forward(sent("POST", "/completion", body))]
        assert [part[0] for part in parts] == [TAKEN, HEAD]
        assert json.loads(parts[1][3])["tokens_predicted"] == 4

        # leaving a stream frees its slot
        stream = replica.forward(sent("POST", "/completion", LONG))
        await anext(stream)
        head = await anext(stream)
        assert head[1] == 200 and b"data: " in head[3] + await anext(stream)
        stats = await replica.record_routing_stats()
        assert (stats["slots"], stats["running"], stats["waiting"]) == (2, 1, 0)
        assert 0 < stats["kv"] <= 1
        await stream.aclose()
        async with asyncio.timeout(5):
            while await _busy(replica):
                await asyncio.sleep(0.005)
        assert (await replica.record_routing_stats())["running"] == 0

        # when the child ends, so does a stream, and then the replica
        stream = replica.forward(sent("POST", "/completion", LONG))
        await anext(stream)
        await anext(stream)
        os.kill(replica._child.pid, signal.SIGKILL)
        rest = [part async for part in stream]
        assert rest[-1] == (LOST,)
        await replica._child.ended.wait()
        assert [part async for part in replica.forward(sent("GET", "/health"))][1] == (UNSENT,)
        with pytest.raises(ModelProcessError, match="SIGKILL"):
            await replica.check_health()
        await exits.wait()

    asyncio.run(run())


def test_serve_ends_a_replica_and_its_child(tmp_path) -> None:
    async def run() -> None:
        replica = Replica.__new__(Replica)
        await replica.__init__(SMALL)
        ended = replica.__del__()
        assert ended is not None
        await ended
        assert replica._child.last_words() == (
            "The process of the model ended with exit code 0; "
            "what it said is in the log of its replica."
        )
        assert not replica._child.socket_path.parent.exists()
        assert replica.__del__() is None

    asyncio.run(run())


def test_a_model_that_cannot_be_loaded_is_an_error_with_the_reason(tmp_path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"nothing")

    async def run() -> None:
        child = ServerProcess(tmp_path / "x.sock", ["-m", str(tmp_path / "m.gguf")], os.environ)
        with pytest.raises(ModelLoadError, match=r"m\.gguf"):
            await child.start()
        assert child.ended.is_set()

    asyncio.run(run())


async def _start(tmp_path: Path, program: str) -> ServerProcess:
    """Start a child that is a small program, which says with `tell()` that it is ready."""
    tell = f"def tell(): os.write(0, {READY!r})"
    command = (sys.executable, "-c", f"import os, signal\n{tell}\n{program}")
    child = ServerProcess(tmp_path / "x.sock", [], os.environ, command)
    await child.start()
    return child


READY = framed(msgspec.msgpack.encode(Ready({"id": "m"})))


def test_a_child_that_does_not_end_in_time_is_killed(tmp_path) -> None:
    async def run() -> None:
        child = await _start(tmp_path, "signal.signal(15, signal.SIG_IGN); tell(); os.read(0, 1)")
        assert child.info == {"id": "m"}
        await child.stop(0.1)
        assert "SIGKILL" in child.last_words()

    asyncio.run(run())


def test_a_child_ends_with_its_lifeline(tmp_path) -> None:
    async def run() -> None:
        child = await _start(tmp_path, "tell(); os.read(0, 1)")
        child._frames.shutdown(socket.SHUT_RDWR)
        async with asyncio.timeout(10):
            await child.ended.wait()
        assert "exit code 0" in child.last_words()

    asyncio.run(run())


def test_a_child_that_does_not_answer_is_killed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("trioserve.ray.replica._ANSWER_TIMEOUT", 0.1)
    listens = (
        "import socket\ns = socket.socket(socket.AF_UNIX)\n"
        f"s.bind({str(tmp_path / 'x.sock')!r})\ns.listen(); tell(); os.read(0, 1)"
    )

    async def run() -> None:
        replica = Replica.__new__(Replica)
        replica._child, replica._n_missed = await _start(tmp_path, listens), 0
        for _ in range(module._MAX_MISSED):
            with pytest.raises(ModelProcessError, match="does not answer"):
                await replica.check_health()
        async with asyncio.timeout(10):
            await replica._child.ended.wait()
        await replica._child.stop(0)

    asyncio.run(run())


def test_what_others_must_not_see_is_not_among_the_flags_of_a_child() -> None:
    servers = '{"mcpServers": {"a": {"command": "b", "env": {"KEY": "veiled"}}}}'
    config = Config(api_keys=("secret",), hf_token="hidden", mcp_servers_json=servers, ctx_size=512)
    argv = child_argv(config)
    assert not any(one in " ".join(argv) for one in ("secret", "hidden", "veiled"))
    assert parse(argv, {}).config.ctx_size == 512
    assert "--model" in argv  # or it would look for models to choose from
