"""Programs in the place of docker, podman and ssh, which note their arguments and run commands."""

from __future__ import annotations

import os
from pathlib import Path

import attrs
import pytest

DOCKER = """#!/bin/sh
printf '%s\\n' "$(basename "$0") $*" >>"$FAKE/calls"
case $1 in
run)
    for one; do case $one in
        trioserve-tools-*) name=$one;;
        missing) echo "no such image" >&2; exit 125;;
    esac; done
    echo $$ >"$FAKE/$name"
    sh
    rm -f "$FAKE/$name";;
exec)
    [ -e "$FAKE/$3" ] || { echo "Error: No such container: $3" >&2; exit 1; }
    shift 3
    cd "$FAKE" && exec "$@";;
rm) rm -f "$FAKE/$3";;
esac
"""

SSH = """#!/bin/sh
printf '%s\\n' "ssh $*" >>"$FAKE/calls"
for last; do :; done
cd "$FAKE" && exec sh -c "$last"
"""


@attrs.frozen
class Fake:
    """The folder where the programs note their calls."""

    folder: Path

    @property
    def calls(self) -> list[str]:
        """The calls, in lines; scripts have more than one."""
        return (self.folder / "calls").read_text().splitlines()

    @property
    def containers(self) -> list[str]:
        return sorted(one.name for one in self.folder.glob("trioserve-tools-*"))


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    programs, folder = tmp_path / "programs", tmp_path / "fake"
    programs.mkdir()
    folder.mkdir()
    for name, text in (("docker", DOCKER), ("podman", DOCKER), ("ssh", SSH)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (folder / "box").touch()  # a container that runs
    monkeypatch.setenv("FAKE", str(folder))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return Fake(folder)
