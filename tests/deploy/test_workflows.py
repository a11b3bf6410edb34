"""The workflows: valid, and with no more rights than they need."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from tests.support.deployment import ROOT, load

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))


@pytest.mark.needs("TEST_DEPLOY")
@pytest.mark.parametrize(
    "file", [*WORKFLOWS, GITHUB / "dependabot.yml"], ids=lambda file: file.name
)
def test_it_is_what_github_takes(file: Path) -> None:
    name = "dependabot" if file.stem == "dependabot" else "github-workflows"
    schema = files("check_jsonschema") / "builtin_schemas" / "vendor" / f"{name}.json"
    jsonschema.validate(load(file), json.loads(schema.read_text(encoding="utf-8")))


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_reads_only(file: Path) -> None:
    workflow = load(file)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert "timeout-minutes" in job or name == "pypi", name
        writes = {key for key, value in job.get("permissions", {}).items() if value == "write"}
        assert writes <= {"pypi": {"id-token"}, "image": {"packages"}}.get(name, set())
