"""The files of examples/deploy, and what the tools make of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
CHART = DEPLOY / "helm" / "trioserve"

yaml = pytest.importorskip("yaml", reason="PyYAML is missing: make test-deploy installs it")


def load_all(path: Path) -> list[dict[str, Any]]:
    """Read all documents of a YAML file."""
    return [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one]


def load(path: Path) -> dict[str, Any]:
    """Read a YAML file of one document."""
    (only,) = load_all(path)
    return only


def helm() -> str:
    """Return the path of helm, or skip the test."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if (found := shutil.which("helm", path=folders)) is None:
        pytest.skip("helm is missing: make test-deploy installs it")
    return found


def render(*settings: str, release: str = "trioserve") -> dict[str, dict[str, Any]]:
    """Render the chart with values such as ``image.tag=x``: its objects by their kinds.

    Raises:
        ValueError: helm refuses the values; the message is helm's.
    """
    flags = [part for one in settings for part in ("--set-json", one)]
    command = [helm(), "template", release, str(CHART), "--namespace", "llm", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise ValueError(done.stderr)
    return {one["kind"]: one for one in yaml.safe_load_all(done.stdout) if one}


def paths_of(values: dict[str, Any], prefix: str = "") -> list[str]:
    """List the names of values, as in ``image.tag``. What is Kubernetes' own counts as one."""
    found = []
    for name, value in values.items():
        ours = name != "resources" and not name.endswith(("Context", "Probe"))
        if isinstance(value, dict) and value and ours:
            found += paths_of(value, f"{prefix}{name}.")
        else:
            found.append(prefix + name)
    return sorted(found)
