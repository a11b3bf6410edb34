"""Commands under the users that a server may run as."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trioserve.children import inside
from trioserve.tools import process

#: Each is what starts a supervisor as such a user. The first is the user of the tests.
USERS: dict[str, tuple[str, ...]] = {
    "same": (),
    "root without CAP_SYS_ADMIN": ("setpriv", "--bounding-set=-sys_admin"),
    "ordinary": ("setpriv", "--reuid=31234", "--regid=31234", "--clear-groups"),
    # A part of /proc is masked there, and then the kernel lets an ordinary user mount no other.
    "ordinary in a container": (
        "unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc/fs && exec "$@"', "sh",
        "setpriv", "--reuid=31234", "--regid=31234", "--clear-groups",
    ),
}  # fmt: skip


@contextmanager
def as_user(user: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run all commands of a block as a user. Gives a folder that is its own."""
    prefix, (python, *code, place) = USERS[user], process._SUPERVISOR
    if prefix and (os.geteuid() or shutil.which("setpriv") is None):
        pytest.skip("only root with setpriv can become another user")
    with tempfile.TemporaryDirectory() as readable, tempfile.TemporaryDirectory() as folder:
        if user.startswith("ordinary"):
            place = shutil.copytree(place, readable, dirs_exist_ok=True)  # root alone may read it
            shutil.copy(inside.__file__, place)
            os.chmod(readable, 0o755)
            python = _python_of(prefix, place)
        os.chmod(folder, 0o777)
        with monkeypatch.context() as patch:
            patch.setattr(process, "_SUPERVISOR", (*prefix, python, *code, place))
            patch.setattr(tempfile, "tempdir", folder)
            yield Path(folder)


def _python_of(prefix: tuple[str, ...], place: str) -> str:
    """A Python that this user may run, and that runs the supervisor."""
    for python in (sys.executable, "/usr/bin/python3"):
        code = "import sys; sys.path.append(sys.argv[1]); import supervisor, inside"
        command = [*prefix, python, "-I", "-S", "-c", code, place]
        if not subprocess.run(command, capture_output=True).returncode:
            return python
    pytest.skip("this user has no Python")


def without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let supervisors begin to remove a folder that is not empty, and be too slow."""
    *python, code, inside_at, place = process._SUPERVISOR
    patch = "supervisor._PATIENCE = 0.0; supervisor.REMOVE = 'sleep 1000; true'"
    code = code.replace("supervisor.main()", f"{patch}; supervisor.main()")
    monkeypatch.setattr(process, "_SUPERVISOR", (*python, code, inside_at, place))
