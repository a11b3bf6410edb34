"""``trioserve store``: what is in the file of ``--store``, checked, compacted, copied or erased."""

from __future__ import annotations

import sys
from pathlib import Path

from trioserve.cli.options import Arguments, hush
from trioserve.cli.output import RED, Column, note, print_list
from trioserve.cli.progress import ProgressReport
from trioserve.units import bytes_text

_COLUMNS = (Column("kind"), Column("number", right=True), Column("size", bytes_text, right=True))


def check(given: Arguments) -> int:
    """Look for damage, and list what is in the file. Raises StoreError, as the others here."""
    from trioserve.store.database import problems, summary

    hush()
    file = given.words[0]
    found = problems(file)
    for problem in found:
        note(f"{file}: {problem}", RED)
    if found:
        return 1
    rows = [dict(zip(("kind", "number", "size"), one, strict=True)) for one in summary(file)]
    print_list(_COLUMNS, rows, as_json=given["json"])
    return 0


def compact(given: Arguments) -> int:
    """Give back the space of what was deleted."""
    from trioserve.store.database import existing

    hush()
    file = given.words[0]
    with existing(file) as database:
        before = Path(file).stat().st_size
        database.compact()
        after = Path(file).stat().st_size
    print(f"{file}: {bytes_text(before)} before, {bytes_text(after)} now")
    return 0


def export(given: Arguments) -> int:
    """Copy the file."""
    from trioserve.store import database

    hush()
    file, target = given.words
    with ProgressReport(sys.stderr) as progress:
        database.export(file, target, lambda share: progress.tell(f"Copying {file}", share))
    if found := database.problems(target):
        note(f"{target}: {found[0]}", RED)
        return 1
    print(target)
    return 0


def erase(given: Arguments) -> int:
    """Delete what a client has stored."""
    from trioserve.store.database import existing, owner_of
    from trioserve.store.records import Records
    from trioserve.store.usage import erase_usage

    hush()
    key, name = given["api_key"] or given.environ.get("LLAMA_API_KEY"), given["name"]
    number = n_days = 0
    if key is None and name is None:
        key = name = ""  # the clients of a server without keys
    with existing(given.words[0]) as database:
        if key is not None:
            records = Records(database.connection, 0, 0.0)
            number = records.erase(owner_of(key, database.salt))
        if name is not None:
            n_days = erase_usage(database.connection, name)
        database.compact()
    print(f"deleted {number} records" + (f", and {n_days} rows of usage" if n_days else ""))
    return 0
