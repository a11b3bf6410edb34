"""A file of presets: how models are to be run, in the INI form of llama-server.

Each section is a model, named as the section; ``[*]`` is for all of them. A comment begins with
``;`` or ``#``, on a line of its own or after a space.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from trioserve.config import readers
from trioserve.config.flags import FALSE_WORDS, TRUE_WORDS
from trioserve.errors import ConfigError
from trioserve.models.catalog.options import OF_THE_ROUTER, SECRETS, Options, option, without

_ALL = "*"
#: Where keys go that stand before the first section.
_UNNAMED = "default"
_VERSION = "version"


@attrs.frozen
class Preset:
    """A section. None: it does not say.

    Attributes:
        options: the flags that it sets.
        load_on_startup: load the model before anybody asks for it.
        stop_timeout: seconds that the model has to end.
        dedup: hide the model of the cache that has the same file.
    """

    options: Options = attrs.field(factory=dict)
    load_on_startup: bool | None = None
    stop_timeout: float | None = None
    dedup: bool | None = None

    def over(self, other: Preset) -> Preset:
        """Merge the two: what this one says wins."""
        own = attrs.asdict(self, recurse=False, filter=lambda _, value: value is not None)
        return attrs.evolve(other, **own | {"options": {**other.options, **self.options}})


def read(path: Path) -> tuple[Preset, Mapping[str, Preset]]:
    """Read a file; returns what it says for all models, and the other sections by name.

    Raises:
        ConfigError: it cannot be read or understood; the message says where.
    """
    try:
        text = readers.file(str(path)).removeprefix("\ufeff")
    except ValueError as error:
        raise ConfigError(f"models_preset: {error}") from None
    # The names of sections and keys stay as they are, a key that is there twice counts the last
    # time, and no section is special.
    parser = configparser.RawConfigParser(
        delimiters=("=",), inline_comment_prefixes=(";", "#"), strict=False, default_section=""
    )
    parser.optionxform = str  # type: ignore[method-assign, assignment]
    try:
        parser.read_string(f"[{_UNNAMED}]\n{text}")
    except configparser.ParsingError as error:
        line = error.errors[0][0] - 1 if error.errors else 0
        raise ConfigError(
            f"{path}:{line} is neither a section in brackets nor a key with a value"
        ) from None
    sections = {
        _canonical(name): _preset(parser.items(name), f"{path}: [{name}]")
        for name in parser.sections()
    }
    if sections[_UNNAMED] == Preset():
        del sections[_UNNAMED]
    return sections.pop(_ALL, Preset()), sections


def _canonical(name: str) -> str:
    """Write the quantization behind a repository as the cache does: ``Q4_K_M``."""
    repo, colon, tag = name.rpartition(":")
    if not colon or "/" not in repo:
        return name
    found = re.search(r"[-.]([A-Za-z0-9_]+)$", tag)
    return f"{repo}:{(found[1] if found else tag).upper()}"


def _preset(items: list[tuple[str, str]], where: str) -> Preset:
    options: dict[str, tuple[str, ...]] = {}
    others: dict[str, Any] = {}
    for key, text in items:
        source = f"{where} {key}"
        if key in _SETTINGS:
            name, reader = _SETTINGS[key]
            others[name] = reader(text, source)
        elif key != _VERSION and (found := option(key, text, source)) is not None:
            if found[0] in SECRETS:
                raise ConfigError(
                    f"{source}: clients can see it here; use {SECRETS[found[0]]} instead"
                )
            options |= [found]
    return Preset(without(options, OF_THE_ROUTER), **others)


def _switch(text: str, source: str) -> bool:
    if text not in TRUE_WORDS | FALSE_WORDS:
        raise ConfigError(f"{source} must be true or false, not {text!r}")
    return text in TRUE_WORDS


def _seconds(text: str, source: str) -> float:
    try:
        value = readers.number(text)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{source} must be a number of seconds, not {text}")
    return value


#: Keys that are no flags: the field of `Preset`, and what reads it.
_SETTINGS: Mapping[str, tuple[str, Any]] = {
    "load-on-startup": ("load_on_startup", _switch),
    "stop-timeout": ("stop_timeout", _seconds),
    "dedup-cache-models": ("dedup", _switch),
}
