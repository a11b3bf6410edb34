"""The commands and programs that the pages show, and how each of them is tried."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[2]

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]

#: Why an example is marked with ``<!-- not run: ... -->`` before it.
REASONS = {
    "adapter": "it needs a LoRA adapter",
    "cluster": "it needs a cluster of Ray",
    "files": "it needs files that the reader has or makes",
    "model": "it needs a model of another kind",
    "part": "it is a part of a program",
}

_BLOCK = re.compile(
    r"(?:^ *<!-- not run: (?P<why>\w+) -->\n)?"
    r"^(?P<indent> *)```(?P<kind>\w+)\n(?P<text>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)


@attrs.frozen
class Example:
    """A block of code of a page, by its number.

    Attributes:
        why_not: the reason why it is not run; empty: it is.
    """

    page: Path
    number: int
    kind: str
    text: str
    why_not: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}-{self.number}"

    def commands(self) -> Iterator[list[str]]:
        """The words of each command of a shell, without variables before it."""
        for line in commands_in(self.text):
            if re.match(r"[A-Z_]+=\$\(", line):
                continue
            words: list[str] = []
            for word in [*shlex.split(line, comments=True), "&"]:
                if word in ("&&", "|", "&"):
                    if words:
                        yield words
                    words = []
                elif words or not re.fullmatch(r"[A-Z_]+=.*", word, re.DOTALL):
                    words.append(word)


def commands_in(text: str) -> Iterator[str]:
    """The commands of a script, each with its continuation lines."""
    pending = ""
    for line in text.splitlines():
        pending += line + "\n"
        try:
            shlex.split(pending, comments=True)
        except ValueError:  # a quotation is open
            continue
        if not line.endswith("\\"):
            if pending.strip():
                yield pending.strip()
            pending = ""
    assert not pending.strip(), pending


def examples(kind: str) -> list[Example]:
    found = []
    for page in PAGES:
        for number, block in enumerate(_BLOCK.finditer(page.read_text(encoding="utf-8")), 1):
            if block["kind"] == kind:
                indent = block["indent"]
                lines = (line.removeprefix(indent) for line in block["text"].splitlines())
                text = "\n".join(lines) + "\n"
                found.append(Example(page, number, kind, text, block["why"] or ""))
    return found
