"""A TOML file, read into values of fields. Its keys are the long flags without the dashes."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from trioserve.config import foreign, readers
from trioserve.config.table import BY_NAME, Flag
from trioserve.errors import ConfigError


def read(path: str, notes: list[str]) -> dict[str, Any]:
    """Read the file, and add to `notes` what a person should know.

    Raises:
        ConfigError: the file cannot be read, or holds what cannot be used; it names the place.
    """
    try:
        text = readers.file(path)
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    values: dict[str, Any] = {}
    for key, value in table.items():
        source = f"{path}{_line_of(key, text)}: {key}"
        name = f"--{key.replace('_', '-')}"
        if (flag := BY_NAME.get(name)) is not None:
            _put(flag, name, values, value, source)
        elif name in foreign.flags():
            notes.append(foreign.note(name, source, "flag"))
        else:
            keys = [known[2:] for known in BY_NAME if known.startswith("--")]
            hint = foreign.did_you_mean(name[2:], keys)
            raise ConfigError(f"{source} is not a key of the configuration{hint}")
    return values


def _put(flag: Flag, name: str, values: dict[str, Any], value: Any, source: str) -> None:
    if name in flag.negative:
        key = flag.names[-1].removeprefix("--")
        raise ConfigError(f"{source}: write {key} = true or {key} = false instead")
    if flag.read is not None:
        for each in value if isinstance(value, list) and flag.adds else [value]:
            flag.put_text(values, _as_text(each, source), source)
    elif isinstance(value, bool):
        flag.put(values, flag.on if value else flag.off)
    else:
        raise ConfigError(f"{source} must be true or false, not {value!r}")


def _line_of(key: str, text: str) -> str:
    """Where a key is, for an error; empty when it is written in some other way."""
    name = rf"(\"{re.escape(key)}\"|'{re.escape(key)}'|{re.escape(key)})"
    found = re.search(rf"^\s*\[?\s*{name}\s*[=\].]", text, re.MULTILINE)
    return "" if found is None else f":{text.count(chr(10), 0, found.start(1)) + 1}"


def _as_text(value: Any, source: str) -> str:
    """A value as it would be on the command line."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        kind = "a table" if isinstance(value, dict) else repr(value)
        raise ConfigError(f"{source} must be text or a number, not {kind}")
    return str(value)
