"""`run`: finds the command that the first word names, reads its arguments, and runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from trioserve.cli.commands import ALIASES, COMMANDS, ELSEWHERE
from trioserve.cli.help import help_of
from trioserve.cli.options import arguments
from trioserve.cli.output import complain
from trioserve.config.unsupported import did_you_mean
from trioserve.errors import ConfigError, TrioServeError


def command_of(word: str) -> str:
    """Find the command that a word means.

    Raises:
        ConfigError: no command has this name; the message suggests another way.
    """
    if (name := ALIASES.get(word, word)) in COMMANDS:
        return name
    if (how := ELSEWHERE.get(word)) is not None:
        raise ConfigError(f"there is no command {word}: {how}")
    if Path(word).suffix == ".gguf" or Path(word).exists():
        raise ConfigError(f"{word!r} is not a command; name a model with -m")
    hint = did_you_mean(word, COMMANDS, ALIASES, ELSEWHERE) or "; see trioserve --help"
    raise ConfigError(f"{word!r} is not a command{hint}")


def run(word: str, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command other than `SERVE`, and return its exit code.

    It prints the error that ends a command: the code is 2 for a `ConfigError`, and 1 for others.
    """
    ours = argv[: argv.index("--")] if "--" in argv else argv
    asks = "--help" in ours or "-h" in ours
    try:
        name = command_of(word)
        command, words = COMMANDS[name], [*argv]
        function = command.function or f"{name}.run"
        if command.actions and not (asks and argv[0] in ("--help", "-h")):
            action = words.pop(0) if words else ""
            if action not in command.actions:
                hint = did_you_mean(action, command.actions)
                wanted = ", ".join(command.actions)
                wrong = f"has no action {action!r}{hint}" if action else "needs an action"
                raise ConfigError(f"{name} {wrong}; its actions are {wanted}")
            command = command.actions[action]
            name, function = f"{name} {action}", command.function or f"{name}.{action}"
        if asks:
            print(help_of(name), end="")
            return 0
        given = arguments(name, command, words, environ)
        module, _, attribute = function.partition(".")
        code: int = getattr(import_module(f"trioserve.cli.commands.{module}"), attribute)(given)
    except TrioServeError as error:
        complain(error)
        return 2 if isinstance(error, ConfigError) else 1
    return code
