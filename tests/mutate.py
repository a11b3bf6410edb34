"""Mutation testing: change the code in many places, one at a time, and see which tests notice.

    make mutate MUTATE_ARGS='--count 200 --seed 1 --report mutants.json'

A first run of the fast tests, under coverage, records which tests reach which line. A mutant is
then run against the tests that reach its line: those of the file that mirrors its module first,
then the quickest ones, up to `--seconds` of them. It is killed if one fails, or if they hang.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import attrs
import coverage

ROOT = Path(__file__).resolve().parents[1]

#: Modules to mutate: a wrong line in them is hard to notice from the outside.
TARGETS = (
    "trioserve/engine",
    "trioserve/chat/parse",
    "trioserve/server/dispatch.py",
    "trioserve/server/generation/requests.py",
    "trioserve/api/sessions.py",
)

_FAST = ("tests", "-m", "not system")
_QUIET = ("-q", "--no-header", "-p", "no:cacheprovider", "-W", "ignore")

_OTHER_COMPARISON: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OTHER_OPERATOR: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip

#: Statements and functions that do nothing but check, or log.
_ONLY_SAYS = re.compile(r"(def |[\w.]*\.)_?check_integrity\(|_log\.")


@attrs.frozen
class Mutant:
    """A change: the `site`-th node of a file, which is on `line`, becomes another one."""

    path: str
    site: int
    line: int
    change: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line} [{self.site}] {self.change}"


def changed(node: ast.AST) -> tuple[str, ast.AST] | None:
    """Another node for this one, and the change in words; None: it stays as it is."""
    other = copy.deepcopy(node)
    match other:
        case ast.Compare(ops=[op]) if type(op) in _OTHER_COMPARISON:
            other.ops = [_OTHER_COMPARISON[type(op)]()]
            return "compares otherwise", other
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in _OTHER_OPERATOR:
            other.op = _OTHER_OPERATOR[type(op)]()
            return "calculates otherwise", other
        case ast.BoolOp(op=op):
            other.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            return "and is or, or is and", other
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return "without not", operand
        case ast.Constant(value=bool() as value):
            return f"{value} is {not value}", ast.Constant(not value)
        case ast.Constant(value=int() as value):
            return f"{value} is {value + 1}", ast.Constant(value + 1)
        case ast.Return(value=ast.expr()):
            return "returns None", ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call() | ast.Await()):
            return "statement left out", ast.Pass()
        case ast.Break():
            return "break is continue", ast.Continue()
        case ast.Continue():
            return "continue is break", ast.Break()
    return None


def sites(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes whose change changes what the code does.

    No annotations, logs and decorators of classes, and nothing that only checks: assertions, and
    the methods `check_integrity`.
    """
    for field, value in ast.iter_fields(tree):
        if field == "decorator_list":
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.Assert):
                continue
            if isinstance(node, ast.FunctionDef | ast.Expr) and _ONLY_SAYS.match(ast.unparse(node)):
                continue
            if isinstance(node, ast.expr) and node in (
                getattr(tree, "annotation", None),
                getattr(tree, "returns", None),
            ):
                continue
            yield node
            yield from sites(node)


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self._old:
            return ast.copy_location(self._new, node)
        return self.generic_visit(node)


def mutants_of(path: str) -> list[Mutant]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    found = []
    for number, node in enumerate(sites(tree)):
        change = changed(node)
        if change is not None and hasattr(node, "lineno"):
            found.append(Mutant(path, number, node.lineno, change[0]))
    return found


def mutated(mutant: Mutant, source: str) -> str:
    """The source of its module, with the change."""
    tree = ast.parse(source)
    node = list(sites(tree))[mutant.site]
    change = changed(node)
    assert change is not None
    return ast.unparse(ast.fix_missing_locations(_Replace(node, change[1]).visit(tree)))


