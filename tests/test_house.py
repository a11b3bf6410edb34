"""What keeps the house small: short modules, few parameters, shallow nesting."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import trioserve

PACKAGE = Path(trioserve.__file__).parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "node_modules" not in path.parts)

MAX_LINES = 600
#: One class with a field for each flag: it is a list, and stays in one piece.
MAX_LINES_OF = {"config/config.py": 820}
MAX_PARAMETERS = 8
MAX_NESTING = 3

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.TryStar, ast.With, ast.AsyncWith)


def offences_in(path: Path) -> Iterator[str]:
    name = path.relative_to(PACKAGE)
    text = path.read_text(encoding="utf-8")
    if (n_lines := text.count("\n")) > MAX_LINES_OF.get(name.as_posix(), MAX_LINES):
        yield f"{name}: {n_lines} lines"
    for function in functions_in(ast.parse(text)):
        if (n := n_parameters(function)) > MAX_PARAMETERS:
            yield f"{name}:{function.lineno} {function.name}: {n} parameters"
        if (n := nesting(function.body)) > MAX_NESTING:
            yield f"{name}:{function.lineno} {function.name}: blocks {n} deep"


def test_modules_are_short_and_functions_simple() -> None:
    assert [offence for path in MODULES for offence in offences_in(path)] == []


def test_numbers_are_read_by_one_reader() -> None:
    """`isdigit` takes more than `int` does: ``²``, and 5,000 digits."""
    checks = re.compile(r"\.is(digit|decimal|numeric)\(")
    assert [str(path) for path in MODULES if checks.search(path.read_text(encoding="utf-8"))] == []


def functions_in(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS))


def n_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def nesting(body: list[ast.stmt]) -> int:
    """How deep blocks stand in blocks. A row of ``elif`` is one block, and so is a function."""
    deepest = 0
    for statement in body:
        if isinstance(statement, ast.Match):
            inner = max(nesting(case.body) for case in statement.cases) + 1
        elif isinstance(statement, _BLOCKS):
            inner = 1 + max(map(nesting, bodies_of(statement)))
        else:
            continue
        deepest = max(deepest, inner)
    return deepest


def bodies_of(block: ast.stmt) -> Iterator[list[ast.stmt]]:
    yield block.body  # type: ignore[attr-defined]
    for handler in getattr(block, "handlers", ()):
        yield handler.body
    yield getattr(block, "finalbody", [])
    rest = getattr(block, "orelse", [])
    if isinstance(block, ast.If) and len(rest) == 1 and isinstance(rest[0], ast.If):
        yield from bodies_of(rest[0])  # elif
    else:
        yield rest


def test_the_index_of_helpers_is_complete() -> None:
    support = Path(__file__).parent / "support"
    index = (support / "README.md").read_text(encoding="utf-8")
    modules = {path.stem for path in support.glob("*.py")}
    assert {name for name in modules if not re.search(rf"`{name}\b", index)} == set()
    assert (
        set(re.findall(r"`(\w+)(?:\.\w+)?`", index.replace("trioserve.testing.", "")))
        - {"LLAMA_SERVER", "ScriptedBackend", "Server", "ToolScript"}
        <= modules
    )
