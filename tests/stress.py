"""Run the tests again and again beside busy processes, and list those whose result varies.

    make test-stress STRESS_ARGS='--fast 10 --system 3 --busy 2'

The tests run in random order, whose seed is printed: `--seed` begins with that one again. A test
that fails once is listed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

TIERS = {
    "fast": ("tests", "-m", "not system"),
    "system": ("tests", "-m", "system"),
}


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep as many cores busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run(tier: str, seed: int, processes: int) -> dict[str, str]:
    """Run a tier; returns how each of its tests ended."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        subprocess.run(
            [
                sys.executable, "-m", "pytest", "-q", *TIERS[tier], "-n", str(processes),
                "--dist", "loadfile", f"--random-order-seed={seed}", f"--junit-xml={report}",
            ],
            check=False,
        )  # fmt: skip
        if not report.exists():
            sys.exit("pytest has ended without a report")
        cases = ElementTree.parse(report).iter("testcase")
        return {f"{case.get('classname')}::{case.get('name')}": _end(case) for case in cases}


def _end(case: ElementTree.Element) -> str:
    ends = [child.tag for child in case if child.tag in {"failure", "error", "skipped"}]
    return ends[0] if ends else "passed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fast", type=int, default=10, help="runs of the fast tests")
    parser.add_argument("--system", type=int, default=3, help="runs of the system tests")
    parser.add_argument("--busy", type=int, default=2, help="processes that compute beside them")
    parser.add_argument("--processes", type=int, default=2, help="of pytest")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(2**16), help="of the first run"
    )
    options = parser.parse_args()

    seeds = iter(range(options.seed, options.seed + options.fast + options.system))
    ends: dict[str, Counter[str]] = defaultdict(Counter)
    with busy(options.busy):
        for tier in [*["fast"] * options.fast, *["system"] * options.system]:
            seed, began = next(seeds), time.monotonic()
            results = run(tier, seed, options.processes)
            for test, end in results.items():
                ends[test][end] += 1
            counts = dict(Counter(results.values()))
            print(f"{tier}: seed {seed}, {time.monotonic() - began:.0f} s, {counts}", flush=True)

    bad = {
        test: each for test, each in ends.items() if len(each) > 1 or {"failure", "error"} & {*each}
    }
    for test, each in sorted(bad.items()):
        print(f"{test}: {dict(each)}")
    print(f"{len(ends)} tests, {len(bad)} that failed or varied")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
