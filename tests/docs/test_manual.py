"""The manual pages: groff takes them, and they have all commands and flags."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.docs_pages import ROOT
from trioserve.cli.commands import COMMANDS
from trioserve.config.flags import FLAGS

PAGES = sorted((ROOT / "docs" / "man").glob("*.1"))


def test_they_have_all_commands_and_flags() -> None:
    assert {page.stem for page in PAGES} == {
        "trioserve", *(f"trioserve-{name}" for name in COMMANDS if name != "serve"),
    }  # fmt: skip
    text = (ROOT / "docs" / "man" / "trioserve.1").read_text().replace("\\-", "-")
    for flag in FLAGS:
        assert flag.names[-1] in text
    keys = (ROOT / "docs" / "man" / "trioserve-keys.1").read_text().replace("\\-", "-")
    assert ".B trioserve keys add\n" in keys and "--tokens-per-day N" in keys


@pytest.mark.system
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_groff_has_nothing_to_say(page: Path) -> None:
    if (groff := shutil.which("groff")) is None:
        pytest.skip("groff is not installed")
    done = subprocess.run(
        [groff, "-man", "-Tutf8", "-ww", str(page)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
