"""The command line, read into a `Config` together with the environment and a file.

This is our own and not argparse, by decision, because the grammar of flags is llama-server's: flags
match whole, ``_`` in a long flag counts as ``-``, and the word after a flag is its value even when
it begins with ``-``. Beyond that grammar, ``--flag=value`` works too.
"""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import attrs

from trioserve.config import Config, readers, unsupported
from trioserve.config.flags import (
    BY_FIELD,
    BY_NAME,
    BY_VARIABLE,
    FLAGS,
    Flag,
    as_flags,
    switched_off_by,
    without_no,
)
from trioserve.config.readers import FALSE_WORDS
from trioserve.errors import ConfigError
from trioserve.types import SamplingParams

_log = logging.getLogger("trioserve.config.parse")

#: Fields that configure the socket, which an app does not open.
_FOR_THE_COMMAND = frozenset(
    {"host", "port", "reuse_port", "ssl_cert_file", "ssl_key_file", "keep_alive_timeout"}
)

#: Flags for actions other than serving.
ACTIONS: Mapping[str, str] = {
    "-h": "help",
    "--help": "help",
    "--usage": "help",
    "--help-all": "help-all",
    "--version": "version",
    "--list-devices": "list-devices",
    "--completion-bash": "completion-bash",
    "-cl": "cache-list",
    "--cache-list": "cache-list",
}

#: The flag and the variable for the configuration file.
CONFIG_FLAG = "--config"
CONFIG_VARIABLE = "TRIOSERVE_CONFIG"


#: The words of a command line for each field, by the longest name of its flag.
Options = Mapping[str, tuple[str, ...]]


@attrs.frozen(kw_only=True)
class Parsed:
    """The result of a command line. `notes` are sentences to show to the user.

    `options` come from the command line, and `below` from a file and the environment. Together they
    can make another command line. `file` is the path from `CONFIG_FLAG` or its variable. `sources`
    name the flag, the variable or the line of the file that has set each field.
    """

    config: Config
    action: str
    notes: tuple[str, ...]
    options: Options
    below: Options
    file: str | None
    sources: Mapping[str, str]


def from_environment(environ: Mapping[str, str]) -> Config:
    """Read the variables, and a file that they name, for an app served by another program.

    Notes go to the log as warnings.

    Raises:
        ConfigError: as `parse`.
    """
    parsed = parse((), environ)
    for note in parsed.notes:
        _log.warning(note)
    config = parsed.config
    why = "the program that serves the app opens the socket"
    for flag in FLAGS:
        if flag.field in _FOR_THE_COMMAND and getattr(config, flag.field) != flag.default:
            _log.warning("%s has no effect here: %s", flag.variable or flag.field, why)
    return config


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Parsed:
    """Read flags (without the name of the program), variables and a file; they win in this order.

    Raises:
        ConfigError: a flag or variable is unknown or unsupported, or its value is invalid.
    """
    notes: list[str] = []
    line = _CommandLine(notes)
    line.read(argv)
    path = line.file or environ.get(CONFIG_VARIABLE)
    others = {name: text for name, text in environ.items() if name != CONFIG_VARIABLE}
    file = _read_toml(path, notes) if path else _Settings()
    variables = _read_environment(others, notes)
    values = file.values | variables.values | line.found.values
    sources = file.sources | variables.sources | line.found.sources
    try:
        config = _build(values)
    except ConfigError as error:
        raise ConfigError(as_flags(error.message, sources)) from None
    if config.model_named is not None:
        notes += (
            f"--{name.replace('_', '-')} has no effect: {config.model_named} is the only model"
            for name in values
            if name.startswith("models_")
        )
    return Parsed(
        config=config,
        action=line.action,
        notes=tuple(notes),
        options=line.found.options,
        below=file.options | variables.options,
        file=path,
        sources=sources,
    )


def _build(values: Mapping[str, Any]) -> Config:
    own = {name: value for name, value in values.items() if "." not in name}
    sampling = {
        name.removeprefix("sampling."): value for name, value in values.items() if "." in name
    }
    return Config(**own, sampling=SamplingParams(**sampling))


@attrs.frozen
class _Settings:
    """Settings: field values, the same as words of a command line, and what has set each."""

    values: dict[str, Any] = attrs.field(factory=dict)
    options: dict[str, tuple[str, ...]] = attrs.field(factory=dict)
    sources: dict[str, str] = attrs.field(factory=dict)

    def put(self, flag: Flag, text: str, name: str) -> None:
        """Set a field. Raises ConfigError that begins with the name of the setting."""
        flag.put_text(self.values, text, name)
        self.sources[flag.field] = name
        before = self.options.get(flag.field, ()) if flag.adds else ()
        self.options[flag.field] = (*before, *flag.argv(text))


