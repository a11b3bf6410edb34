"""The files of examples/service: the units of systemd as systemd reads them, and launchd's list."""

from __future__ import annotations

import plistlib
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.deployment import ROOT

SERVICE = ROOT / "examples" / "service"
UNIT = SERVICE / "trioserve.service"

#: The exposure of the unit, from 0 to 100; docs/service.md names it.
EXPOSURE = 15


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run systemd-analyze, or skip the test."""
    if (program := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed")
    command = [program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.system
def test_the_unit_has_few_rights() -> None:
    done = analyze("security", "--offline=true", f"--threshold={EXPOSURE}", UNIT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{EXPOSURE / 10} OK" in done.stdout
    too_low = analyze("security", "--offline=true", f"--threshold={EXPOSURE - 1}", UNIT)
    assert too_low.returncode != 0
    docs = (ROOT / "docs" / "service.md").read_text(encoding="utf-8")
    assert f"`systemd-analyze security` gives {EXPOSURE / 10} (OK)" in docs


@pytest.mark.system
def test_systemd_knows_every_line_of_the_units(tmp_path: Path) -> None:
    text = UNIT.read_text(encoding="utf-8")
    command = "/opt/trioserve/bin/trioserve"
    assert command in text
    (tmp_path / UNIT.name).write_text(text.replace(command, "/bin/true"))
    shutil.copy(SERVICE / "trioserve.socket", tmp_path)
    done = analyze("verify", "--man=no", tmp_path / UNIT.name, tmp_path / "trioserve.socket")
    assert done.returncode == 0
    assert [line for line in done.stderr.splitlines() if "trioserve" in line] == []


def test_launchd_starts_the_command_again_after_a_failure() -> None:
    service = plistlib.loads((SERVICE / "org.trioserve.plist").read_bytes())
    assert service["ProgramArguments"][0].endswith("/trioserve")
    assert service["KeepAlive"] == {"SuccessfulExit": False} and service["RunAtLoad"]
