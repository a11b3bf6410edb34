"""Coding agents, started by `trioserve launch`: each reads a file, edits it, and runs a command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import pytest

from tests.programs.running import Served, calls_in, environment_of, launching, run, served
from tests.programs.table import Works
from trioserve.testing.scripts import Call, ToolScript

pytestmark = pytest.mark.system

TASK = "Read notes.txt, replace world by trioserve, and count the bytes into size.txt."
COUNT = "wc -c < notes.txt > size.txt"


@attrs.frozen
class Task:
    """What an agent is started with, and the calls of its tools that do the task."""

    arguments: Sequence[str]
    steps: Callable[[Path], Sequence[Call]]
    environ: dict[str, str] = attrs.field(factory=dict)


PATCH = """apply_patch <<'EOF'
*** Begin Patch
*** Update File: notes.txt
@@
-hello world
+hello trioserve
*** End Patch
EOF"""


def codex(_folder: Path) -> Sequence[Call]:
    return [("exec_command", {"cmd": cmd}) for cmd in ("cat notes.txt", PATCH, COUNT)]


def claude(folder: Path) -> Sequence[Call]:
    path = str(folder / "notes.txt")
    return [
        ("Read", {"file_path": path}),
        ("Edit", {"file_path": path, "old_string": "world", "new_string": "trioserve"}),
        ("Bash", {"command": COUNT, "description": "Count the bytes"}),
    ]


def opencode(folder: Path) -> Sequence[Call]:
    path = str(folder / "notes.txt")
    return [
        ("read", {"filePath": path}),
        ("edit", {"filePath": path, "oldString": "world", "newString": "trioserve"}),
        ("bash", {"command": COUNT, "description": "Count the bytes"}),
    ]


def qwen(folder: Path) -> Sequence[Call]:
    path = str(folder / "notes.txt")
    return [
        ("read_file", {"file_path": path}),
        ("edit", {"file_path": path, "old_string": "world", "new_string": "trioserve"}),
        ("run_shell_command", {"command": COUNT, "is_background": False}),
    ]


def pi(_folder: Path) -> Sequence[Call]:
    edits = [{"oldText": "world", "newText": "trioserve"}]
    return [
        ("read", {"path": "notes.txt"}),
        ("edit", {"path": "notes.txt", "edits": edits}),
        ("bash", {"command": COUNT}),
    ]


def gptme(_folder: Path) -> Sequence[Call]:
    patch = "<<<<<<< ORIGINAL\nhello world\n=======\nhello trioserve\n>>>>>>> UPDATED"
    return [
        ("read", {"path": "notes.txt"}),
        ("patch", {"path": "notes.txt", "patch": patch}),
        ("shell", {"command": COUNT}),
    ]


TASKS = {
    "codex": Task(
        ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK], codex
    ),
    "claude": Task(["-p", "--dangerously-skip-permissions", TASK], claude, {"IS_SANDBOX": "1"}),
    "opencode": Task(["run", TASK], opencode),
    "qwen": Task(["--yolo", "-p", TASK], qwen),
    "pi": Task(["-p", TASK], pi),
    "gptme": Task(["--non-interactive", TASK], gptme),
}


@attrs.frozen
class Workplace:
    """A folder with the file, and a home without anything."""

    folder: Path
    home: Path

    def assert_done(self) -> None:
        assert (self.folder / "notes.txt").read_text() == "hello trioserve\n"
        assert (self.folder / "size.txt").read_text().strip() == "16"


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    made = Workplace(tmp_path / "work", tmp_path / "home")
    made.folder.mkdir()
    made.home.mkdir()
    (made.folder / "notes.txt").write_text("hello world\n")
    return made


async def do_task(name: str, server: Served, workplace: Workplace) -> None:
    """Have an agent do its task."""
    task = TASKS[name]
    ended = await run(
        launching(name, server.url, *task.arguments),
        folder=workplace.folder,
        environ=environment_of(name, home=workplace.home, **task.environ),
    )
    assert ended.code == 0, ended.output
    assert server.refused == [], calls_in(server.exchanges)
    assert "All done." in ended.output
    workplace.assert_done()
    assert ended.wanted == []


@pytest.mark.parametrize("name", TASKS)
async def test_an_agent_does_its_task(name: str, workplace: Workplace, works: Works) -> None:
    script = ToolScript(steps=TASKS[name].steps(workplace.folder))
    async with served(script) as server:
        await do_task(name, server, workplace)
    works(name, "reads a file, edits it, runs a command")
