"""`Command` and `Option`: the tables that arguments, help, completions and manual pages come from.

The words of a command may stand in any order: its own options, flags of the server, and the rest.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from trioserve.cli.output import note
from trioserve.config import Config, logs
from trioserve.config.flags import BY_NAME
from trioserve.config.parse import Parsed, known_flags, n_values, parse
from trioserve.config.unsupported import did_you_mean
from trioserve.errors import ConfigError
from trioserve.whole_numbers import whole_number

_MAX = 10_000_000

#: A flag, unlike a prompt such as "- one" or "-5 degrees".
_FLAG = re.compile(r"--?[A-Za-z][^\s=]*(=.*)?", re.DOTALL)


@attrs.frozen
class Option:
    """An option of a command.

    Attributes:
        spec: its names and, unless it is a switch, that of its value: ``-o --output FILE``.
        help: what it does.
        read: makes a value of its name and its text. Raises ConfigError.
        default: the value without it.
    """

    spec: str
    help: str
    read: Callable[[str, str], Any] = attrs.field(default=lambda _name, text: text, repr=False)
    default: Any = None

    @property
    def names(self) -> tuple[str, ...]:
        """All names; the longest is the last."""
        return tuple(word for word in self.spec.split() if word.startswith("-"))

    @property
    def value(self) -> str:
        """The name of the value in help; empty for a switch."""
        last = self.spec.split()[-1]
        return "" if last.startswith("-") else last

    @property
    def field(self) -> str:
        return self.names[-1].lstrip("-").replace("-", "_")


def _check(name: str, text: str, choices: Sequence[str]) -> None:
    if choices and text not in choices:
        hint = did_you_mean(text, choices)
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {text!r}{hint}")


def choices_of(placeholder: str) -> tuple[str, ...]:
    """The choices of a placeholder such as ``{md,csv}``."""
    return tuple(placeholder[1:-1].split(",")) if placeholder.startswith("{") else ()


def numbers(least: int, name: str, text: str) -> tuple[int, ...]:
    """Read whole numbers with commas between them.

    Raises:
        ConfigError: one is not a whole number, or is out of range.
    """
    given = [whole_number(part) for part in text.split(",")]
    read = tuple(one for one in dict.fromkeys(given) if one is not None)
    if None in given:
        raise ConfigError(f"{name} takes whole numbers with commas between them, not {text!r}")
    if not all(least <= one <= _MAX for one in read):
        raise ConfigError(f"{name} must be between {least} and {_MAX}, not {text}")
    return read


def number(least: int, name: str, text: str) -> int:
    """Read a whole number. Raises ConfigError if it is invalid or out of range."""
    if whole_number(text) is None:
        raise ConfigError(f"{name} takes one whole number, not {text!r}")
    return numbers(least, name, text)[0]


def writable(name: str, text: str) -> Path:
    """Read the path of a file that is written later. Raises ConfigError: it cannot be."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{name}: {text} cannot be written")
    return path


def as_path(_name: str, text: str) -> Path:
    """Read a path."""
    return Path(text)


from_0, from_1 = partial(number, 0), partial(number, 1)


@attrs.frozen
class Command:
    """A command, or an action of one.

    Attributes:
        words: what it takes beside options, such as ``[MODEL] [PROMPT ...]``.
        help: a line about it.
        details: more lines.
        options: its own.
        function: MODULE.FUNCTION; by default ``run`` in the module of its name.
        takes_flags: whether it takes the flags of a server, too.
        actions: its first word is one of these.
        passes_on: what stands behind ``--`` is for another program.
    """

    words: str
    help: str
    details: str = ""
    options: tuple[Option, ...] = ()
    function: str = ""
    takes_flags: bool = True
    actions: Mapping[str, Command] = attrs.field(factory=dict)
    passes_on: bool = False

    @property
    def usage(self) -> str:
        own = [f"[{one.names[0]} {one.value}]".replace(" ]", "]") for one in self.options]
        flags = ["[flags]"] if self.takes_flags else []
        return " ".join(filter(None, [self.words, *own, *flags]))

    @property
    def n_words(self) -> tuple[int, float]:
        least = sum(not one.startswith("[") for one in self.placeholders)
        return least, math.inf if "..." in self.words else len(self.placeholders)

    @property
    def placeholders(self) -> list[str]:
        """The names of its words; those in brackets may be left out."""
        return [one for one in re.findall(r"\[[^]]*\]|\S+", self.words) if one != "..."]

    def named(self) -> Mapping[str, Option]:
        return {name: one for one in self.options for name in one.names}


