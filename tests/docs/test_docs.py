"""Statements of the documentation about the code are true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import attrs
import pytest

import trioserve
from tests.support.docs_pages import ROOT, read_page, tables
from trioserve.config import Config
from trioserve.config.flags import FLAGS

PAGES = [
    path
    for pattern in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/*.md",
        "benchmarks/*.md",
        "examples/*/*.md",
    )
    for path in sorted(ROOT.glob(pattern))
]


def test_the_map_has_every_folder() -> None:
    rows = re.findall(
        r"^\| `(trioserve/[\w./]*)` \| (.+) \|$", read_page("architecture.md"), re.MULTILINE
    )
    folders = {str(path.parent.relative_to(ROOT)) for path in tables.PACKAGE.rglob("*/__init__.py")}
    assert folders <= {name for name, _ in rows}
    assert all(about.strip() for _, about in rows)


def test_what_the_architecture_page_says_where_to_find_is_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .+ \| `(trioserve/[\w/]+\.py)` \| `(.+)` \|$", page, re.MULTILINE)
    assert len(rows) >= 5
    for path, name in rows:
        assert name in (ROOT / path).read_text(encoding="utf-8"), (path, name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_file_that_a_page_names_exists(page: Path) -> None:
    tops = "trioserve|tests|benchmarks|examples|docs"
    names = re.findall(rf"`((?:{tops})/[\w./]+)`", page.read_text(encoding="utf-8"))
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_what_the_recipes_name_is_there() -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    recipes = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    assert len(recipes) == 9
    for recipe in recipes:
        files = re.findall(r"`((?:trioserve|tests)/[\w/]+\.py)`", recipe)
        texts = "".join((ROOT / file).read_text(encoding="utf-8") for file in files)
        names = re.findall(r"`(_?[A-Z]\w+|_?[a-z]+_[a-z_]+)`", recipe)
        assert [name for name in names if name not in texts] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_module_that_a_page_names_exists(page: Path) -> None:
    names = set(re.findall(r"`(trioserve(?:\.[a-z_]+)+)`", page.read_text(encoding="utf-8")))
    assert names <= set(tables.module_names())


def test_the_configuration_reference_has_every_flag_and_variable() -> None:
    page = read_page("configuration.md")
    for one in FLAGS:
        for flag in one.names:
            assert f"`{flag}`" in page
        if one.variable:
            assert f"`{one.variable}`" in page
    for field in attrs.fields(Config):
        assert f"| `{field.name}` |" in page


def test_the_page_of_errors_has_every_error() -> None:
    page = read_page("errors.md")
    for name in trioserve.__all__:
        if name.endswith("Error"):
            assert f"`{name}`" in page


def _texts() -> set[str]:
    """The fixed parts of all texts in the package, of at least 12 characters."""
    nodes = (
        node
        for path in tables.PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )
    texts = (
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return {text.strip(" .:`").replace("`", "") for text in texts if len(text) >= 12} | {
        kind.code for kind in vars(trioserve.errors).values() if getattr(kind, "code", None)
    }


def test_the_errors_to_search_for_are_what_the_server_says() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### (.*`.*)$", page, re.MULTILINE)
    assert len(headings) >= 15
    texts = _texts()
    for heading in headings:
        if "CMAKE" not in heading:  # that is CMake's
            assert any(text in heading.replace("`", "") for text in texts), heading


def test_the_python_page_has_every_public_name() -> None:
    listed = [module for modules in tables.PYTHON.values() for module in modules]
    assert sorted(listed) == sorted(tables.public_names())


def _python_blocks() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        found += [(f"{page.name}-{i}", block) for i, block in enumerate(blocks, 1)]
    return found


@pytest.mark.parametrize(("where", "code"), _python_blocks(), ids=lambda value: value[:20])
def test_python_in_a_page_uses_names_that_exist(where: str, code: str) -> None:
    for node in ast.walk(ast.parse(code, where)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "trioserve":
                assert node.attr in trioserve.__all__
        elif isinstance(node, ast.ImportFrom) and node.module == "trioserve":
            assert {alias.name for alias in node.names} <= set(trioserve.__all__)


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
