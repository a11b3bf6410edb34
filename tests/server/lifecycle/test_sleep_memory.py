"""A real model that is freed and loaded again: its file, and the memory of the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import tiny_models
from tests.support.sleepers import no_collection, wake
from trioserve.config import Config
from trioserve.errors import ModelLoadError
from trioserve.models import BUNDLED
from trioserve.server import Server

__all__ = ["no_collection"]


async def test_a_file_that_is_gone_damaged_or_another_one(tmp_path: Path) -> None:
    """The model is loaded again from its file; a bad file fails requests, and not the server."""
    path, data = tmp_path / "a.gguf", BUNDLED.read_bytes()
    path.write_bytes(data)
    async with Server(Config(model=str(path), ctx_size=256, threads=1)) as server:
        first = await server.complete("Once", max_tokens=4, temperature=0.0)
        own = server.model.info.n_vocab
        await server.sleep()
        path.unlink()
        with pytest.raises(ModelLoadError):
            await server.complete("Once")
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(ModelLoadError):
            await server.complete("Once")
        tiny_models.write_generating(tmp_path, "llama").rename(path)
        await wake(server)
        assert server.model.info.n_vocab != own
        await server.sleep()
        path.write_bytes(data)
        again = await server.complete("Once", max_tokens=4, temperature=0.0)
        assert again.text == first.text


#: Run as a separate process, with malloc as the command has it: memory that other tests left in the
#: heaps of many threads comes and goes by itself.
_SLEEPER = """
import sys
import trio
from tests.support.process_memory import resident
from trioserve import Config, Server
from trioserve.cli.memory import limit_arenas

async def main() -> None:
    config = Config(
        ctx_size=2**17, cache_ram=0, threads=1, flash_attn="off", log_level="off",
    )
    async with Server(config) as server:
        first = await server.complete("Once upon a time", max_tokens=8, temperature=0.0)
        awake = resident()
        await server.sleep()
        asleep = resident()
        again = await server.complete("Once upon a time", max_tokens=8, temperature=0.0)
        assert again.text == first.text
        later = []
        for _ in range(4):
            await server.sleep()
            later.append(resident())
            async with server.loaded():
                pass
        print("resident:", awake, asleep, min(later), file=sys.stderr)

limit_arenas()
trio.run(main)
"""


@pytest.mark.system
@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is in /proc")
def test_the_memory_of_a_model_is_free_while_it_sleeps() -> None:
    done = subprocess.run([sys.executable, "-c", _SLEEPER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    last = done.stderr.splitlines()[-1]
    awake, asleep, later = map(int, last.removeprefix("resident:").split())
    assert awake - asleep > 150e6
    assert later - asleep < 20e6
