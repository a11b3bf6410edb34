"""``trioserve store``: what is in the file of ``--store``, checked, compacted, copied or erased."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

from trioserve.cli.actions import ActionParser
from trioserve.cli.commands import bytes_text, hush, table
from trioserve.cli.progress import ProgressReport
from trioserve.config import Config


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command; see `trioserve.cli.commands`.

    Raises:
        ConfigError: a flag is invalid.
        StoreError: the store cannot be used.
    """
    parser = ActionParser("store")
    actions = parser.actions()
    for name in _ACTIONS:
        action = actions.add_parser(name)
        action.add_argument("file")
        if name == "export":
            action.add_argument("target")
        if name == "erase":
            action.add_argument("--api-key", default=environ.get("LLAMA_API_KEY"))
            action.add_argument("--name")
    options = parser.parse_args(list(argv))
    hush(Config())
    return _ACTIONS[options.action](options)


def _check(options: argparse.Namespace) -> int:
    from trioserve.store.database import problems, summary

    found = problems(options.file)
    for problem in found:
        print(f"trioserve: {options.file}: {problem}", file=sys.stderr)
    if found:
        return 1
    rows = [(kind, str(number), bytes_text(size)) for kind, number, size in summary(options.file)]
    print(table([("KIND", "NUMBER", "SIZE"), *rows], right={1, 2}), end="")
    return 0


def _compact(options: argparse.Namespace) -> int:
    from pathlib import Path

    from trioserve.store.database import existing

    with existing(options.file) as database:
        before = Path(options.file).stat().st_size
        database.compact()
        after = Path(options.file).stat().st_size
    print(f"{options.file}: {bytes_text(before)} before, {bytes_text(after)} now")
    return 0


def _export(options: argparse.Namespace) -> int:
    from trioserve.store.database import export, problems

    with ProgressReport(sys.stderr, n_log_lines=0) as progress:
        export(
            options.file,
            options.target,
            lambda share: progress.tell(share, f"Copying {options.file}: {share:4.0%}", "copying"),
        )
    if found := problems(options.target):
        print(f"trioserve: {options.target}: {found[0]}", file=sys.stderr)
        return 1
    print(options.target)
    return 0


def _erase(options: argparse.Namespace) -> int:
    from trioserve.store.database import existing, owner_of
    from trioserve.store.records import Records
    from trioserve.store.usage import erase_usage

    key, name, number, n_days = options.api_key, options.name, 0, 0
    if key is None and name is None:
        key = name = ""  # the clients of a server without keys
    with existing(options.file) as database:
        if key is not None:
            records = Records(database.connection, 0, 0.0)
            number = records.erase(owner_of(key, database.salt))
        if name is not None:
            n_days = erase_usage(database.connection, name)
        database.compact()
    print(f"deleted {number} records" + (f", and {n_days} rows of usage" if n_days else ""))
    return 0


_ACTIONS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "check": _check,
    "compact": _compact,
    "export": _export,
    "erase": _erase,
}
