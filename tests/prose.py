"""List the lines that have a phrase of docs/style.md. `make check` runs this.

python -m tests.prose [FILE ...]
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = ("*.md", "docs", "trioserve", "benchmarks", "examples")
SUFFIXES = {".md", ".py", ".ts", ".tsx"}
#: Files that quote the phrases, or text that others wrote.
EXEMPT = {"docs/style.md", "examples/bundled_model/stories.py"}


def phrases() -> re.Pattern[str]:
    page = (ROOT / "docs" / "style.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```text\n(.*?)\n```", page, re.DOTALL)
    return re.compile(rf"\b(?:{block.replace(chr(10), '|')})\b", re.IGNORECASE)


def found(path: Path, pattern: re.Pattern[str]) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [
        f"{path.relative_to(ROOT)}:{number}: [{match[0]}] {line.strip()}"
        for number, line in enumerate(lines, 1)
        if (match := pattern.search(line)) and "prose: ok" not in line
    ]


def main() -> None:
    names = sys.argv[1:] or _git_files()
    paths = [ROOT / name for name in names if name not in EXEMPT]
    pattern = phrases()
    lines = [
        line
        for path in paths
        if path.suffix in SUFFIXES and path.is_file()
        for line in found(path, pattern)
    ]
    sys.exit("\n".join(lines) or None)


def _git_files() -> list[str]:
    out = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *PLACES],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return out.stdout.splitlines()


if __name__ == "__main__":
    main()
