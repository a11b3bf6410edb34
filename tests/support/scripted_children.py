"""Fake processes of models: a test says what they do, and time is that of the test."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

import attrs
import msgspec
import trio
import trio.testing

from trioserve.children.frames import framed
from trioserve.children.reports import ESTIMATE, Estimated, Failed, Ready, Report
from trioserve.errors import ModelLoadError
from trioserve.models.catalog import CatalogChanges, ModelEntry, Source


def entry(name: str, **fields: object) -> ModelEntry:
    return ModelEntry(
        name=name,
        source=Source.DIRECTORY,
        args=("--model", f"/models/{name}.gguf"),
        path=Path(f"/models/{name}.gguf"),
        **fields,  # type: ignore[arg-type]
    )


class ScriptedCatalog:
    """A catalog that a test may change; `reload` tells what it has changed."""

    def __init__(self, *entries: ModelEntry) -> None:
        self.entries: dict[str, ModelEntry] = {one.name: one for one in entries}
        self.next: dict[str, ModelEntry] | None = None
        self.environment = dict(os.environ)

    def reload(self) -> CatalogChanges:
        before, self.entries = self.entries, self.next or self.entries
        both = before.keys() & self.entries.keys()
        return CatalogChanges(
            added=frozenset(self.entries.keys() - before.keys()),
            changed=frozenset(name for name in both if before[name] != self.entries[name]),
            removed=frozenset(before.keys() - self.entries.keys()),
        )


class ScriptedProcess:
    """A process that says and does what the test wants."""

    _pids = count(1000)

    def __init__(self, argv: Sequence[str], *, obeys: bool = True) -> None:
        self.argv = argv
        self.pid = next(self._pids)
        self.socket, self.end_of_frames = socket.socketpair()
        self.log = trio.testing.MemoryReceiveStream()
        self.signals: list[signal.Signals] = []
        self.closed = False
        self._obeys = obeys
        self._code: int | None = None
        self._ended = trio.Event()

    @property
    def model(self) -> str:
        """The name of its model."""
        return Path(self.argv[self.argv.index("--model") + 1]).stem

    @property
    def running(self) -> bool:
        return self._code is None

    # -- what the test has it do

    def say(self, report: Report) -> None:
        self.send(framed(msgspec.msgpack.encode(report)))

    def send(self, data: bytes) -> None:
        self.end_of_frames.sendall(data)

    def write(self, text: str) -> None:
        self.log.put_data(text.encode())

    def end(self, code: int) -> None:
        if self._code is None:
            self.die(code)
            self.fall_silent()

    def die(self, code: int) -> None:
        """End, while others that it has started keep its log open."""
        self._code = code
        self._ended.set()

    def fall_silent(self) -> None:
        self.end_of_frames.close()
        self.log.put_eof()

    # -- what the router does with it, as with a `Child`

    async def read_log(self) -> bytes:
        return bytes(await self.log.receive_some())

    async def ended(self) -> int:
        await self._ended.wait()
        assert self._code is not None
        return self._code

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._code is not None:
            return
        self.signals.append(number)
        if number == signal.SIGKILL or self._obeys:
            self.end(-9 if number == signal.SIGKILL else 0)

    async def aend(self) -> int:
        self.kill()
        with trio.CancelScope(shield=True):
            code = await self.ended()
        self.closed = True
        self.socket.close()
        return code


@attrs.define(eq=False)
class ScriptedLauncher:
    """Starts scripted processes.

    Attributes:
        ready: whether processes are ready at once.
        obeys: whether they end on request.
        refuses: the reason why no process can start, if any.
        needs: the bytes that each model needs, by name, for processes that estimate.
        started: all processes so far, except those that estimate.
        n_estimates: how many have estimated.
    """

    ready: bool = True
    obeys: bool = True
    refuses: str | None = None
    needs: Mapping[str, int] = attrs.field(factory=dict)
    started: list[ScriptedProcess] = attrs.field(factory=list)
    n_estimates: int = 0

    async def launch(self, argv: Sequence[str]) -> ScriptedProcess:
        await trio.lowlevel.checkpoint()
        if self.refuses is not None:
            raise ModelLoadError(self.refuses)
        process = ScriptedProcess(argv, obeys=self.obeys)
        if argv[0] == ESTIMATE:
            self.n_estimates += 1
            if process.model in self.needs:
                process.say(Estimated(self.needs[process.model]))
            else:
                process.say(Failed("The file is not a model."))
            process.end(0)
            return process
        self.started.append(process)
        if self.ready:
            process.say(Ready())
        return process

    @property
    def running(self) -> list[str]:
        """The models of the processes that run, in the order of their start."""
        return [one.model for one in self.started if one.running]

    def last(self, model: str) -> ScriptedProcess:
        """The process of a model that was started last."""
        return next(one for one in reversed(self.started) if one.model == model)
