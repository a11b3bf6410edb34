"""``trioserve config``: a file to begin with, where each value comes from, and a JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from trioserve.cli.options import Arguments
from trioserve.cli.output import Column, note, print_list
from trioserve.config import Config
from trioserve.config.flags import BY_FIELD, FLAGS, GROUPS, SECRETS, Flag
from trioserve.config.parse import parse
from trioserve.errors import ConfigError

_TYPES: Mapping[str, dict[str, Any]] = {
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "tuple[int, ...]": {"type": ["array", "integer", "string"], "items": {"type": "integer"}},
    "tuple[float, ...]": {"type": ["array", "number", "string"], "items": {"type": "number"}},
}
_TEXTS = {"type": ["array", "string", "number"], "items": {"type": ["string", "number"]}}


def init(given: Arguments) -> int:
    """Write a file with every setting in a comment. Raises ConfigError: it exists."""
    file = given.words[0]
    try:
        with Path(file).open("x", encoding="utf-8") as opened:
            opened.write(commented_file())
    except OSError as error:
        raise ConfigError(f"config init: {file}: {error.strerror}") from None
    print(f"Written: {file}. Start with: trioserve --config {file}")
    return 0


def show(given: Arguments) -> int:
    """List the settings and their sources. Raises ConfigError: one is invalid."""
    parsed = parse(given.flags, given.environ)
    for text in parsed.notes:
        note(text)
    rows = []
    for flag in BY_FIELD.values():
        if (source := parsed.sources.get(flag.field)) or given["all"]:
            value = "(hidden)" if flag.field in SECRETS and source else _value(parsed.config, flag)
            rows.append({"setting": _key(flag), "value": value, "from": source or "the default"})
    columns = [Column(name) for name in ("setting", "value", "from")]
    print_list(columns, rows, as_json=given["json"])
    return 0


def schema(_given: Arguments) -> int:
    """Print the JSON Schema."""
    print(json.dumps(file_schema(), indent=2))
    return 0


def _value(config: Config, flag: Flag) -> str:
    value = attrgetter(flag.field)(config)
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)


def file_schema() -> dict[str, Any]:
    """Make the JSON Schema of the configuration's file. Editors read it as ``#:schema``."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "The configuration of trioserve",
        "type": "object",
        "properties": {_key(flag): _property(flag) for flag in FLAGS},
        "additionalProperties": False,
    }


def _property(flag: Flag) -> dict[str, Any]:
    if flag.read is None:
        made: dict[str, Any] = {"type": "boolean"}
    elif flag.choices is not None and not flag.adds:
        made = {"enum": list(flag.choices)}
    elif flag.adds:
        made = dict(_TEXTS)
    else:
        made = dict(_TYPES.get(str(flag.attribute.type), {"type": ["string", "number"]}))
    made["description"] = flag.help
    if isinstance(flag.default, bool | int | float | str) and "enum" not in made:
        made["default"] = flag.default
    return made


def commented_file() -> str:
    """Make a TOML file with every setting in a comment, at its default."""
    lines = [
        "#:schema ./trioserve.schema.json",
        "# The configuration of trioserve. Remove the # of a line to change its setting.",
        "# Variables and flags override the file. For editors that check it, write the schema:",
        "# trioserve config schema > trioserve.schema.json",
    ]
    for group in GROUPS:
        lines += ["", f"# -- {group}", ""]
        for flag in (one for one in BY_FIELD.values() if one.group == group):
            lines += [f"# {flag.help}", f"#{_key(flag)} = {_toml(flag)}"]
    return "\n".join(lines) + "\n"


def _key(flag: Flag) -> str:
    return flag.names[-1].removeprefix("--")


def _toml(flag: Flag) -> str:
    default = flag.default
    if isinstance(default, tuple) and not flag.adds:
        return json.dumps(";".join(default))  # the samplers
    if isinstance(default, tuple):
        return json.dumps(list(default), ensure_ascii=False)
    return '""' if default is None else json.dumps(default, ensure_ascii=False)
