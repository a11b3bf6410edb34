"""The versions that `make` installs fit what pyproject.toml asks for."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trioserve.config.extras import EXTRAS, has_extra

ROOT = Path(__file__).parents[1]

#: Extras that no target installs together with the constraints.
UNCONSTRAINED = {"ray", "whisper"}


def test_the_constraints_are_fresh() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = settings["project"]
    wanted = [*project["dependencies"]]
    for name, extra in project["optional-dependencies"].items():
        wanted += extra if name not in UNCONSTRAINED else []
    for group in settings["dependency-groups"].values():
        wanted += [one for one in group if isinstance(one, str)]

    versions: dict[str, set[str]] = defaultdict(set)
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if not line.lstrip().startswith("#"):
            pinned = Requirement(line)
            versions[canonicalize_name(pinned.name)] |= {one.version for one in pinned.specifier}

    stale = []
    for requirement in map(Requirement, wanted):
        if requirement.name == "trioserve":  # an extra that contains others
            continue
        found = versions[canonicalize_name(requirement.name)]
        if not found or not all(map(requirement.specifier.contains, found)):
            stale.append(f"{requirement} is not met by {sorted(found)}")
    assert stale == [], "run `make lock`"


def test_extras_are_those_of_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert {*settings["project"]["optional-dependencies"]} == {"all", *EXTRAS}
    assert has_extra("mcp") and has_extra("otel") and has_extra("pdf")
    monkeypatch.setitem(EXTRAS, "pdf", ("no_such_package.module", "av"))
    assert not has_extra("pdf")
