"""Run llama-server's own tests with trioserve in the place of the program.

    python -m tests.compat.peer_tests --sdist llama_cpp_python-0.3.36.tar.gz

The tests are those of the llama.cpp inside llama-cpp-python's source distribution; `--sdist` is
the archive or the folder that it was unpacked to. Their packages go into a separate
environment. `peer_known` lists the tests for later, those that need another model, and the
accepted differences. The exit code is 1 when any other test fails.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import subprocess
import sys
import tarfile
import venv
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

from benchmarks.report import bounded
from tests.compat import peer_known, peer_plugin, stand_ins

ROOT = Path(__file__).parents[2]
_TESTS = "vendor/llama.cpp/tools/server/tests"

#: Packages of the tests, with the one that ends a hanging test.
_PACKAGES = (
    "aiohttp",
    "filelock",
    "openai>=2.14,<3",
    "prometheus-client",
    "pytest>=8.3,<9",
    "pytest-timeout",
    "pytest-xdist",
    "requests",
    "wget",
)

#: llama-server's defaults that its tests rely on, where trioserve has others: its tools reach
#: everything, its proxy any address, and it ends at once. And one thread, because several servers
#: run at the same time.
_DEFAULTS = {
    "LLAMA_ARG_KV_UNIFIED": "false",
    "TRIOSERVE_STREAM_INTERVAL_MS": "0",
    "TRIOSERVE_TOOLS_DIR": "/",
    "TRIOSERVE_UI_MCP_PROXY_HOSTS": "127.0.0.1:*,all",
    "TRIOSERVE_DRAIN_TIMEOUT": "0",
    "LLAMA_ARG_CORS_ORIGINS": "*",
    "LLAMA_ARG_THREADS": "1",
}

_COLUMNS = ("passed", "but its text", "accepted", "needs a model", "later", "skipped", "failed")


@attrs.frozen
class Result:
    """The result of a test, in one of `_COLUMNS`, and its reason."""

    id: str
    column: str
    why: str = ""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.compat.peer_tests",
        description=(__doc__ or "").partition("\n")[0],
    )
    add = parser.add_argument
    add(
        "--sdist",
        type=Path,
        default=os.environ.get("LLAMA_CPP_PYTHON_SDIST") or None,
        help="llama-cpp-python's source distribution; $LLAMA_CPP_PYTHON_SDIST",
    )
    add(
        "--work",
        type=Path,
        default=ROOT / ".cache/peer-tests",
        help="folder for the environment, the models and what is unpacked",
    )
    add(
        "--python",
        type=Path,
        help="a Python that has the tests' packages; default: a new environment",
    )
    add("--program", type=Path, help="the program to test, in place of this trioserve")
    add("--workers", type=bounded(1, 64), default=2, help="tests that run at the same time")
    add("--timeout", type=bounded(1, 3600), default=180, help="seconds for a test")
    add("--keep", metavar="EXPRESSION", default="", help="only tests that match, as pytest's -k")
    add("files", nargs="*", help="only these files, such as test_basic.py")
    options = parser.parse_args(argv)
    if options.sdist is None:
        parser.error("no --sdist: get it with `pip download --no-binary :all: --no-deps "
                     "llama-cpp-python`")  # fmt: skip
    return options


# -- what the tests need


def unpacked(sdist: Path, work: Path) -> Path:
    """Return the folder of the tests, unpacking them if necessary.

    Raises:
        FileNotFoundError: the tests are missing.
    """
    if sdist.is_file():
        target = work / "sdist"
        if not target.exists():
            with tarfile.open(sdist) as archive:
                archive.extraction_filter = getattr(tarfile, "data_filter", lambda one, _: one)
                archive.extractall(target)
        sdist = target
    for tests in (sdist / _TESTS, *sdist.glob(f"*/{_TESTS}")):
        if tests.is_dir():
            return tests.resolve()
    raise FileNotFoundError(f"{sdist} has no {_TESTS}")


def environment(work: Path) -> Path:
    """Return the Python of an environment with the tests' packages, created if necessary."""
    home = work / "venv"
    python = home / "bin/python"
    ready = home / ".installed"
    if not ready.exists():
        venv.create(home, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-qq", *_PACKAGES], check=True)
        ready.touch()
    return python


def program(work: Path) -> Path:
    """Write a program that starts this trioserve with llama-server's defaults."""
    path = work / "trioserve"
    settings = "".join(
        f'export {name}="${{{name}-{value}}}"\n' for name, value in _DEFAULTS.items()
    )
    path.write_text(
        f"#!/bin/sh\nexport PYTHONPATH='{ROOT}'\n{settings}"
        f"exec '{sys.executable}' -m tests.compat.slow_router \"$@\"\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# -- running them


def run(options: argparse.Namespace) -> list[Result]:
    """Run the tests, and sort what became of them."""
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    tests = unpacked(options.sdist, work)
    (tests / "tmp").mkdir(exist_ok=True)  # which their downloads would make
    python = (options.python or environment(work)).absolute()
    results = work / "results.jsonl"
    results.unlink(missing_ok=True)
    models = stand_ins.write_all(work / "models")
    plan = {
        "models": {name: str(path) for name, path in models.items()},
        "projectors": {
            str(model): str(path) for model, path in stand_ins.projectors(work / "models").items()
        },
        "images": {name: b64encode(data).decode() for name, data in stand_ins.images().items()},
        "later": peer_known.LATER,
        "strict": peer_known.STRICT,
        "results": str(results),
    }
    files = [f"unit/{Path(name).name}" for name in options.files] or ["unit"]
    command = [python, "-m", "pytest", "-q", "-p", peer_plugin.__name__, "-p", "no:cacheprovider"]
    command += [f"--timeout={options.timeout}", "-n", str(options.workers)]
    command += ["-k", options.keep] if options.keep else []
    with (work / "output.txt").open("wb") as output:
        subprocess.run(
            [*command, *files],
            cwd=tests,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ
            | {
                "PYTHONPATH": str(ROOT),
                "LLAMA_CACHE": str(stand_ins.write_cache(work / "cache", models)),
                "LLAMA_SERVER_BIN_PATH": str((options.program or program(work)).resolve()),
                peer_plugin.VARIABLE: json.dumps(plan),
            },
            check=False,  # tests that fail are in the results
        )
    if not results.exists():
        raise FileNotFoundError(f"no test was run; see {output.name}")
    rows = {row["id"]: row for row in map(json.loads, results.read_text().splitlines())}
    return [sorted_in(row) for row in rows.values()]


def sorted_in(row: dict[str, object]) -> Result:
    """Find the column of a test's result."""
    name, message = str(row["id"]), str(row["message"])
    if row["outcome"] == "passed":
        return Result(name, "but its text" if row["texts"] else "passed")
    if row["outcome"] == "skipped":
        for prefix, column in (
            (peer_plugin.MODEL, "needs a model"),
            (peer_plugin.LATER, "later"),
            ("", "skipped"),
        ):
            if message.startswith(prefix):
                return Result(name, column, message.removeprefix(prefix))
    for known in peer_known.KNOWN:
        if known.covers(name, message):
            return Result(name, known.column, known.why)
    return Result(name, "failed", " ".join(message.split())[:200])


# -- telling


def table(results: Iterable[Result]) -> str:
    """Write a line for each file, with what became of its tests."""
    by_file: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        by_file[result.id.partition("::")[0].removeprefix("unit/")][result.column] += 1
        by_file["all"][result.column] += 1
    order = sorted(by_file, key=lambda name: (name == "all", name))
    lines = [f"{'':28}" + "".join(f"{name:>15}" for name in _COLUMNS)]
    for name in order:
        counts = by_file[name]
        lines.append(f"{name:28}" + "".join(f"{counts[each] or '.':>15}" for each in _COLUMNS))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    options = parse(argv)
    try:
        results = run(options)
    except (OSError, tarfile.TarError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 2
    print(table(results))
    reasons = Counter(
        (one.column, one.why) for one in results if one.why and one.column != "failed"
    )
    for (column, why), count in sorted(reasons.items()):
        print(f"{count:5} {column}: {why}")
    failed = [one for one in results if one.column == "failed"]
    for one in failed:
        print(f"FAILED {one.id}\n       {one.why}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
