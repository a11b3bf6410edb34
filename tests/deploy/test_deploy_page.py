"""docs/deploy.md has each thing that can be set."""

from __future__ import annotations

import re

import pytest

from tests.support.deployment import CHART, DEPLOY, ROOT, load, paths_of

PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
ROWS = {
    name
    for row in re.findall(r"^\| (`.+?) \|", PAGE, re.MULTILINE)
    for name in re.findall(r"`([^`]+)`", row)
}
ARGUMENTS = re.findall(
    r"^ARG (\w+)=", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE
)
VARIABLES = re.findall(r"\$\{(\w+)", (DEPLOY / "compose.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", paths_of(load(CHART / "values.yaml")))
def test_it_has_the_value_of_the_chart(name: str) -> None:
    assert name in ROWS


@pytest.mark.parametrize("name", sorted({*ARGUMENTS, *VARIABLES}))
def test_it_has_the_argument_or_the_variable(name: str) -> None:
    assert name in ROWS