#: Fields with two values on a command line; elsewhere, a comma separates these.
_TWO_VALUES = frozenset({"control_vector_layer_range"})


def known_flags() -> tuple[str, ...]:
    """The names of all flags that there are."""
    return (*BY_NAME, *ACTIONS, CONFIG_FLAG)


def flag_of(word: str) -> Flag | None:
    """The flag that a word of a command line is, perhaps with its value."""
    return BY_NAME.get(_split(word)[0])


def n_values(word: str, following: Sequence[str]) -> int | None:
    """The number of words behind a flag that are its value; None: the flag is unknown."""
    name, value = _split(word)
    if (flag := BY_NAME.get(name)) is not None:
        n = 0 if flag.read is None else 1
        n += flag.field in _TWO_VALUES and "," not in "".join(following[:1])
    elif name in ACTIONS or name == CONFIG_FLAG:
        n = int(name == CONFIG_FLAG)
    elif (other := unsupported.flags().get(name)) is not None:
        n = 0 if other.negative else 1
    else:
        return None
    return n if value is None else 0


class _CommandLine:
    """The settings of a command line, after `read`."""

    def __init__(self, notes: list[str]) -> None:
        self.found = _Settings()
        self.action = "serve"
        self.file: str | None = None
        self._notes = notes
        self._seen: set[str] = set()
        self._words: list[str] = []

    def read(self, argv: Sequence[str]) -> None:
        self._words = list(reversed(argv))
        while self._words:
            name, value = _split(self._words.pop())
            if name in ACTIONS:
                self.action = ACTIONS[name]
            elif name == CONFIG_FLAG:
                self.file = self._value(name, value)
            elif (flag := BY_NAME.get(name)) is not None:
                self._put(flag, name, value)
            elif (other := unsupported.flags().get(name)) is not None:
                self._notes.append(unsupported.note(name, name, "flag"))
                if not other.negative:  # all switches that are accepted have an opposite
                    self._value(name, value)
            else:
                hint = unsupported.did_you_mean(name, known_flags(), unsupported.flags())
                raise ConfigError(
                    f"{name} is not a flag of trioserve{hint or '; see trioserve --help-all'}"
                )

    def _put(self, flag: Flag, name: str, value: str | None) -> None:
        if name in self._seen and not flag.adds:
            self._notes.append(f"{name} is given more than once: the last one counts")
        self._seen.add(name)
        if flag.read is not None:
            text = self._value(name, value)
            if flag.field in _TWO_VALUES and value is None and "," not in text:
                text = f"{text},{self._value(name, None)}"
        elif value is None:
            text = "false" if name in flag.negative else "true"
        else:
            raise ConfigError(f"{name} takes no value")
        self.found.put(flag, text, name)

    def _value(self, name: str, value: str | None) -> str:
        if value is not None:
            return value
        if not self._words:
            raise ConfigError(f"{name} needs a value")
        return self._words.pop()


def _split(word: str) -> tuple[str, str | None]:
    if not word.startswith("-") or word == "-":
        raise ConfigError(f"{word!r} is not a flag; name a model with -m")
    if not word.startswith("--"):
        return word, None
    name, equals, value = word.partition("=")
    return name.replace("_", "-"), value if equals else None


# -- the environment

#: Prefixes of trioserve's variables. Unknown variables with them are errors.
_OWN_PREFIXES = ("LLAMA_ARG_", "TRIOSERVE_")

#: Variables that Google's Vertex AI sets for a server, and their default values. trioserve's
#: variables take precedence.
_VERTEX = (
    ("--port", "AIP_HTTP_PORT", "8080"),
    ("--predict-route", "AIP_PREDICT_ROUTE", "/predict"),
    ("--health-route", "AIP_HEALTH_ROUTE", ""),
)


def _read_environment(environ: Mapping[str, str], notes: list[str]) -> _Settings:
    """Read the variables that set fields, and add to `notes`. Raises ConfigError."""
    found = _Settings()
    for flag_name, variable, default in _VERTEX if environ.get("AIP_MODE") == "PREDICTION" else ():
        if text := environ.get(variable) or default:
            is_route = flag_name.endswith("route")
            found.put(BY_NAME[flag_name], f"/{text.lstrip('/')}" if is_route else text, variable)
    for name, text in environ.items():
        flag = BY_VARIABLE.get(name)
        if text == "" or not (flag or name.startswith(_OWN_PREFIXES)):
            continue
        if flag is not None:
            found.put(flag, text, name)
        elif (switched_off := switched_off_by(name)) is not None:
            found.put(switched_off, "false", name)  # with any text
        else:
            _unsupported_variable(name, text, notes)
    return found


