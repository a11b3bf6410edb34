"""The command line, read into a `Config` together with the environment and a file.

This is our own and not argparse, by decision, because the grammar of flags is llama-server's: flags
match whole, ``_`` in a long flag counts as ``-``, and the word after a flag is its value even when
it begins with ``-``. Beyond that grammar, ``--flag=value`` works too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from trioserve.config import Config, environment, foreign, toml
from trioserve.config.table import BY_NAME, FLAGS, Flag
from trioserve.errors import ConfigError
from trioserve.types import SamplingParams

_log = logging.getLogger("trioserve.config.parse")

#: Fields that say how the socket is opened, which is not ours to do in an app.
_FOR_THE_COMMAND = frozenset(
    {"host", "port", "reuse_port", "ssl_cert_file", "ssl_key_file", "keep_alive_timeout"}
)

Action = Literal["serve", "help", "version", "list-devices", "completion-bash", "cache-list"]

#: Flags that ask for something else than to serve.
ACTIONS: Mapping[str, Action] = {
    "-h": "help",
    "--help": "help",
    "--usage": "help",
    "--version": "version",
    "--list-devices": "list-devices",
    "--completion-bash": "completion-bash",
    "-cl": "cache-list",
    "--cache-list": "cache-list",
}

#: The flag and the variable that name the configuration file.
CONFIG_FLAG = "--config"
CONFIG_VARIABLE = "TRIOSERVE_CONFIG"


@attrs.frozen(kw_only=True)
class Parsed:
    """What a command line asks for. `notes` are sentences that a person should see.

    `words` are those that set each field, with the longest name of the flag, and `file` is what
    `CONFIG_FLAG` or its variable names: with them, another command line can be made.
    """

    config: Config
    action: Action = "serve"
    notes: tuple[str, ...] = ()
    words: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    file: str | None = None


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
    why = "the program that serves the app opens the socket"
    for flag in FLAGS:
        if flag.field in _FOR_THE_COMMAND and getattr(config, flag.field) != flag.default:
            _log.warning("%s has no effect here: %s", flag.variable or flag.field, why)
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
    others = {name: text for name, text in environ.items() if name != CONFIG_VARIABLE}
    values = toml.read(path, notes) if path else {}
    values |= environment.read(others, notes)
    values |= line.values
    config = _build(values)
    if config.model_named is not None:
        notes += (
            f"--{name.replace('_', '-')} has no effect: {config.model_named} is the only model"
            for name in values
            if name.startswith("models_")
        )
    return Parsed(
        config=config, action=line.action, notes=tuple(notes), words=line.fields, file=path
    )


def _build(values: Mapping[str, Any]) -> Config:
    own = {name: value for name, value in values.items() if "." not in name}
    sampling = {
        name.removeprefix("sampling."): value for name, value in values.items() if "." in name
    }
    return Config(**own, sampling=SamplingParams(**sampling))


#: Fields that are two values on a command line; elsewhere, a comma is between them.
_TWO_VALUES = frozenset({"control_vector_layer_range"})


class _CommandLine:
    """What the words of a command line say, once `read` has seen them."""

    def __init__(self, notes: list[str]) -> None:
        self.values: dict[str, Any] = {}
        self.fields: dict[str, tuple[str, ...]] = {}
        self.action: Action = "serve"
        self.file: str | None = None
        self._notes = notes
        self._seen: set[str] = set()
        self._words: list[str] = []

    def read(self, argv: Sequence[str]) -> None:
        """Read all words. Raises ConfigError."""
        self._words = list(reversed(argv))
        while self._words:
            name, value = _split(self._words.pop())
            if name in ACTIONS:
                self.action = ACTIONS[name]
            elif name == CONFIG_FLAG:
                self.file = self._value(name, value)
            elif (flag := BY_NAME.get(name)) is not None:
                self._set(flag, name, value)
            elif name in foreign.flags():
                self._notes.append(foreign.note(name, name, "flag"))
                if name in foreign.TAKES_VALUE:
                    self._value(name, value)
            else:
                hint = foreign.did_you_mean(
                    name, [*BY_NAME, *ACTIONS, CONFIG_FLAG], foreign.flags()
                )
                raise ConfigError(
                    f"{name} is not a flag of trioserve{hint or '; see trioserve --help'}"
                )

    def _set(self, flag: Flag, name: str, value: str | None) -> None:
        if name in self._seen and not flag.adds:
            self._notes.append(f"{name} is given more than once: the last one counts")
        self._seen.add(name)
        if flag.read is not None:
            text = self._value(name, value)
            if flag.field in _TWO_VALUES and value is None and "," not in text:
                text = f"{text},{self._value(name, None)}"
            flag.put_text(self.values, text, name)
            words = flag.words(text)
        elif value is None:
            flag.put(self.values, flag.off if name in flag.negative else flag.on)
            words = (name,)
        else:
            raise ConfigError(f"{name} takes no value")
        self.fields[flag.field] = (*(self.fields.get(flag.field, ()) if flag.adds else ()), *words)

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
