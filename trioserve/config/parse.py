"""The command line, the environment and a file, read into a `Config`.

The rules are llama-server's, which is why this is not argparse: flags match whole, ``_`` in a long
flag counts as ``-``, and the word after a flag is its value even when it begins with ``-``.
Beyond those rules, ``--flag=value`` works too. A variable that is empty counts as not set.
"""

from __future__ import annotations

import difflib
import logging
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import attrs

from trioserve.config import Config, foreign as llama_flags
from trioserve.config.table import FALSE_WORDS, SETTINGS, TRUE_WORDS, WORDS, Setting
from trioserve.errors import ConfigError, InvalidRequestError
from trioserve.types import SamplingParams

_log = logging.getLogger("trioserve.config.parse")

#: Fields that say how the socket is opened, which is not ours to do in an app.
_FOR_THE_COMMAND = frozenset(
    {"host", "port", "reuse_port", "ssl_cert_file", "ssl_key_file", "keep_alive_timeout"}
)

#: Prefixes of the variables that are ours to read, and so ours to refuse.
_PREFIXES = ("LLAMA_ARG_", "TRIOSERVE_")


Action = Literal["serve", "help", "version", "list-devices", "completion-bash"]

#: Flags that ask for something else than to serve.
ACTIONS: Mapping[str, Action] = {
    "-h": "help",
    "--help": "help",
    "--usage": "help",
    "--version": "version",
    "--list-devices": "list-devices",
    "--completion-bash": "completion-bash",
}

#: The flag and the variable that name the file with settings.
CONFIG_FLAG = "--config"
CONFIG_VARIABLE = "TRIOSERVE_CONFIG"


@attrs.frozen(kw_only=True)
class Parsed:
    """What a command line asks for. `notes` are sentences that a person should see."""

    config: Config
    action: Action = "serve"
    notes: tuple[str, ...] = ()


def config_from(argv: Sequence[str], environ: Mapping[str, str]) -> Config:
    """Read flags (without the name of the program) and variables; flags win.

    Notes go to the log as warnings.

    Raises:
        ConfigError: a flag or variable is unknown, not there yet, or has a value that is wrong.
    """
    parsed = parse(argv, environ)
    for note in parsed.notes:
        _log.warning(note)
    return parsed.config


def from_environment(environ: Mapping[str, str]) -> Config:
    """Read the variables, and a file that they name, for a server that something else starts.

    Raises:
        ConfigError: as `config_from`.
    """
    config = config_from((), environ)
    for setting in SETTINGS:
        if setting.field in _FOR_THE_COMMAND and getattr(config, setting.field) != setting.default:
            name = setting.variable or setting.field
            _log.warning("%s has no effect here: it is for the program that opens the socket", name)
    return config


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Parsed:
    """Like `config_from`, with what else the command line says.

    Raises:
        ConfigError: as `config_from`.
    """
    notes: list[str] = []
    line = _CommandLine(notes)
    line.read(argv)
    path = line.file or environ.get(CONFIG_VARIABLE)
    from_file = _from_file(path, notes) if path else {}
    variables = _from_variables(environ, notes)
    config = _build({**from_file, **variables, **line.values})
    return Parsed(config=config, action=line.action, notes=tuple(notes))


# -- the command line


