"""A store whose server is killed keeps all that was acknowledged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: `make test-kills` sets more.
KILLS = int(os.environ.get("TEST_KILLS", "6"))


@pytest.mark.system
@pytest.mark.skipif(not hasattr(os, "fork"), reason="it kills forked processes")
def test_no_kill_loses_an_acknowledged_write(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.killed_servers", str(tmp_path), str(KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    n_kills, n_responses, n_lines = map(int, done.stdout.split())
    assert n_kills == KILLS
    assert n_responses >= KILLS and n_lines == 25 * KILLS
