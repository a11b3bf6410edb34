"""Calls that are cancelled stop, and leave nothing."""

from __future__ import annotations

import io
import os
import random
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.file_tools import tool_in
from trioserve.config import Config
from trioserve.tools.builtin.file_tools import FileCall, FileThreads, FileTool, ReadFile
from trioserve.tools.builtin.search import GrepFiles, _Search
from trioserve.tools.files.store import (
    DirectoryEntry,
    DirectoryListing,
    FileStatus,
    FileStore,
    Kinds,
)
from trioserve.tools.registry import open_registry
from trioserve.tools.tool import ToolCallContext


class EndlessFile(io.RawIOBase):
    """A file that never ends, and calls `on_read` for each piece."""

    def __init__(self, on_read: Callable[[], None]) -> None:
        super().__init__()
        self._on_read = on_read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._on_read()
        buffer[:] = b"line\n" * (len(buffer) // 5) + b"x" * (len(buffer) % 5)
        return len(buffer)


class EndlessStore(FileStore):
    """Directories and files that never end; it cancels a scope after some steps."""

    def __init__(self, scope: trio.CancelScope, kind: str) -> None:
        self._scope = scope
        self._kind = kind
        self.n_steps = 0

    def _step(self) -> None:
        self.n_steps += 1
        if self.n_steps == 20:
            trio.from_thread.run_sync(self._scope.cancel)

    def resolve(self, path: str) -> str:
        return "/" + path

    def status(self, path: str) -> FileStatus | None:
        return FileStatus("dir", 0) if path == "dir" else FileStatus("file", 2**40)

    def open(self, path: str) -> io.BufferedReader:
        if path == "file":
            return io.BufferedReader(EndlessFile(self._step))
        self._step()
        return io.BufferedReader(io.BytesIO(b"text\n"))

    def write(self, path: str, data: bytes) -> None:
        raise NotImplementedError

    def list(self, path: str, kinds: Kinds, max_depth: int) -> DirectoryListing:
        return DirectoryListing(DirectoryEntry(str(number), is_dir=False) for number in count())


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        (GrepFiles, {"path": "dir", "pattern": "none"}),
        (ReadFile, {"path": "file", "start_line": 10**18}),
    ],
)
async def test_an_endless_search_ends_when_it_is_cancelled(
    tool: type[FileCall], arguments: dict[str, Any]
) -> None:
    with trio.CancelScope() as scope:
        store = EndlessStore(scope, arguments["path"])

        def stores(_: ToolCallContext) -> FileStore:
            return store

        await FileTool(tool, stores, FileThreads()).call(arguments, ToolCallContext())
    assert scope.cancelled_caught
    assert store.n_steps < 40


@pytest.mark.parametrize("pattern", ["[ab]{0,900}" * 5 + "c", "x"], ids=["costly", "cheap"])
async def test_a_search_in_a_large_file_ends_when_it_is_cancelled(
    tmp_path: Path, pattern: str
) -> None:
    (tmp_path / "a").write_bytes((b"ab" * 1000 + b"\n") * 10_000)
    asked = []

    def may_go_on(search: _Search) -> bool:
        asked.append(True)
        trio.from_thread.run_sync(scope.cancel)
        return go_on(search)

    go_on = _Search.may_go_on
    with pytest.MonkeyPatch.context() as patching, trio.CancelScope() as scope:
        patching.setattr(_Search, "may_go_on", may_go_on)
        await tool_in(tmp_path, GrepFiles).call(
            {"path": "a", "pattern": pattern}, ToolCallContext()
        )
    assert scope.cancelled_caught
    assert len(asked) == 1


async def test_many_calls_and_cancels_leave_nothing(tmp_path: Path) -> None:
    rng = random.Random(1)
    for number in range(30):
        (tmp_path / f"d{number % 5}").mkdir(exist_ok=True)
        (tmp_path / f"d{number % 5}" / f"f{number}").write_text("text\n" * 100)
    calls: list[tuple[str, dict[str, Any]]] = [
        ("read_file", {"path": "d0/f0"}),
        ("read_file", {"path": "none"}),
        ("file_glob_search", {"path": ".", "type": "all"}),
        ("grep_search", {"path": ".", "pattern": "tex+t$", "context_lines": 2}),
        ("write_file", {"path": "d0/new/f", "content": "new\n" * 100}),
        ("edit_file", {"path": "d1/f1", "edits": [{"old_text": "text", "new_text": "t"}]}),
    ]
    config = Config(model="m.gguf", tools=("all",), tools_dir=(str(tmp_path),))
    n_open, n_tasks = (
        len(os.listdir("/proc/self/fd")),
        trio.lowlevel.current_statistics().tasks_living,
    )
    n_cancelled = 0

    async def call_and_leave(name: str, arguments: dict[str, Any], patience: int) -> None:
        nonlocal n_cancelled
        async with trio.open_nursery() as nursery:
            nursery.start_soon(box.tools[name].call, arguments, ToolCallContext())
            for _ in range(patience):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        n_cancelled += nursery.cancel_scope.cancelled_caught

    async with open_registry(config) as box, trio.open_nursery() as nursery:
        for _ in range(500):
            name, arguments = rng.choice(calls)
            nursery.start_soon(call_and_leave, name, arguments, rng.randrange(200))
    assert n_cancelled
    assert len(os.listdir("/proc/self/fd")) <= n_open  # those of earlier tests may be closed
    assert trio.lowlevel.current_statistics().tasks_living == n_tasks
    assert threading.active_count() < 20
    assert not [*tmp_path.rglob("*.tmp")]
    assert {path.name for path in tmp_path.glob("d0/new/*")} <= {"f"}
