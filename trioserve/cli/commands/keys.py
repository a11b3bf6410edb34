"""``trioserve keys``: the API keys in the file of ``--api-keys``."""

from __future__ import annotations

import attrs

from trioserve.cli.commands import KEY_OPTIONS
from trioserve.cli.options import Arguments
from trioserve.cli.output import Column, note, print_list
from trioserve.config.keys import add_key, read_keys, remove_key
from trioserve.errors import ConfigError

#: The variable of ``--api-keys``.
_VARIABLE = "TRIOSERVE_API_KEYS"


def _limit(number: int) -> str:
    return str(number) if number else "no limit"


_COLUMNS = (
    Column("name"),
    Column("may_manage", lambda may: "yes" if may else "no", heading="MANAGES"),
    Column("models", lambda names: ",".join(names) or "none", missing="all"),
    Column("requests", _limit, right=True, heading="REQUESTS/MIN", missing="default"),
    Column("tokens", _limit, right=True, heading="TOKENS/MIN", missing="default"),
    Column("daily_tokens", _limit, right=True, heading="TOKENS/DAY"),
    Column("priority", right=True),
    Column("weight", "{:g}".format, right=True),
)


def _file(given: Arguments) -> str:
    file: str | None = given["file"] or given.environ.get(_VARIABLE)
    if file is None:
        raise ConfigError(f"keys: name the file with --file or {_VARIABLE}")
    return file


def add(given: Arguments) -> int:
    """Add a key, and print it. Raises ConfigError, as the others here."""
    values = ((one.field.replace("_", "-"), given[one.field]) for one in KEY_OPTIONS)
    fields = {name: value for name, value in values if value is not None and value is not False}
    key = add_key(_file(given), given.words[0], fields)
    print(key)
    note("this is the only time that the key is shown")
    return 0


def list_(given: Arguments) -> int:
    """List the keys."""
    shown = attrs.filters.exclude("digest")
    rows = [attrs.asdict(key, filter=shown) for key in read_keys(_file(given))]
    print_list(_COLUMNS, rows, as_json=given["json"])
    return 0


def remove(given: Arguments) -> int:
    """Remove a key."""
    remove_key(_file(given), given.words[0])
    return 0
