"""The texts of ``--help``, ``help TOPIC``, ``--version`` and of similar flags."""

from __future__ import annotations

import platform
import re
import shutil
import textwrap
from importlib.metadata import version

from trioserve._version import __version__
from trioserve.cli.commands import ALIASES, COMMANDS, SERVE
from trioserve.cli.options import Command, Option
from trioserve.cli.output import BOLD, styled
from trioserve.config.flags import BY_FIELD, BY_NAME, FLAGS, GROUPS, Flag
from trioserve.config.parse import CONFIG_FLAG, CONFIG_VARIABLE
from trioserve.config.unsupported import did_you_mean
from trioserve.errors import ConfigError

_COLUMN = 30

_HEAD = """\
usage: trioserve [command] [flags]

An LLM server: it serves a GGUF model over HTTP with the APIs of OpenAI, Anthropic and llama-server.
Without -m, it serves all models that it finds, and a small bundled one.
"""

_FLAGS_HEAD = """\

Flags have the names that they have in llama-server.
An environment variable in parentheses does the same as its flag; if both are set, the flag wins.
"""

_COMMANDS_HEAD = "\nCommands (trioserve COMMAND --help tells more)\n"

#: The flags of the first page.
_COMMON = (
    "--model", "--hf-repo", "--ctx-size", "--parallel", "--gpu-layers", "--mmproj", "--tts",
    "--embeddings", "--tools", "--models-dir", "--host", "--port", "--api-key", "--log-level",
)  # fmt: skip

_TAIL = f"""
  {CONFIG_FLAG} FILE               read a TOML file; its keys are the long flags without the dashes,
                              and variables and flags win ({CONFIG_VARIABLE})
  -h, --help                  print the commands and the most common flags, and exit
  --help-all                  print all flags, and exit; trioserve help GROUP prints those of one
  --version                   print the versions and exit
  --list-devices              list the devices that models can run on, and exit
  -cl, --cache-list           list the models in the cache, and exit
  --completion-bash           the same as trioserve completions bash
"""


def first_page() -> str:
    """The commands, the most common flags, and where the others are."""
    groups = folded("  " + ", ".join(GROUPS), 2)
    return (
        f"{_commands()}\nCommon flags\n{''.join(map(_short, _COMMON))}\n"
        "trioserve --help-all prints all flags, and trioserve help GROUP those of a group:\n"
        f"{groups}\n"
    )


def help_text() -> str:
    """Every flag, in groups."""
    return "".join([_commands(), _FLAGS_HEAD, *map(_group, GROUPS), _TAIL])


def about(topic: str) -> str:
    """The help of a command, of a group of flags, or of a flag.

    Raises:
        ConfigError: there is nothing of this name.
    """
    name, _, action = topic.partition(" ")
    name = ALIASES.get(name, name)
    if name == SERVE:
        return first_page()
    if name in COMMANDS and (not action or action in COMMANDS[name].actions):
        return help_of(f"{name} {action}".rstrip())
    if (flag := BY_NAME.get(topic)) is not None:
        return _entry(flag) + "\n"
    groups = {group.casefold(): group for group in GROUPS}
    if (group := groups.get(topic.casefold())) is not None:
        return _group(group).lstrip()
    hint = did_you_mean(topic, COMMANDS, groups, BY_NAME)
    raise ConfigError(f"there is no command, group of flags or flag {topic!r}{hint}")


def _width() -> int:
    return min(shutil.get_terminal_size((100, 24)).columns, 100)


def _commands() -> str:
    lines = [columns(f"  {name}", one.help) + "\n" for name, one in COMMANDS.items()]
    return "".join([_HEAD, _COMMANDS_HEAD, *lines])


def _group(group: str) -> str:
    entries = (f"{_entry(one)}\n" for one in FLAGS if one.group == group)
    return f"\n{group}\n{''.join(entries)}"


def value_name(flag: Flag) -> str:
    """The placeholder of the value in a usage line, such as ``N``; empty for a switch."""
    if flag.read is None:
        return ""
    if flag.choices is not None:
        return "{" + ",".join(flag.choices) + "}"
    return "N" if isinstance(flag.default, int | float) else "TEXT"


def default_text(flag: Flag) -> str:
    """The default as a user would type it; or an empty text."""
    value = flag.default
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int | float):
        return f"{value:g}" if abs(value) < 1e6 else str(value)
    return value if isinstance(value, str) else ""


def _short(name: str) -> str:
    """A common flag, with the beginning of its help."""
    flag = BY_NAME[name]
    names = ", ".join(dict.fromkeys((flag.names[0], flag.names[-1])))
    value = value_name(flag) if flag.choices is None else "TEXT"
    text = re.split("[;:]", flag.help)[0]
    return columns(f"  {names} {value}".rstrip(), text) + "\n"


def _entry(flag: Flag) -> str:
    names = ", ".join(flag.names)
    if flag.negative:
        names += ", " + flag.negative[-1]
    left = f"  {names} {value_name(flag)}".rstrip()
    notes = []
    if BY_FIELD[flag.field] is flag and (default := default_text(flag)):
        notes.append(f"default {default}")
    if flag.variable:
        notes.append(flag.variable)
    text = flag.help + (f" ({'; '.join(notes)})" if notes else "")
    return columns(left, text)


def folded(text: str, indent: int) -> str:
    """Fold a text to the width of the terminal; lines after the first are indented."""
    return textwrap.fill(text, _width(), subsequent_indent=" " * indent, break_on_hyphens=False)


def columns(left: str, text: str) -> str:
    """Put a description beside a flag, or below it if the flag is long."""
    lines = textwrap.wrap(text, max(_width() - _COLUMN, 20), break_long_words=False)
    if len(left) + 2 <= _COLUMN:
        left = left.ljust(_COLUMN) + lines.pop(0)
    return ("\n" + " " * _COLUMN).join([left, *lines])


def help_of(name: str) -> str:
    """The help of a command, or of an action such as ``keys add``."""
    first, _, action = name.partition(" ")
    command = COMMANDS[first].actions[action] if action else COMMANDS[first]
    usages = [f"{action} {one.usage}" for action, one in command.actions.items()]
    lines = [folded(f"trioserve {name} {one}".rstrip(), 9) for one in usages or [command.usage]]
    head = styled("usage: " + "\n       ".join(lines), BOLD)
    text = f"{head}\n\n{_sentence(command)}{command.details}"
    for word, one in command.actions.items():
        text += f"\n{styled(word, BOLD)}: {_sentence(one)}{one.details}{_options(one)}"
    return text + _options(command, "\n")


def _sentence(command: Command) -> str:
    return f"{command.help[0].upper()}{command.help[1:]}.\n"


def _options(command: Command, before: str = "") -> str:
    lines = [columns(f"  {spec_of(one)}", one.help) + "\n" for one in command.options]
    return before + "".join(lines) if lines else ""


def spec_of(option: Option) -> str:
    """The names of an option and of its value, as help has them."""
    return f"{', '.join(option.names)} {option.value}".rstrip()


def version_text() -> str:
    """The versions that matter for bug reports. Loads no model.

    Raises:
        BackendMismatchError: llama.cpp cannot be used.
    """
    from trioserve.llama import devices, library

    library.check_library()
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
    from trioserve.llama import devices

    return "".join(f"{one.name}: {one.description}\n" for one in devices.devices())