def _unsupported_variable(name: str, text: str, notes: list[str]) -> None:
    positive = without_no(name)
    found = unsupported.variables().get(positive)
    if found is None:
        hint = unsupported.did_you_mean(name, BY_VARIABLE, unsupported.variables())
        raise ConfigError(
            f"{name} is not a variable of trioserve{hint or '; see trioserve --help-all'}"
        )
    says_no = name != positive or text in FALSE_WORDS
    if meant := found.negative if says_no else found.names:  # disabling a missing feature is valid
        notes.append(unsupported.note(meant[0], name, "variable"))


# -- a file: its keys are the long flags without the dashes


def _read_toml(path: str, notes: list[str]) -> _Settings:
    """Read the file, and add to `notes`. Raises ConfigError, which names the place."""
    text, found = readers.file(path), _Settings()
    for key, value in readers.parse_toml(text, path).items():
        source = f"{path}{_line_of(key, text)}: {key}"
        name = f"--{key.replace('_', '-')}"
        if (flag := BY_NAME.get(name)) is not None:
            _put_key(found, flag, name, value, source)
        elif name in unsupported.flags():
            notes.append(unsupported.note(name, source, "flag"))
        else:
            keys = [known[2:] for known in BY_NAME if known.startswith("--")]
            hint = unsupported.did_you_mean(name[2:], keys)
            raise ConfigError(f"{source} is not a key of the configuration{hint}")
    return found


def _put_key(found: _Settings, flag: Flag, name: str, value: Any, source: str) -> None:
    if name in flag.negative:
        key = flag.names[-1].removeprefix("--")
        raise ConfigError(f"{source}: write {key} = true or {key} = false instead")
    for each in value if isinstance(value, list) and flag.adds else [value]:
        found.put(flag, _as_text(flag, each, source), source)


def _line_of(key: str, text: str) -> str:
    """The place of a key, for an error; empty if it is written differently."""
    name = rf"(\"{re.escape(key)}\"|'{re.escape(key)}'|{re.escape(key)})"
    found = re.search(rf"^\s*\[?\s*{name}\s*[=\].]", text, re.MULTILINE)
    return "" if found is None else f":{text.count(chr(10), 0, found.start(1)) + 1}"


def _as_text(flag: Flag, value: Any, source: str) -> str:
    if flag.read is None:
        if not isinstance(value, bool):
            raise ConfigError(f"{source} must be true or false, not {value!r}")
        return str(value).lower()
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        kind = "a table" if isinstance(value, dict) else repr(value)
        raise ConfigError(f"{source} must be text or a number, not {kind}")
    return str(value)


# -- a configuration as a command line, for a server in another process


def argv_of(config: Config) -> tuple[str, ...]:
    """Make the flags for this configuration, without those for defaults.

    Raises:
        ConfigError: no flag sets the value of a field.
    """
    default = Config()
    words: list[str] = []
    for field in BY_FIELD:
        value = attrgetter(field)(config)
        if value != attrgetter(field)(default):
            words += _argv_of_field(field, value)
    return tuple(words)


def _argv_of_field(field: str, value: Any) -> tuple[str, ...]:
    """Find the words that set a field to a value, by parsing candidates."""
    own = [flag for flag in FLAGS if flag.field == field and not flag.sets]
    for flag, texts in ((each, texts) for each in own for texts in _ways(each, value)):
        found = _Settings()
        with contextlib.suppress(ConfigError):
            for text in texts:
                found.put(flag, text, field)
            if found.values[field] == value and found.options[field]:
                return found.options[field]
    raise ConfigError(f"{field} is {value!r}, which no flag sets")


def _ways(flag: Flag, value: Any) -> Iterator[list[str]]:
    if flag.read is None:
        yield from (["true"], ["false"])
        return
    if not isinstance(value, tuple):
        yield [str(value)]
        return
    yield [",".join(map(str, value))]
    yield [_row(value)]
    yield [";".join(map(str, value))]
    if flag.adds:
        yield [_row((each,)) for each in value]
        yield [_escaped(each) for each in value]
        yield [_bias(each) for each in value]


def _row(values: tuple[Any, ...]) -> str:
    written = io.StringIO()
    csv.writer(written, lineterminator="").writerow(values)
    return written.getvalue()


def _escaped(value: Any) -> str:
    text = str(value).replace("\\", "\\\\")
    return text.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def _bias(value: Any) -> str:
    match value:
        case (int(token), float(bias)):
            return f"{token}{bias:+}"
        case _:
            return str(value)
