"""The manual pages, from the tables of commands and flags; `docs/tables.py` writes them."""

from __future__ import annotations

from collections.abc import Iterator

from trioserve.cli.commands import COMMANDS, SERVE
from trioserve.cli.help import default_text, spec_of, value_name
from trioserve.cli.options import Command
from trioserve.config.flags import BY_FIELD, FLAGS, GROUPS, Flag

_ABOUT = """\
trioserve serves GGUF models over HTTP with the APIs of OpenAI, Anthropic, Ollama and llama-server.
Without a command, it is \\fBtrioserve serve\\fR. Without a model, it serves all that it finds, and
a small bundled one."""

_END = r""".SH ENVIRONMENT
.TP
.B NO_COLOR
print no colors
.TP
.B FORCE_COLOR
print colors, also into a file or a pipe
.TP
.B TRIOSERVE_CONFIG
the configuration, as by \-\-config
.PP
Variables of flags are named with them.
.SH FILES
.TP
.I ~/.local/state/trioserve
the history of \fBtrioserve run\fR, and saved chats; XDG_STATE_HOME names another folder
.TP
.I ~/.cache/huggingface/hub
models; HF_HUB_CACHE and LLAMA_CACHE name another folder
.SH EXIT STATUS
0 after success or a drain, 1 after a failure, 2 if a flag, a variable or a command is wrong, and
128 and the number of the signal if one ended the command: 130 for Ctrl\-C.
"""


def pages() -> dict[str, str]:
    """The pages by the names of their files: that of the program, and one of each command."""
    made = {"trioserve.1": _program()}
    for name, command in COMMANDS.items():
        if name != SERVE:
            made[f"trioserve-{name}.1"] = _command(name, command)
    return made


def _escaped(text: str) -> str:
    safe = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join(f"\\&{line}" if line[:1] in (".", "'") else line for line in safe.split("\n"))


def _head(title: str, about: str) -> str:
    name = _escaped(title)
    return f".TH {name.upper()} 1\n.SH NAME\n{name} \\- {_escaped(about)}\n"


def _entry(term: str, text: str) -> str:
    return f".TP\n.B {_escaped(term)}\n{_escaped(text)}\n"


def _program() -> str:
    commands = "".join(_entry(f"{name} {one.words}".strip(), one.help)
                       for name, one in COMMANDS.items())  # fmt: skip
    groups = "".join(_group(group) for group in GROUPS)
    return (
        _head("trioserve", "an LLM server, and commands for its models")
        + f".SH SYNOPSIS\n.B trioserve\n[COMMAND] [flags]\n.SH DESCRIPTION\n{_ABOUT}\n"
        + f".SH COMMANDS\n{commands}.SH FLAGS\n{groups}{_END}"
    )


def _group(group: str) -> str:
    return f".SS {_escaped(group)}\n" + "".join(_flag(one) for one in FLAGS if one.group == group)


def _flag(flag: Flag) -> str:
    names = ", ".join((*flag.names, *flag.negative[-1:]))
    notes = []
    if BY_FIELD[flag.field] is flag and (default := default_text(flag)):
        notes.append(f"default {default}")
    if flag.variable:
        notes.append(flag.variable)
    text = flag.help + (f" ({'; '.join(notes)})" if notes else "")
    return _entry(f"{names} {value_name(flag)}".rstrip(), text)


def _command(name: str, command: Command) -> str:
    synopsis, text = [], ""
    for action, one in _parts(command):
        words = f"{name} {action}".strip()
        synopsis.append(f".B trioserve {_escaped(words)}\n{_escaped(one.usage)}\n")
        body = f"{one.help[0].upper()}{one.help[1:]}.\n{one.details}"
        text += f".SS {_escaped(action)}\n" * bool(action) + _escaped(body)
        text += "".join(_entry(spec_of(option), option.help) for option in one.options)
    return (
        _head(f"trioserve-{name}", command.help)
        + ".SH SYNOPSIS\n"
        + ".br\n".join(synopsis)
        + f".SH DESCRIPTION\n{text}.SH SEE ALSO\n.BR trioserve (1),\nwhich lists the flags.\n"
    )


def _parts(command: Command) -> Iterator[tuple[str, Command]]:
    yield from command.actions.items() or (("", command),)
