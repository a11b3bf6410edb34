"""`trioserve run` in a pseudo-terminal, with a server in a separate process."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import pytest
import trio
from PIL import Image

from tests.support.command import Running, serving
from tests.support.waiting import until
from trioserve.models import BUNDLED, BUNDLED_PROJECTOR

pytestmark = pytest.mark.system

#: Seconds for a whole test: a process starts, and another may.
LIMIT = 300


@attrs.define
class Dialog:
    """A program in a pseudo-terminal: what is typed, and what has appeared."""

    process: trio.Process
    terminal: int
    shown: str = ""

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    async def sees(self, text: str) -> str:
        """Wait until a text appears after what was seen before; returns all up to its end."""
        while text not in self.shown:
            await trio.lowlevel.wait_readable(self.terminal)
            self.shown += os.read(self.terminal, 2**16).decode(errors="replace")
        before, _, self.shown = self.shown.partition(text)
        return before + text


@asynccontextmanager
async def running(*argv: str) -> AsyncIterator[Dialog]:
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "trioserve", "run", *argv]
    with trio.fail_after(LIMIT):
        process = await trio.lowlevel.open_process(
            command, stdin=inside, stdout=inside, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # becomes its terminal
        )  # fmt: skip
        os.close(inside)
        try:
            yield Dialog(process, terminal)
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
            os.close(terminal)


async def all_free(server: Running) -> bool:
    async with server.client() as client:
        return not any(slot["is_processing"] for slot in (await client.get("/slots")).json())


async def test_a_chat_with_the_server_that_runs(tmp_path: Path) -> None:
    Image.new("RGB", (64, 64), "red").save(tmp_path / "a picture.png")
    endless = ("--ignore-eos", "--context-shift", "-n", "1000000")  # until Ctrl-C
    with_bundled = ("-m", str(BUNDLED), "--mmproj", str(BUNDLED_PROJECTOR))
    async with (
        serving(*with_bundled, *endless, timeout=LIMIT) as server,
        running("bundled.gguf", "--url", server.url) as dialog,
    ):
        await dialog.sees("/help lists commands.")
        await dialog.sees(">>> ")
        dialog.type("/set temperature 0\n")
        await dialog.sees("temperature is 0.0.")
        dialog.type('"""Repeat after me:\n')
        await dialog.sees("... ")
        dialog.type('the blue house"""\n')
        await dialog.sees('house"""\r\n')
        await dialog.sees("blue house")  # the answer streams
        dialog.type("\x03")
        assert "leaves" not in await dialog.sees("\r\n>>> ")  # it is not said during an answer
        assert (await server.line("request"))["cancelled"] == "disconnect"
        await until(lambda: all_free(server))
        dialog.type("/clear\n")
        await dialog.sees("forgotten.")
        dialog.type(f"What color is it? '{tmp_path}/a picture.png'\n")
        await dialog.sees("The color is red.")
        dialog.type("\x03")
        await dialog.sees("\r\n>>> ")
        dialog.type("/bye\n")
        assert await dialog.process.wait() == 0


async def test_a_server_is_started_and_ends_with_the_chat() -> None:
    async with running("bundled", "--port", "1", "--temp", "0") as dialog:  # where no server runs
        await dialog.sees("a toy, to try the server with. Try: ")
        await dialog.sees(">>> ")
        dialog.type("What is the capital of Japan?\n")
        await dialog.sees("The capital of Japan is Tokyo.")
        await dialog.sees(">>> ")
        dialog.type("\x04")
        assert await dialog.process.wait() == 0
