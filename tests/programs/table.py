"""The table of the docs: what was seen to work, and in which version."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.programs.catalogue import PROGRAMS, name_and_version

#: Takes the name of a program, and what it did.
Works = Callable[[str, str], None]

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
BEGIN, END = "<!-- begin of the table -->", "<!-- end of the table -->"
_HEAD = "| program | version | what works |\n|---|---|---|\n"


def rows_of(page: str) -> dict[str, str]:
    """The rows of the table in a page, by the title of their program."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    lines = (line for line in table.splitlines()[2:] if line.startswith("| "))
    return {line.split("|")[1].strip(): line for line in lines}


def written(page: str, seen: Mapping[str, Sequence[str]]) -> str:
    """A page whose table has what was seen of each program, and the other rows as they were."""
    rows = rows_of(page)
    for name, what in seen.items():
        program = PROGRAMS[name]
        versions = (" ".join(name_and_version(one)) for one in program.packages[: program.shown])
        rows[program.title] = f"| {program.title} | {', '.join(versions)} | {'; '.join(what)} |"
    ordered = [rows[one.title] for one in PROGRAMS.values() if one.title in rows]
    table = f"{BEGIN}\n\n{_HEAD}" + "".join(f"{row}\n" for row in ordered) + f"\n{END}"
    return re.sub(f"{BEGIN}.*{END}", lambda _: table, page, flags=re.DOTALL)
