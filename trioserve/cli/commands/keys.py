"""``trioserve keys``: the API keys in the file of ``--api-keys``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trioserve.cli.actions import ActionParser
from trioserve.cli.commands import table
from trioserve.config import readers
from trioserve.config.keys import Key, add_key, read_keys, remove_key
from trioserve.errors import ConfigError

#: The variable of ``--api-keys``.
_VARIABLE = "TRIOSERVE_API_KEYS"

#: The fields of a key, and how their flags are read.
_READERS: Mapping[str, Callable[[str], Any]] = {
    "models": lambda text: list(readers.names(text)),
    "requests-per-minute": readers.integer,
    "tokens-per-minute": readers.integer,
    "tokens-per-day": readers.integer,
    "priority": readers.integer,
    "weight": readers.number,
}


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command; see `trioserve.cli.commands`.

    Raises:
        ConfigError: a flag is invalid, or the file cannot be used.
    """
    parser = ActionParser("keys")
    actions = parser.actions()
    for name in _ACTIONS:
        action = actions.add_parser(name)
        action.add_argument("--file", default=environ.get(_VARIABLE))
        if name != "list":
            action.add_argument("name")
        if name == "add":
            action.add_argument("--manage", action="store_true", default=None)
            for field, read in _READERS.items():
                action.add_argument(f"--{field}", dest=field, type=read)
    options = parser.parse_args(list(argv))
    if options.file is None:
        raise ConfigError(f"keys: name the file with --file or {_VARIABLE}")
    return _ACTIONS[options.action](options)


def _add(options: argparse.Namespace) -> int:
    given = {field: getattr(options, field) for field in ("manage", *_READERS)}
    fields = {field: value for field, value in given.items() if value is not None}
    key = add_key(options.file, options.name, fields)
    print(key)
    print("trioserve: this is the only time that the key is shown", file=sys.stderr)
    return 0


def _list(options: argparse.Namespace) -> int:
    rows = [_row(key) for key in read_keys(options.file)]
    print(table([_HEAD, *rows], right=range(3, len(_HEAD))), end="")
    return 0


_HEAD = ("NAME", "MANAGES", "MODELS", "REQUESTS/MIN", "TOKENS/MIN", "TOKENS/DAY", "PRIORITY",
         "WEIGHT")  # fmt: skip


def _row(key: Key) -> tuple[str, ...]:
    return (
        key.name,
        "yes" if key.may_manage else "no",
        "all" if key.models is None else ",".join(key.models) or "none",
        "default" if key.requests is None else _limit(key.requests),
        "default" if key.tokens is None else _limit(key.tokens),
        _limit(key.daily_tokens),
        str(key.priority),
        f"{key.weight:g}",
    )


def _limit(number: int) -> str:
    return str(number) if number else "no limit"


def _remove(options: argparse.Namespace) -> int:
    remove_key(options.file, options.name)
    return 0


_ACTIONS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "add": _add,
    "list": _list,
    "remove": _remove,
}
