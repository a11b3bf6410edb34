"""`Child`: a process may do anything; its parent keeps working, and nothing of the process is left.

A stopped process stands for one that takes long.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from math import inf
from pathlib import Path
from time import monotonic

import pytest
import trio

from tests.support.waiting import until
from trioserve.children import inside
from trioserve.children.child import Child, ChildError, bare_environment, how
from trioserve.children.frames import framed

pytestmark = pytest.mark.system

#: It can import its own side without trioserve, and is ready when it has said so.
BEGIN = f"""
import os, signal, sys, time
sys.path.append({str(Path(inside.__file__).parent)!r})
import inside
assert "trioserve" not in sys.modules
parent = inside.Parent()
parent.send(b"ready")
"""

ECHO = """
while (payload := parent.receive()) is not None:
    parent.send(payload)
"""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def started(stack: ExitStack, program: str, **options: object) -> Child:
    """A process that runs a program, and is ready."""
    command = [sys.executable, "-I", "-S", "-c", BEGIN + program]
    child = stack.enter_context(Child.spawn(command, **options))  # type: ignore[arg-type]
    assert child.receive() == b"ready"
    return child


def is_running(pid: int) -> bool:
    """True while a process runs. A process without a parent may stay as a zombie."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(state.stdout.strip()) and not state.stdout.startswith("Z")


def n_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def test_frames_go_both_ways(stack: ExitStack) -> None:
    child = started(stack, ECHO)
    for payload in (b"", b"one", bytes(10 * 2**20)):
        child.send(payload)
        assert child.receive() == payload
    assert child.is_alive and child.code is None
    assert child.end() == 0
    assert child.end() == child.code == 0 and not child.is_alive


def test_nothing_is_left_of_it(stack: ExitStack) -> None:
    before = n_descriptors()
    started(stack, ECHO).end()
    with pytest.raises(FileNotFoundError):
        Child.spawn(["/none"])
    assert n_descriptors() == before


def test_how_it_ends_is_known(stack: ExitStack) -> None:
    child = started(stack, "os._exit(3)")
    with pytest.raises(ChildError, match="the process has ended"):
        child.receive()
    trio.run(until, lambda: not child.is_alive)
    with pytest.raises(ChildError):
        child.send(b"anything")
    assert how(child.end()) == "ended with exit code 3"
    aborted = started(stack, "os.kill(os.getpid(), signal.SIGABRT)")
    assert how(aborted.end()) == "was ended by SIGABRT"
    assert how(-1000) == "was ended by signal 1000"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"http://localhost", "a frame of 1,886,680,168 bytes is too long"),
        (framed(bytes(101)), "a frame of 101 bytes is too long"),
        (framed(b"cut short")[:-1], "the process has ended within a frame"),
        (framed(b"")[:1], "the process has ended within a frame"),
    ],
)
def test_what_is_no_frame(stack: ExitStack, data: bytes, reason: str) -> None:
    child = started(stack, f"parent.receive(); os.write(0, {data!r})", max_frame=100)
    child.send(b"begin")
    with pytest.raises(ChildError, match=f"^{reason}$"):
        child.receive()


def test_frames_before_it_ended_are_received(stack: ExitStack) -> None:
    child = started(stack, "[parent.send(b'%d' % i) for i in range(3)]; os._exit(1)")
    trio.run(until, lambda: not child.is_alive)
    assert [child.receive() for _ in range(3)] == [b"0", b"1", b"2"]
    with pytest.raises(ChildError):
        child.receive()


def test_a_stopped_process_is_not_waited_for(stack: ExitStack) -> None:
    child = started(stack, ECHO)
    os.kill(child.pid, signal.SIGSTOP)
    child.send(b"echo")
    for deadline in (monotonic() + 0.01, monotonic() - 1, -inf):
        with pytest.raises(TimeoutError):
            child.receive(deadline)
    os.kill(child.pid, signal.SIGCONT)
    assert child.receive() == b"echo"  # it comes yet
    os.kill(child.pid, signal.SIGSTOP)
    assert child.end(patience=0.0) == -signal.SIGKILL


def test_a_full_socket_is_not_waited_for(stack: ExitStack) -> None:
    child = started(stack, "time.sleep(1000)")
    with pytest.raises(TimeoutError):
        child.send(bytes(2**24), monotonic() + 0.01)