class _CommandLine:
    """What the words of a command line say, once `read` has seen them."""

    def __init__(self, notes: list[str]) -> None:
        self.values: dict[str, Any] = {}
        self.action: Action = "serve"
        self.file: str | None = None
        self._notes = notes
        self._seen: set[str] = set()
        self._words: list[str] = []

    def read(self, argv: Sequence[str]) -> None:
        """Read all words. Raises ConfigError."""
        self._words = list(reversed(argv))
        while self._words:
            flag, value = _split(self._words.pop())
            if flag in ACTIONS:
                self.action = ACTIONS[flag]
            elif flag == CONFIG_FLAG:
                self.file = self._value(flag, value)
            elif (setting := _by_flag().get(flag)) is not None:
                self._set(setting, flag, value)
            else:
                _foreign(flag, self._words, self._notes, has_value=value is not None)

    def _set(self, setting: Setting, flag: str, value: str | None) -> None:
        if flag in self._seen and not setting.adds:
            self._notes.append(f"{flag} is given more than once: the last one counts")
        self._seen.add(flag)
        if setting.read is not None:
            _put(self.values, setting, _read(setting, self._value(flag, value), flag))
        elif value is not None:
            raise ConfigError(f"{flag} takes no value")
        else:
            _put(self.values, setting, setting.off if flag in setting.negative else setting.on)

    def _value(self, flag: str, value: str | None) -> str:
        if value is not None:
            return value
        if not self._words:
            raise ConfigError(f"{flag} needs a value")
        return self._words.pop()


def _split(word: str) -> tuple[str, str | None]:
    if not word.startswith("-") or word == "-":
        raise ConfigError(f"{word!r} is not a flag; a model is named with -m")
    if not word.startswith("--"):
        return word, None
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-"), value if equals else None


def _foreign(flag: str, words: list[str], notes: list[str], *, has_value: bool) -> None:
    """Accept a flag that changes nothing, or refuse one; takes its value off `words`."""
    if flag in llama_flags.NO_EFFECT:
        notes.append(f"{flag} has no effect: {llama_flags.NO_EFFECT[flag]}")
        if flag in llama_flags.TAKES_VALUE and not has_value:
            if not words:
                raise ConfigError(f"{flag} needs a value")
            words.pop()
        return
    if flag in llama_flags.flags():
        raise ConfigError(f"{flag} is a flag of llama-server that {_missing(flag)}")
    near = _nearest(flag, [*_by_flag(), *ACTIONS, CONFIG_FLAG])
    near = near or _nearest(flag, llama_flags.flags())
    hint = f"; did you mean {near}?" if near else "; see trioserve --help"
    raise ConfigError(f"{flag} is not a flag of trioserve{hint}")


def _missing(flag: str) -> str:
    why = llama_flags.flags()[flag].why
    return "trioserve does not have yet" + (f": {why}" if why else "")


def _nearest(name: str, names: Collection[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, names, n=1)), None)


# -- the environment