@attrs.frozen
class Arguments:
    """The arguments of a command: ``given["url"]`` is that of an option, None if it has none.

    Attributes:
        words: the positional arguments.
        flags: of the server, with their values.
        after: what stands behind ``--``, for another program.
        environ: the environment variables.
    """

    words: tuple[str, ...]
    flags: tuple[str, ...]
    after: tuple[str, ...]
    environ: Mapping[str, str] = attrs.field(repr=False)
    options: Mapping[str, Any]

    def __getitem__(self, field: str) -> Any:
        return self.options[field]

    @property
    def first(self) -> str | None:
        return self.words[0] if self.words else None

    def parsed(self) -> Parsed:
        """Read the flags; see `parse_flags`."""
        return parse_flags(self.flags, self.environ)


def parse_flags(flags: Sequence[str], environ: Mapping[str, str]) -> Parsed:
    """Read flags of a server, print notes about them, and `hush` the log. Raises as `parse`."""
    parsed = parse(flags, environ)
    hush(parsed.config)
    for text in parsed.notes:
        note(text)
    return parsed


def hush(config: Config | None = None, level: str = "off") -> None:
    """Log from this level only, unless the flags set another: commands print their output."""
    config = config or Config()
    level = level if config.log_level == Config().log_level else config.log_level
    logs.configure(attrs.evolve(config, log_level=level, log_file=None))


def arguments(
    name: str, command: Command, argv: Sequence[str], environ: Mapping[str, str]
) -> Arguments:
    """Read the arguments of a command.

    Raises:
        ConfigError: there is no such option, a value is invalid, or a word is missing or too many.
    """
    own, left = command.named(), [*reversed(argv)]
    words, flags, after = list[str](), list[str](), tuple[str, ...]()
    options = {one.field: one.default if one.value else False for one in command.options}
    while left:
        word = left.pop()
        if word == "--":
            after, left = tuple(reversed(left)), []
        elif not _FLAG.fullmatch(word):
            words.append(word)
        elif (option := _own(own, word, left)) is not None:
            options[option.field] = _taken(option, word, left)
        elif command.takes_flags and (n := n_values(word, left[-1:])) is not None:
            flags += [word, *(left.pop() for _ in range(min(n, len(left))))]
        else:
            flag = word.partition("=")[0]
            known = known_flags() if command.takes_flags else ()
            hint = did_you_mean(flag, own, known) or f"; see trioserve {name} --help"
            raise ConfigError(f"{flag} is not a flag of trioserve {name}{hint}")
    if not command.passes_on:
        words += after
    least, most = command.n_words
    if not least <= len(words) <= most:
        wrong = f"needs {command.words}" if len(words) < least else f"does not take {words[-1]!r}"
        usage = f"usage: trioserve {name} {command.usage}"
        more = f"see trioserve {name} --help" if "{" in command.words else usage
        raise ConfigError(f"{name} {wrong}; {more}")
    for placeholder, word in zip(command.placeholders, words, strict=False):
        _check(f"the word after {name}", word, choices_of(placeholder))
    return Arguments(tuple(words), tuple(flags), after, environ, options)


def _taken(option: Option, word: str, left: list[str]) -> Any:
    """Take the value of an option, from its word or the next one."""
    flag, equals, text = word.partition("=")
    if not option.value:
        if equals:
            raise ConfigError(f"{flag} takes no value")
        return True
    if not equals:
        if not left:
            raise ConfigError(f"{flag} needs a value")
        text = left.pop()
    _check(flag, text, choices_of(option.value))
    return option.read(flag, text)


def _own(own: Mapping[str, Option], word: str, left: Sequence[str]) -> Option | None:
    """The command's own option, unless it is a switch here and the server's flag has a value."""
    flag = word.partition("=")[0]
    option = own.get(flag) or own.get(flag.replace("_", "-"))
    if option is None or option.value or (theirs := BY_NAME.get(flag)) is None:
        return option
    follows = left[-1] if left else ""
    return None if "=" in word or follows in (theirs.choices or ()) else option