class Reach:
    """The tests that reach a line, and their seconds, from a run of all tests."""

    def __init__(self, folder: Path) -> None:
        data = coverage.CoverageData(str(folder / ".coverage"))
        data.read()
        self._tests: dict[str, dict[int, list[str]]] = {
            str(Path(file).relative_to(folder)): data.contexts_by_lineno(file)
            for file in data.measured_files()
        }
        self._seconds: dict[str, float] = defaultdict(float)
        for line in (folder / "durations.txt").read_text(encoding="utf-8").splitlines():
            words = line.split(maxsplit=2)
            if len(words) == 3 and words[0].endswith("s") and words[1] in {"call", "setup"}:
                self._seconds[words[2]] += float(words[0][:-1])

    def tests(self, mutant: Mutant, budget: float) -> list[str]:
        """The tests of a mutant in the order of their use."""
        lines = self._tests.get(mutant.path, {})
        reached = lines.get(mutant.line, [])
        if reached == [""]:  # it runs when the module is imported: any test may notice
            reached = [context for contexts in lines.values() for context in contexts]
        names = sorted({context.rpartition("|")[0] for context in reached if "|" in context})
        mirror = mutant.path.replace("trioserve/", "tests/", 1)
        mirror = f"{Path(mirror).parent}/test_{Path(mirror).name}"
        names.sort(key=lambda name: (not name.startswith(mirror), self._seconds[name]))
        chosen, seconds = [], 0.0
        for name in names:
            seconds += self._seconds[name]
            if seconds > budget and chosen:
                break
            chosen.append(name)
        return chosen


def run_pytest(folder: Path, *arguments: str, timeout: float | None = None) -> tuple[int, str]:
    """Run tests of a copy; -1 in place of the exit code if they take too long."""
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "COVERAGE_CORE": "ctrace"}
    command = [sys.executable, "-m", "pytest", *_QUIET, *arguments]
    process = subprocess.Popen(
        command, cwd=folder, env=environ, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return -1, ""
    return process.returncode, output


def copy_of_tree(folder: Path) -> Path:
    """Copy what Git knows, and what is new and not ignored, to a folder."""
    listed = ["git", "ls-files", "-co", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def judge(mutant: Mutant, folder: Path, reach: Reach, seconds: float) -> list[str]:
    """Run a mutant in a copy: how it ended, and the test that killed it."""
    tests = reach.tests(mutant, seconds)
    if not tests:
        return ["not reached", ""]
    file = folder / mutant.path
    source = file.read_text(encoding="utf-8")
    stat = file.stat()
    (folder / "chosen.txt").write_text("\n".join(tests), encoding="utf-8")
    try:
        file.write_text(mutated(mutant, source), encoding="utf-8")
        limit = 60 + 4 * seconds
        status, output = run_pytest(folder, "-x", "--timeout", "60", "@chosen.txt", timeout=limit)
    finally:
        file.write_text(source, encoding="utf-8")
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    if status == 0:
        return ["survived", ""]
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return ["hung" if status == -1 else "killed", failed[0].split()[1] if failed else ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0, help="of tests for each mutant")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--report", type=Path, help="a file for the results")
    parser.add_argument("targets", nargs="*", default=TARGETS)
    options = parser.parse_args()

    files = [file for target in options.targets for file in sorted(python_files(ROOT / target))]
    population = [mutant for file in files for mutant in mutants_of(str(file.relative_to(ROOT)))]
    count = min(options.count, len(population))
    sample = random.Random(options.seed).sample(population, count)
    results: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.processes):
            copies.put(copy_of_tree(Path(temporary, str(number))))
        reach = measured(Path(temporary, "0"), options.processes, files)

        def work(mutant: Mutant) -> None:
            folder = copies.get()
            results[mutant.name] = judge(mutant, folder, reach, options.seconds)
            copies.put(folder)
            print(len(results), mutant.name, *results[mutant.name], flush=True)

        with ThreadPoolExecutor(options.processes) as pool:
            list(pool.map(work, sample))

    if options.report:
        options.report.write_text(json.dumps(results, indent=1, sort_keys=True), encoding="utf-8")
    ends = Counter(how for how, _ in results.values())
    share = (ends["killed"] + ends["hung"]) / len(results)
    print(f"{len(results)} of {len(population)} mutants: {dict(ends)}; killed: {share:.1%}")


def python_files(place: Path) -> list[Path]:
    return [place] if place.is_file() else list(place.rglob("*.py"))


def measured(folder: Path, processes: int, files: list[Path]) -> Reach:
    """Run the fast tests in a copy; stop if they fail without a mutant."""
    names = [str(file.relative_to(ROOT)) for file in files]
    print("running the fast tests under coverage", flush=True)
    (folder / "mutate.toml").write_text(f"[tool.coverage.run]\ninclude = {names}\n")
    status, output = run_pytest(
        folder, *_FAST, "-n", str(processes), "--dist", "loadfile", "--cov", "--cov-report=",
        "--cov-config=mutate.toml", "--cov-context=test", "--durations=0", "--durations-min=0.001",
    )  # fmt: skip
    if status != 0:
        sys.exit(f"{output[-5000:]}\nThe fast tests fail without a mutant.")
    (folder / "durations.txt").write_text(output, encoding="utf-8")
    return Reach(folder)


if __name__ == "__main__":
    main()
