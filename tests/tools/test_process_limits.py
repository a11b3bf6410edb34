"""Programs that want too much: of processes, memory, disk, descriptors and output."""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trioserve.tools.process import CommandLimits, CommandOutput, clean_environment, run

pytestmark = pytest.mark.system

ENV = clean_environment()

#: A bomb that ends by itself: at most 2,000 processes; each forks two more.
BOMB = "bomb() { if [ $1 -gt 0 ]; then bomb $(($1 - 1)) & bomb $(($1 - 1)) & fi; wait; sleep 9; }"

#: The same, with a new session for each.
SESSIONS = """
export BOMB='[ $1 -gt 0 ] && for i in 1 2; do setsid sh -c "$BOMB" sh $(($1 - 1)) & done; sleep 9'
sh -c "$BOMB" sh 8
"""

HOG = "python3 -c 'x = bytearray(50_000_000_000)'"
SLOW_HOG = """exec python3 -c '
x = []
for i in range(1000): x.append(bytearray(b"x") * 4_000_000)'"""


async def run_sh(command: str, **limits: Any) -> CommandOutput:
    return await run(
        ["sh", "-c", command], timeout=20, max_output=1000, env=ENV, limits=CommandLimits(**limits)
    )


@pytest.mark.parametrize("bomb", [f"{BOMB}; bomb 10", SESSIONS], ids=["group", "sessions"])
async def test_a_fork_bomb_is_ended(bomb: str) -> None:
    before = time.perf_counter()
    output = await run_sh(bomb)
    assert output.limit_reached == "processes"
    assert time.perf_counter() - before < 20  # here it is half a second


async def test_threads_count() -> None:
    many = (
        "import threading, time\n"
        "for _ in range(200):\n"
        "    threading.Thread(target=time.sleep, args=(20,), daemon=True).start()\n"
        "time.sleep(20)"
    )
    output = await run_sh(f"exec python3 -c '{many}'", processes=8)
    assert output.limit_reached == "processes"


async def test_a_program_that_wants_all_memory_at_once_gets_none() -> None:
    output = await run_sh(HOG)
    assert "MemoryError" in output.text


async def test_a_program_that_grows_is_ended() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    output = await run_sh(SLOW_HOG, memory=300_000_000)
    assert output.limit_reached == "memory"
    grown = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert grown <= max(before, 1_000_000)  # KiB; it wanted 4 GB


QUEUES = {
    "pipes": "one = os.pipe()[1]; fcntl.fcntl(one, 1031, 2**20); os.set_blocking(one, False)",
    "sockets": "one, other = socket.socketpair(); one.setsockopt(1, 7, 2**20); one.setblocking(0)",
    "received": "one, other = socket.socketpair(); one.setsockopt(1, 7, 2**20); one.setblocking(0)",
}
FILL = """exec python3 -c '
import fcntl, os, socket, time
kept = []
for _ in range(400):
    {make}
    try:
        while True: os.write(one if isinstance(one, int) else one.fileno(), bytes(65536))
    except BlockingIOError: pass
    kept.append({keep})
time.sleep(20)'"""


@pytest.mark.parametrize("kind", QUEUES)
async def test_data_in_pipes_and_sockets_counts(kind: str) -> None:
    fill = FILL.format(make=QUEUES[kind], keep="other" if kind == "received" else "dict(locals())")
    output = await run_sh(fill, memory=40_000_000)
    assert output.limit_reached == "memory", output


async def test_pages_that_forks_share_are_counted_once() -> None:
    forks = """exec python3 -c '
import os, time
x = bytearray(b"x") * 60_000_000
for i in range(8):
    if not os.fork(): time.sleep(0.3); os._exit(0)
for i in range(8): os.wait()
print("done")'"""
    assert (await run_sh(forks, memory=200_000_000)).text == "done\n"


async def test_descriptors_files_and_core_files_are_limited(tmp_path: Path) -> None:
    output = await run_sh("ulimit -n; ulimit -c; ulimit -f", descriptors=77, file_size=51200)
    assert output.text.split() == ["77", "0", "100"]
    output = await run_sh(f"yes >{tmp_path}/large; echo $?", file_size=51200)
    assert output.text.split()[-1] == f"{128 + signal.SIGXFSZ}"
    assert (tmp_path / "large").stat().st_size == 51200


async def test_the_kernel_takes_a_command_before_the_server() -> None:
    assert (await run_sh("cat /proc/self/oom_score_adj")).text == "1000\n"


async def test_a_gigabyte_of_output_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    output = await run_sh("head -c 1000000000 /dev/zero; echo the end")
    assert output.limit_reached == "output"
    assert len(output.data) == 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB


@pytest.fixture
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk of 1 MB for temporary files."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=20", "none", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False).returncode:
        pytest.skip("only root may mount a disk")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


async def test_a_full_disk_is_told_and_is_empty_afterwards(full_disk: Path) -> None:
    output = await run_sh("head -c 5000000 /dev/zero >$TMPDIR/large || ls -l $TMPDIR/large")
    assert "No space left" in output.text
    assert list(full_disk.iterdir()) == []
    output = await run_sh("i=0; while [ $i -lt 50 ]; do echo >$TMPDIR/$i || exit; i=$((i+1)); done")
    assert output.exit_code == 2
    assert list(full_disk.iterdir()) == []


async def test_no_room_for_the_folder_is_an_error(full_disk: Path) -> None:
    for number in range(30):
        try:
            (full_disk / str(number)).touch()
        except OSError:
            break
    with pytest.raises(Exception, match="No space left on device"):
        await run_sh("true")
