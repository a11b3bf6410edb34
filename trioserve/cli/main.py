"""The command ``trioserve``: parses the arguments, and runs the action.

If the first argument is not a flag, it is one of `trioserve.cli.commands`.

Exit codes: 0 after a signal and a drain, 1 when the server cannot start, 2 when a flag or variable
is invalid. A second signal ends the process at once.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

import attrs
import trio

from trioserve.children.reports import AT, BESIDE, ESTIMATE, MODEL, Estimated, Failed
from trioserve.cli import forking, help as texts
from trioserve.cli.commands import ALIASES, COMMANDS, ELSEWHERE, SERVE
from trioserve.cli.memory import limit_arenas
from trioserve.cli.model_process import LogSender, serve_parent
from trioserve.cli.options import arguments
from trioserve.cli.output import RED, complain, note, printable
from trioserve.cli.progress import Reporter, fetch, take_reporter
from trioserve.cli.secrets import hide_secrets, hide_variables
from trioserve.cli.serving import catalog_of, serve
from trioserve.config import logs
from trioserve.config.parse import parse
from trioserve.config.unsupported import did_you_mean
from trioserve.errors import ConfigError, TrioServeError
from trioserve.log import get_logger

_log = get_logger("trioserve")

#: Flags that print a text and exit.
_TEXTS: Mapping[str, Callable[[], str]] = {
    "help": texts.first_page,
    "help-all": texts.help_text,
    "version": texts.version_text,
    "list-devices": texts.devices_text,
}

#: Flags that are commands, as llama-server has them.
_COMMANDS = {"completion-bash": ["completions", "bash"], "cache-list": ["list"]}

#: Errors of a file that cannot take more.
_UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def _open_standard_files() -> None:
    """Open the null device for closed standard files: a socket would get their descriptors."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _tell_estimate(status: Reporter, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Report to a router the bytes that these flags would need, perhaps `BESIDE` other models."""
    from trioserve.llama.estimate import measure

    if status.parent is not None:
        status.parent.end_with_it()
    beside = [word for word in argv[:1] if word.startswith(BESIDE)]
    config = trio.run(fetch, status, parse(argv[len(beside) :], environ).config)
    found = None
    if beside:
        from trioserve.llama import room

        found = room.plan(config, more_ram=int(beside[0].removeprefix(BESIDE)))
    if found is None:
        status.tell(Estimated(measure(config).total))
    else:
        gpus, free = found.need.gpus, found.room.gpus
        status.tell(Estimated(found.wanted, gpus, free))
    return 0


def _written(show: Callable[[], int | None]) -> int:
    """Run what prints, and return its exit code; 1 if its output cannot be written."""
    try:
        code = show() or 0
        sys.stdout.flush()
    except BrokenPipeError:
        pass  # the reader of the pipe has all that it needs
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        note(f"the output cannot be written: {error.strerror}", RED)
    else:
        return code
    # Python writes the rest of the buffer at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


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
            print(texts.help_of(name), end="")
            return 0
        given = arguments(name, command, words, environ)
        module, _, attribute = function.partition(".")
        code: int = getattr(import_module(f"trioserve.cli.commands.{module}"), attribute)(given)
    except TrioServeError as error:
        complain(error)
        return 2 if isinstance(error, ConfigError) else 1
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; `argv` is without the name of the program. Returns the exit code."""
    _open_standard_files()
    limit_arenas()
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        hide_secrets()
        sys.stdout, sys.stderr = printable(sys.stdout), printable(sys.stderr)
    status = Reporter()
    zygote = None
    try:
        status = take_reporter(os.environ)
        if words[:1] == [ESTIMATE]:
            return _tell_estimate(status, words[1:], os.environ)
        is_watched = status.parent is not None  # by the trioserve that has started this process
        answers_calls = words[:1] == [MODEL] and is_watched
        where = ""
        if answers_calls:
            del words[0]
            if words and words[0].startswith(AT):
                where = words.pop(0).removeprefix(AT)
        if words[:1] == ["help"] and len(words) > 1:
            return _written(lambda: print(texts.about(" ".join(words[1:])), end=""))
        if words[:1] in (["help"], ["version"]):
            words[0] = f"--{words[0]}"
        if words and not words[0].startswith("-"):
            name, *words = words
            if command_of(name) != SERVE:
                return _written(partial(run, name, words, os.environ))
            given = arguments(name, COMMANDS[SERVE], words, os.environ)
            words = [*given.flags, *(("--model", *given.words) if given.words else ())]
        parsed = parse(words, os.environ)
        if (text := _TEXTS.get(parsed.action)) is not None:
            return _written(lambda: print(text(), end=""))
        if (command := _COMMANDS.get(parsed.action)) is not None:
            return _written(partial(run, command[0], command[1:], os.environ))
        config = parsed.config
        if config.model is not None and not (answers_calls or config.model.endswith(".gguf")):
            from trioserve.cli.named import with_files

            words = [*with_files(words, os.environ)]
            config = parse(words, os.environ).config
        if is_watched:
            config = attrs.evolve(config, log_format="json")  # a program reads it
        log = None if status.parent is None else LogSender(status.parent)
        logs.configure(config, take=log.take if log is not None and answers_calls else None)
        catalog = None
        if not answers_calls:
            catalog = catalog_of(config, words, os.environ, watched=is_watched)
        if catalog is not None and argv is None:
            named = (one.key_env for one in catalog.upstreams.values())
            hide_variables({os.fsencode(name) for name in named if name})
        if catalog is not None and not config.rpc:
            zygote = forking.fork(catalog.environment, main, status.parent)
    except TrioServeError as error:
        status.tell(Failed.of(complain(error)))
        return 2
    # A router has the notes of its models' flags, too.
    for each in dict.fromkeys(() if answers_calls else parsed.notes):
        _log.warning(each)
    if answers_calls and status.parent is not None and log is not None:
        return serve_parent(config, status, status.parent, log, where)
    return serve(config, status, catalog, zygote)
