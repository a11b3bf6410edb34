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
    prefix, python = USERS[user], sys.executable
    if prefix and (os.geteuid() or shutil.which("setpriv") is None):
        pytest.skip("only root with setpriv can become another user")
    if user.startswith("ordinary"):
        python = _python_of(prefix)
    supervisor = (*prefix, python, *process._SUPERVISOR[1:])
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        with monkeypatch.context() as patch:
            patch.setattr(process, "_SUPERVISOR", supervisor)
            patch.setattr(tempfile, "tempdir", folder)
            yield Path(folder)


def _python_of(prefix: tuple[str, ...]) -> str:
    """A Python that this user may run, with the supervisor that it may read."""
    for python in (sys.executable, "/usr/bin/python3"):
        code = f"import os; os.listdir({str(Path(process.__file__).parent)!r})"
        if not subprocess.run([*prefix, python, "-c", code], capture_output=True).returncode:
            return python
    pytest.skip("this user has no Python")
