"""The shipped page is what `make ui` makes of its sources, and it is small."""

from __future__ import annotations

import filecmp
import gzip
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import trioserve

pytestmark = pytest.mark.system

UI = Path(trioserve.__file__).parent / "ui"
ROOT = UI.parent.parent
BUILT = UI / "dist"

#: Bytes of scripts, compressed: all but the last, those that the page starts with, and the one that
#: draws diagrams, which a page fetches for its first one.
MAX_SCRIPTS, MAX_FIRST_SCRIPTS, MAX_DIAGRAMS = 300_000, 62_000, 1_200_000


def files_in(folder: Path) -> set[str]:
    return {str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run what `make ui` runs, on a copy of the sources that has nothing else."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm to build the page with")
    folder = tmp_path_factory.mktemp("page") / "ui"
    shutil.copytree(UI, folder, ignore=shutil.ignore_patterns("node_modules", "dist"))
    for words in (
        ("ci", "--prefer-offline", "--no-audit", "--no-fund"),
        ("run", "check"),
        ("test",),
        ("run", "build"),
    ):
        done = subprocess.run([npm, *words], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"npm {' '.join(words)}\n{done.stdout}{done.stderr}"
    return folder / "dist"


def test_what_is_shipped_is_what_the_sources_give(made: Path) -> None:
    names = files_in(made)
    assert files_in(BUILT) == names, "run `make ui` and commit trioserve/ui/dist"
    _, different, failed = filecmp.cmpfiles(made, BUILT, sorted(names), shallow=False)
    assert (different, failed) == ([], []), "run `make ui` and commit trioserve/ui/dist"


def packed(path: Path) -> int:
    return len(gzip.compress(path.read_bytes()))


def test_scripts_are_small() -> None:
    first = {*re.findall(r'"(assets/[^"]+\.js)"', (BUILT / "index.html").read_text())}
    assert first
    assert sum(packed(BUILT / name) for name in first) < MAX_FIRST_SCRIPTS
    (diagrams,) = BUILT.rglob("mermaid-*.js")
    assert packed(diagrams) < MAX_DIAGRAMS
    assert sum(map(packed, {*BUILT.rglob("*.js")} - {diagrams})) < MAX_SCRIPTS


def licensed() -> dict[str, str]:
    """The packages in the page and their licenses."""
    text = (BUILT / "licenses.txt").read_text(encoding="utf-8")
    found = re.findall(r"^-{80}\n(\S+) \S+ \((.+)\)\n\n(?=.)", text, re.MULTILINE)
    return dict(found)


def test_the_licenses_of_all_packages_are_shipped() -> None:
    assert {"preact", "marked", "katex", "highlight.js", "mermaid"} <= licensed().keys()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = set(project["license"].split(" AND "))
    for name, license in licensed().items():
        assert declared & set(license.strip("()").split(" OR ")), (name, license)
    assert "trioserve/ui/dist/licenses.txt" in project["license-files"]


def test_every_package_is_pinned() -> None:
    package = json.loads((UI / "package.json").read_text(encoding="utf-8"))
    for version in {**package["dependencies"], **package["devDependencies"]}.values():
        assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    lock = json.loads((UI / "package-lock.json").read_text(encoding="utf-8"))
    for name, one in lock["packages"].items():
        assert not name or one["integrity"], name


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str]]:
    """The files of a wheel and of an sdist."""
    folder = tmp_path_factory.mktemp("archives")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        in_wheel = set(wheel.namelist())
    with tarfile.open(next(folder.glob("*.tar.gz"))) as sdist:
        in_sdist = {name.partition("/")[2] for name in sdist.getnames()}
    return in_wheel, in_sdist


def test_a_wheel_has_the_page_and_not_its_sources(archives: tuple[set[str], set[str]]) -> None:
    wheel, _ = archives
    of_the_page = {name for name in wheel if name.startswith("trioserve/ui/")}
    assert of_the_page == {f"trioserve/ui/dist/{name}" for name in files_in(BUILT)}
    assert any(name.endswith("/licenses/trioserve/ui/dist/licenses.txt") for name in wheel)
    assert "trioserve/models/bundled.gguf" in wheel
    templates = ROOT / "trioserve/chat/template/templates"
    assert {f"trioserve/chat/template/templates/{name}" for name in files_in(templates)} <= wheel


def test_an_sdist_has_what_the_page_is_made_from(archives: tuple[set[str], set[str]]) -> None:
    _, sdist = archives
    assert {f"trioserve/ui/dist/{name}" for name in files_in(BUILT)} <= sdist
    assert {f"trioserve/ui/src/{name}" for name in files_in(UI / "src")} <= sdist
    for name in ("build.mjs", "package.json", "package-lock.json", "tsconfig.json"):
        assert f"trioserve/ui/{name}" in sdist
    assert not any("node_modules" in name for name in sdist)