def test_a_deadline_holds_while_bytes_trickle(stack: ExitStack) -> None:
    child = started(stack, "while True: os.write(0, bytes([255, 255, 255, 0]) + bytes(10))")
    with pytest.raises(TimeoutError):
        child.receive(monotonic() + 0.01)


@pytest.mark.parametrize("call", ["send", "receive"])
@pytest.mark.parametrize("program", ["time.sleep(1000)", "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_a_thread_that_waits_is_freed_by_a_kill(stack: ExitStack, call: str, program: str) -> None:
    child = started(stack, program)
    killing = threading.Timer(0.01, child.kill)
    killing.start()
    with pytest.raises(ChildError):
        child.send(bytes(2**24)) if call == "send" else child.receive()
    killing.join()
    child.kill()
    assert child.end() == -signal.SIGKILL


def test_a_kill_at_any_moment(stack: ExitStack) -> None:
    for delay in range(20):
        child = started(stack, ECHO)
        killing = threading.Timer(delay / 4000, child.kill)
        killing.start()
        with pytest.raises(ChildError):
            while True:
                child.send(bytes(2**16))
                assert len(child.receive()) == 2**16
        child.end()
        killing.join()
        assert child.code == -signal.SIGKILL


def test_one_that_ignores_its_end_is_killed(stack: ExitStack) -> None:
    child = started(
        stack,
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); parent.send(b'')\n"
        "while True: time.sleep(9)",
    )
    child.receive()
    assert child.end(patience=0.01) == -signal.SIGKILL


#: Descendants: one in its group, which holds the socket, too.
FORK = """
pid = os.fork()
if not pid:
    time.sleep(1000)
parent.send(b"%d" % pid)
"""


@pytest.mark.parametrize("end", ["os._exit(0)", "time.sleep(1000)", "os.abort()"])
def test_its_descendants_end_with_it(stack: ExitStack, end: str) -> None:
    child = started(stack, FORK + end)
    pid = int(child.receive())
    assert is_running(pid)
    child.end(patience=0.01)
    trio.run(until, lambda: not is_running(pid))


def test_one_that_has_left_its_group_holds_nobody_up(stack: ExitStack) -> None:
    child = started(stack, FORK.replace("    time", "    os.setsid(); time") + "os._exit(0)")
    pid = int(child.receive())
    try:
        killing = threading.Timer(0.01, child.kill)
        killing.start()
        with pytest.raises(ChildError):
            child.receive()  # the socket has not ended
        killing.join()
        assert child.end() == 0
    finally:
        os.kill(pid, signal.SIGKILL)


def test_it_ends_with_the_one_that_has_started_it() -> None:
    program = (
        "import os, sys\n"
        "from trioserve.children.child import Child\n"
        f"child = Child.spawn([sys.executable, '-c', {BEGIN + ECHO!r}])\n"
        "child.receive()\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    trio.run(until, lambda: not is_running(int(done.stdout)))


def test_a_failure_in_the_block_kills_it() -> None:
    with pytest.raises(KeyError), ExitStack() as stack:
        child = started(stack, "time.sleep(1000)")
        raise KeyError
    assert child.code == -signal.SIGKILL


def test_what_it_prints_goes_to_its_log(stack: ExitStack) -> None:
    with tempfile.TemporaryFile() as log:
        child = started(stack, "print('out'); os.write(2, b'err\\n')", log=log)
        child.end()
        log.seek(0)
        assert sorted(log.read().split()) == [b"err", b"out"]


def test_it_knows_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/lib")
    environ = bare_environment()
    assert "hf_secret" not in environ.values()
    assert environ["LD_LIBRARY_PATH"] == "/lib"
    assert environ["PYTHONPATH"].split(os.pathsep) == [*filter(None, sys.path)]


LIMITS = """
inside.go_first()
inside.limit_memory(2**26)
inside.lower("RLIMIT_NOFILE", 3)
inside.lower("RLIMIT_NOFILE", 4)
found = inside.resource.getrlimit(inside.resource.RLIMIT_NOFILE)[1]
inside.limit_time(0.05)
inside.limit_time(0)
try:
    bytes(2**27)
except MemoryError:
    parent.send(b"%d" % found)
inside.limit_time(0.05)
while True: pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other limits")
def test_the_limits_that_it_sets_itself(stack: ExitStack) -> None:
    child = started(stack, LIMITS)
    assert child.receive() == b"3"
    with pytest.raises(ChildError):
        child.receive()
    assert how(child.end()) == "was ended by SIGPROF"
