"""The Dockerfile: what a linter says of it, and that it fits the package."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.deployment import DEPLOY, ROOT
from trioserve.config.flags import BY_VARIABLE
from trioserve.llama.library import MIN_VERSION

DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
LAST_STAGE = DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :]


@pytest.mark.system
@pytest.mark.needs("TEST_DEPLOY")
def test_hadolint_finds_nothing() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    assert hadolint is not None
    # DL3008: versions of Debian's packages disappear from its mirrors, so they cannot be pinned.
    command = [hadolint, "--ignore", "DL3008", str(DEPLOY / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_llama_cpp_is_not_built_for_the_processor_of_the_builder() -> None:
    assert "-DGGML_NATIVE=OFF" in DOCKERFILE
    assert "-DGGML_CPU_ALL_VARIANTS=ON" in DOCKERFILE
    assert f"ARG LLAMA_CPP_PYTHON={MIN_VERSION}\n" in DOCKERFILE


def test_the_server_does_not_run_as_root_and_ends_with_a_signal() -> None:
    assert re.search(r"^USER 10001:10001$", LAST_STAGE, re.MULTILINE)
    assert 'ENTRYPOINT ["tini", "--", "trioserve"]' in LAST_STAGE, "no shell, which keeps signals"


def test_its_variables_are_settings_of_the_server() -> None:
    names = re.findall(r"\b(?:LLAMA_ARG|TRIOSERVE)_\w+(?==)", LAST_STAGE)
    assert names == ["LLAMA_ARG_HOST", "LLAMA_ARG_PORT"]
    assert BY_VARIABLE.keys() >= set(names)


def test_the_context_holds_what_is_copied_and_nothing_that_is_secret() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    assert ignored[1] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == names | {"trioserve/ui/dist"}
    assert all((ROOT / name).exists() for name in names)
