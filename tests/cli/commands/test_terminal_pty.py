"""`trioserve run` in a pseudo-terminal, with a server in a separate process."""

from __future__ import annotations

import os
import pty
import re
import signal
import stat
import subprocess
import sys
import termios
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

#: Escape sequences, such as those that move the cursor.
_SEQUENCE = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|[=>])")

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
            self.shown = _SEQUENCE.sub("", self.shown)
        before, _, self.shown = self.shown.partition(text)
        return before + text


@asynccontextmanager
async def running(*argv: str, **environ: str) -> AsyncIterator[Dialog]:
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "trioserve", "run", *argv]
    environ = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"} | dict(environ)
    with trio.fail_after(LIMIT):
        process = await trio.lowlevel.open_process(
            command, stdin=inside, stdout=inside, stderr=subprocess.STDOUT, env=environ,
            start_new_session=True,
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


async def answers(server: Running) -> bool:
    return not await all_free(server)


async def test_a_chat_with_the_server_that_runs(tmp_path: Path) -> None:
    Image.new("RGB", (64, 64), "red").save(tmp_path / "a picture.png")
    endless = ("--ignore-eos", "--context-shift", "-n", "1000000")  # until Ctrl-C
    with_bundled = ("-m", str(BUNDLED), "--mmproj", str(BUNDLED_PROJECTOR))
    async with (
        serving(*with_bundled, *endless, timeout=LIMIT) as server,
        running("bundled.gguf", "--url", server.url) as dialog,
    ):
        await dialog.sees("/help lists commands.")
        await dialog.sees(">>>")
        dialog.type("/set temperature 0\r")
        await dialog.sees("temperature is 0.0.")
        dialog.type('"""Repeat after me:\r')
        await dialog.sees("...")
        dialog.type('the blue huose"""')
        dialog.type("\x1b[D" * 5 + "\x7f\x7fou")  # it can be edited
        dialog.type("\r")
        await dialog.sees("the blue house")
        await until(lambda: answers(server))
        await dialog.sees("blue house")  # the answer streams
        dialog.type("\x03")
        assert "leaves" not in await dialog.sees(">>>")  # it is not said during an answer
        while (await server.line("request")).get("cancelled") != "disconnect":
            """It is that of another request."""
        await until(lambda: all_free(server))
        dialog.type("/cl\t")
        await dialog.sees("ear")
        dialog.type("\r")
        await dialog.sees("forgotten.")
        dialog.type(f"What color is it? '{tmp_path}/a picture.png'\r")
        await dialog.sees(f"Added image {tmp_path}/a picture.png")
        await dialog.sees("The color is red.")
        dialog.type("\x03")
        await dialog.sees(">>>")
        dialog.type("/bye\r")
        assert await dialog.process.wait() == 0


async def test_a_server_is_started_and_ends_with_the_chat(tmp_path: Path) -> None:
    words = ("bundled", "--port", "1", "--temp", "0")  # where no server runs
    async with running(*words, XDG_STATE_HOME=str(tmp_path)) as dialog:
        await dialog.sees("a toy, to try the server with. Try: ")
        await dialog.sees(">>>")
        dialog.type("What is the capital of Japan?\r")
        await dialog.sees("The capital of Japan is Tokyo.")
        await dialog.sees(" tokens/s, first after ")
        await dialog.sees(">>>")
        dialog.type("\x1b[A")
        await dialog.sees("What is the capital of Japan?")  # from the history
        dialog.type("\x03\x04")
        assert await dialog.process.wait() == 0
    history = tmp_path / "trioserve" / "history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "+What is the capital of Japan?" in history.read_text()


async def test_a_signal_at_the_prompt_leaves_the_terminal_as_it_was() -> None:
    async with running("bundled", "--port", "1") as dialog:
        before = termios.tcgetattr(dialog.terminal)
        await dialog.sees(">>>")
        await until(lambda: termios.tcgetattr(dialog.terminal) != before)
        dialog.process.send_signal(signal.SIGTERM)
        assert await dialog.process.wait() == 128 + signal.SIGTERM
        assert termios.tcgetattr(dialog.terminal) == before
