"""The command line and the environment, read into a `Config`.

The rules are llama-server's, which is why this is not argparse: flags match whole, ``_`` in a long
flag counts as ``-``, and the word after a flag is its value even when it begins with ``-``.
Beyond those rules, ``--flag=value`` works too. A variable that is empty counts as not set.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import attrs

from trioserve import llama_flags
from trioserve.config import Config
from trioserve.errors import ConfigError, InvalidRequestError
from trioserve.settings import FALSE_WORDS, SETTINGS, TRUE_WORDS, WORDS, Setting
from trioserve.types import SamplingParams

_log = logging.getLogger("trioserve.options")

#: Prefixes of the variables that are ours to read, and so ours to refuse.
_PREFIXES = ("LLAMA_ARG_", "TRIOSERVE_")


@attrs.frozen(kw_only=True)
class Parsed:
    """What a command line asks for. `notes` are sentences that a person should see."""

    config: Config
    action: Literal["serve", "help", "version"] = "serve"
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
    """Read the variables only, for a server that something else starts.

    Raises:
        ConfigError: as `config_from`.
    """
    for name in ("LLAMA_ARG_HOST", "LLAMA_ARG_PORT", "TRIOSERVE_KEEP_ALIVE_TIMEOUT"):
        if environ.get(name):
            _log.warning("%s has no effect here: it is for the program that opens the socket", name)
    return config_from((), environ)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Parsed:
    """Like `config_from`, with what else the command line says.

    Raises:
        ConfigError: as `config_from`.
    """
    action: Literal["serve", "help", "version"] = "serve"
    notes: list[str] = []
    values = _from_variables(environ, notes)
    given: dict[str, Any] = {}
    seen: set[str] = set()
    words = list(reversed(argv))
    while words:
        flag, value = _split(words.pop())
        if flag in ("-h", "--help", "--usage", "--version"):
            action = "version" if flag == "--version" else "help"
            continue
        setting = _by_flag().get(flag)
        if setting is None:
            _foreign(flag, words, notes, has_value=value is not None)
            continue
        if flag in seen and not setting.adds:
            notes.append(f"{flag} is given more than once: the last one counts")
        seen.add(flag)
        if setting.read is None:
            if value is not None:
                raise ConfigError(f"{flag} takes no value")
            _put(given, setting, setting.off if flag in setting.negative else setting.on)
            continue
        if value is None:
            if not words:
                raise ConfigError(f"{flag} needs a value")
            value = words.pop()
        _put(given, setting, _read(setting, value, flag))
    return Parsed(config=_build({**values, **given}), action=action, notes=tuple(notes))


# -- the command line


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
        raise ConfigError(f"{flag} is a flag of llama-server that trioserve does not have yet")
    near = _nearest(flag, _by_flag()) or _nearest(flag, llama_flags.flags())
    hint = f"; did you mean {near}?" if near else "; see trioserve --help"
    raise ConfigError(f"{flag} is not a flag of trioserve{hint}")


def _nearest(name: str, names: Collection[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, names, n=1)), None)


# -- the environment


def _from_variables(environ: Mapping[str, str], notes: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, text in environ.items():
        if text == "" or not (name.startswith(_PREFIXES) or name in _by_variable()):
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
        raise ConfigError(f"{name} is a variable of llama-server that trioserve does not have yet")
    notes.append(f"{name} has no effect: {llama_flags.NO_EFFECT[wanted]}")


def _read_variable(setting: Setting, text: str, name: str) -> Any:
    if setting.read is not None:
        return _read(setting, text, name)
    if text in TRUE_WORDS:
        return setting.on
    if text in FALSE_WORDS:
        return setting.off
    raise ConfigError(f"{name} is {text!r}, and must be true or false")


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
