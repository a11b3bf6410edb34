"""The texts of ``--help``, ``--version``, ``--list-devices`` and ``--completion-bash``."""

from __future__ import annotations

import platform
import shutil
import textwrap
from importlib.metadata import version

from trioserve import llama
from trioserve._version import __version__
from trioserve.cli.commands import COMMANDS
from trioserve.config.flags import BY_NAME, FLAGS, GROUPS, Flag
from trioserve.config.parse import ACTIONS, CONFIG_FLAG, CONFIG_VARIABLE

_COLUMN = 30

_HEAD = """\
usage: trioserve [command] [flags]

An LLM server: it serves a GGUF model over HTTP with the APIs of OpenAI, Anthropic and llama-server.
Without -m, it serves all models that it finds, and a small bundled one.
Flags have the names that they have in llama-server.
An environment variable in parentheses does the same as its flag; if both are set, the flag wins.
"""

_COMMANDS_HEAD = "\nCommands (trioserve COMMAND --help tells more)\n"

_TAIL = f"""
  {CONFIG_FLAG} FILE               read a TOML file; its keys are the long flags without the dashes,
                              and variables and flags win ({CONFIG_VARIABLE})
  -h, --help                  print this help and exit
  --version                   print the versions and exit
  --list-devices              list the devices that models can run on, and exit
  -cl, --cache-list           list the models in the cache, and exit
  --completion-bash           print a script for bash that completes flags, and exit
"""

_COMPLETION = """\
complete -o default -W '{words}' trioserve
"""


def help_text(width: int | None = None) -> str:
    """Every flag, in groups, folded to `width` columns (those of the terminal, at most 100)."""
    width = width or min(shutil.get_terminal_size((100, 24)).columns, 100)
    parts = [_HEAD, _COMMANDS_HEAD]
    parts += [_columns(f"  {name}", one.help, width) + "\n" for name, one in COMMANDS.items()]
    for group in GROUPS:
        lines = [_entry(one, width) for one in FLAGS if one.group == group]
        parts.append(f"\n{group}\n" + "\n".join(lines) + "\n")
    return "".join(parts) + _TAIL


def value_name(flag: Flag) -> str:
    """The placeholder of the value in a usage line, such as ``N``; empty for a switch."""
    if flag.read is None:
        return ""
    if flag.choices is not None:
        return "{" + ",".join(flag.choices) + "}"
    return "N" if isinstance(flag.default, int | float) else "TEXT"


def default_text(flag: Flag) -> str:
    """The default as a user would type it; empty if there is none."""
    value = flag.default
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int | float):
        return f"{value:g}" if abs(value) < 1e6 else str(value)
    return value if isinstance(value, str) else ""


def _entry(flag: Flag, width: int) -> str:
    names = ", ".join(flag.names)
    if flag.negative:
        names += ", " + flag.negative[-1]
    left = f"  {names} {value_name(flag)}".rstrip()
    notes = []
    if _OWN_FLAG[flag.field] is flag and (default := default_text(flag)):
        notes.append(f"default {default}")
    if flag.variable:
        notes.append(flag.variable)
    text = flag.help + (f" ({'; '.join(notes)})" if notes else "")
    return _columns(left, text, width)


def _columns(left: str, text: str, width: int) -> str:
    """Put a description beside a flag, or below it if the flag is long."""
    lines = textwrap.wrap(text, max(width - _COLUMN, 20), break_long_words=False)
    if len(left) + 2 <= _COLUMN:
        lines[0] = left.ljust(_COLUMN) + lines[0]
        return ("\n" + " " * _COLUMN).join(lines)
    return ("\n" + " " * _COLUMN).join([left, *lines])


#: The first flag of each field. Only this one shows the default.
_OWN_FLAG = {flag.field: flag for flag in reversed(FLAGS)}


def version_text() -> str:
    """The versions that matter for bug reports. Loads no model.

    Raises:
        BackendMismatchError: llama.cpp cannot be used.
    """
    llama.check_library()
    from trioserve.llama import devices

    return (
        f"trioserve {__version__}\n"
        f"llama-cpp-python {version('llama-cpp-python')}\n"
        f"{devices.versions()}\n"
        f"{devices.system()}\n"
        f"Python {platform.python_version()} on {platform.machine()} {platform.system()}\n"
    )


def devices_text() -> str:
    """The devices of llama.cpp, one on each line, as names for ``--device``.

    Raises:
        BackendMismatchError: llama.cpp cannot be used.
    """
    llama.check_library()
    from trioserve.llama import devices

    return "".join(f"{one.name}: {one.description}\n" for one in devices.devices())


def completion_text() -> str:
    """A line for bash that completes commands, flags and file names."""
    return _COMPLETION.format(words=" ".join([*COMMANDS, *BY_NAME, CONFIG_FLAG, *ACTIONS]))