def _from_variables(environ: Mapping[str, str], notes: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, text in environ.items():
        if (
            text == ""
            or name == CONFIG_VARIABLE
            or not (name.startswith(_PREFIXES) or name in _by_variable())
        ):
            continue
        setting = _by_variable().get(name)
        if setting is not None:
            _put(values, setting, _read_variable(setting, text, name))
        elif (plain := _without_no(name)) in _by_variable():
            values[_by_variable()[plain].field] = False
        else:
            _foreign_variable(name, text, notes)
    return values


def _without_no(name: str) -> str:
    """``LLAMA_ARG_NO_X``: that it is there switches X off, whatever its text is."""
    plain = name.replace("LLAMA_ARG_NO_", "LLAMA_ARG_", 1)
    setting = _by_variable().get(plain)
    return plain if setting is not None and setting.read is None else ""


def _foreign_variable(name: str, text: str, notes: list[str]) -> None:
    known = llama_flags.variables()
    plain = name.replace("LLAMA_ARG_NO_", "LLAMA_ARG_", 1)
    if name in known:
        flag, opposite = known[name]
        wanted = opposite if text in FALSE_WORDS else flag
    elif plain in known:
        wanted = known[plain][1]
    else:
        near = _nearest(name, _by_variable()) or _nearest(name, known)
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigError(f"{name} is not a variable of trioserve{hint}")
    if wanted is None:
        return  # it says no to what is not there
    if wanted not in llama_flags.NO_EFFECT:
        raise ConfigError(f"{name} is a variable of llama-server that {_missing(wanted)}")
    notes.append(f"{name} has no effect: {llama_flags.NO_EFFECT[wanted]}")


def _read_variable(setting: Setting, text: str, name: str) -> Any:
    if setting.read is not None:
        return _read(setting, text, name)
    if text in TRUE_WORDS:
        return setting.on
    if text in FALSE_WORDS:
        return setting.off
    raise ConfigError(f"{name} is {text!r}, and must be true or false")


# -- the file


def _from_file(path: str, notes: list[str]) -> dict[str, Any]:
    """Read settings from TOML: the long flags without dashes in front.

    Raises:
        ConfigError: the file cannot be read, or holds what cannot be used; it names the place.
    """
    text = _text_of(path)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    values: dict[str, Any] = {}
    for key, value in table.items():
        source = f"{path}{_line_of(key, text)}: {key}"
        flag = f"--{key.replace('_', '-')}"
        setting = _by_flag().get(flag)
        if setting is None:
            _foreign_key(source, flag, notes)
        elif flag in setting.negative:
            raise ConfigError(f"{source}: name the setting itself, which is true or false")
        elif setting.read is None:
            if not isinstance(value, bool):
                raise ConfigError(f"{source} is {value!r}, and must be true or false")
            _put(values, setting, setting.on if value else setting.off)
        else:
            for each in value if isinstance(value, list) and setting.adds else [value]:
                _put(values, setting, _read(setting, _as_text(each, source), source))
    return values


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{path} cannot be read: {reason}") from None


def _line_of(key: str, text: str) -> str:
    """Where a key is, for an error; empty when it is written in some other way."""
    name = rf"(\"{re.escape(key)}\"|'{re.escape(key)}'|{re.escape(key)})"
    found = re.search(rf"^\s*\[?\s*{name}\s*[=\].]", text, re.MULTILINE)
    return "" if found is None else f":{text.count(chr(10), 0, found.start(1)) + 1}"


def _as_text(value: Any, source: str) -> str:
    """A value as it would be on the command line."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        kind = "a table" if isinstance(value, dict) else repr(value)
        raise ConfigError(f"{source} is {kind}, and must be text or a number")
    return str(value)


def _foreign_key(source: str, flag: str, notes: list[str]) -> None:
    if flag in llama_flags.NO_EFFECT:
        notes.append(f"{source} has no effect: {llama_flags.NO_EFFECT[flag]}")
        return
    if flag in llama_flags.flags():
        raise ConfigError(f"{source} is a setting of llama-server that {_missing(flag)}")
    near = _nearest(flag, [one for one in _by_flag() if one.startswith("--")])
    hint = f"; did you mean {near[2:]}?" if near else ""
    raise ConfigError(f"{source} is not a setting of trioserve{hint}")


# -- values


def _read(setting: Setting, text: str, source: str) -> Any:
    assert setting.read is not None
    text = WORDS.get(setting.field, {}).get(text, text)
    try:
        value = setting.read(text)
        _validate(setting.field, value)
    except (ConfigError, InvalidRequestError) as error:
        raise ConfigError(f"{source}: {error.message.rstrip('.')}") from None
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
    return value


def _validate(field: str, value: Any) -> None:
    """Run the validator of the field, so that the error can name the flag."""
    name = field.removeprefix("sampling.")
    attribute = attrs.fields_dict(Config if name == field else SamplingParams)[name]
    if attribute.validator is not None:
        attribute.validator(None, attribute, value)


def _put(values: dict[str, Any], setting: Setting, value: Any) -> None:
    old = values.get(setting.field, ()) if setting.adds else ()
    values[setting.field] = (*old, *value) if setting.adds else value


def _build(values: Mapping[str, Any]) -> Config:
    own = {name: value for name, value in values.items() if "." not in name}
    sampling = {
        name.removeprefix("sampling."): value for name, value in values.items() if "." in name
    }
    return Config(**own, sampling=SamplingParams(**sampling))


@cache
def _by_flag() -> Mapping[str, Setting]:
    return {flag: one for one in SETTINGS for flag in (*one.flags, *one.negative)}


@cache
def _by_variable() -> Mapping[str, Setting]:
    return {one.variable: one for one in SETTINGS if one.variable is not None}
