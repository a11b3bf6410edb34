"""``trioserve completions``: scripts for shells, and the words that these scripts ask for.

A script is a few lines: at each press of Tab it runs ``trioserve __complete``, so that flags,
choices and names of models are those of the command that is installed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trioserve.cli.commands import ALIASES, COMMANDS, SERVE
from trioserve.cli.options import Arguments, Command, choices_of
from trioserve.config.flags import BY_NAME, Flag
from trioserve.config.parse import n_values, parse
from trioserve.errors import TrioServeError

#: The command that the scripts run, and the line that asks the shell for names of files.
COMPLETE = "__complete"
FILES = ":files"

_SCRIPTS: Mapping[str, str] = {
    "bash": r"""_trioserve() {
    local line current=${COMP_WORDS[COMP_CWORD]}
    [[ $current == [:=] ]] && current=
    COMPREPLY=()
    while IFS= read -r line; do
        if [[ $line == :files ]]; then
            compopt -o filenames 2>/dev/null
            while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -f -- "$current")
        else
            COMPREPLY+=("${line%%$'\t'*}")
        fi
    done < <(
        "${COMP_WORDS[0]}" __complete --line "${COMP_LINE:0:COMP_POINT}" "$current" 2>/dev/null
    )
}
complete -F _trioserve trioserve
""",
    "zsh": r"""#compdef trioserve
_trioserve() {
    local line
    local -a found
    for line in "${(@f)$("${words[1]}" __complete "${(@Q)words[2,CURRENT]}" 2>/dev/null)}"; do
        if [[ $line == :files ]]; then
            _files
        elif [[ -n $line ]]; then
            found+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}")
        fi
    done
    (( $#found )) && _describe trioserve found
}
compdef _trioserve trioserve
""",
    "fish": r"""function __trioserve_complete
    set -l words (commandline -opc) (commandline -ct)
    for line in ($words[1] __complete $words[2..-1] 2>/dev/null)
        if test "$line" = :files
            __fish_complete_path (commandline -ct)
        else
            echo $line
        end
    end
end
complete -c trioserve -f -a '(__trioserve_complete)'
""",
}

#: Values whose words are names of files, and of models.
_FILES = frozenset({"FILE", "FOLDER", "INPUT", "OUTPUT", "PATH", "TARGET"})
_MODELS = frozenset({"MODEL"})
_FIELDS_OF_FILES = (
    "_file", "_path", "_dir", "_voices", "model", "mmproj", "lora", "vector", "preset",
)  # fmt: skip


def run(given: Arguments) -> int:
    """Run the command; see `trioserve.cli.commands`."""
    print(_SCRIPTS[given.words[0]], end="")
    return 0


def answer(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Print the words that fit, each with what it is.

    `words` are those after the name of the program, up to the one that is typed; or ``--line``, the
    whole line, and what bash takes for the word that is typed.
    """
    skipped = 0
    if words[:1] == ["--line"]:
        line, current = words[1], words[2]
        try:
            words = shlex.split(line)[1:]
        except ValueError:  # a quote is open
            words = line.split()[1:]
        if line[-1:].isspace():
            words = [*words, ""]
        skipped = len(words[-1]) - len(current) if words else 0
    *before, typed = words or [""]
    for word, about in candidates(before, typed, environ):
        if word == FILES:
            print(FILES)
        elif word.startswith(typed):
            print(f"{word[skipped:]}\t{re.split('[;:]', about)[0]}")


def candidates(
    before: Sequence[str], typed: str, environ: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Give the words that may follow others, with descriptions."""
    name = next((word for word in before[:1] if not word.startswith("-")), None)
    if name is None and not typed.startswith("-") and not before:
        yield from ((each, one.help) for each, one in COMMANDS.items())
        return
    command, rest = COMMANDS.get(ALIASES.get(name or SERVE, name or SERVE)), before[bool(name) :]
    if command is None:
        return
    if command.actions:
        if not rest:
            yield from ((each, one.help) for each, one in command.actions.items())
            return
        command, rest = command.actions.get(rest[0]), rest[1:]
    if command is not None:
        yield from _of_command(command, rest, typed, environ)


def _of_command(
    command: Command, before: Sequence[str], typed: str, environ: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    own, left = command.named(), [*reversed(before)]
    takes: dict[str, str | Flag] = {**BY_NAME, **{name: one.value for name, one in own.items()}}
    n_words, flags = 0, list[str]()
    while left:
        word = left.pop()
        n = 0
        if (option := own.get(word)) is not None:
            n = int(bool(option.value))
        elif word.startswith("-"):
            n = n_values(word, left[-1:]) or 0
            flags += [word, *left[-n:]] if n <= len(left) else []
        else:
            n_words += 1
        if n > len(left):  # the value is what is typed
            yield from _values(takes.get(word), flags, environ)
            return
        del left[len(left) - n :]
    if typed.startswith("-") and "=" in typed:
        flag = typed.partition("=")[0]
        for value, about in _values(takes.get(flag), flags, environ):
            yield (value if value == FILES else f"{flag}={value}"), about
    elif typed.startswith("-"):
        yield from ((name, option.help) for name, option in own.items())
        if command.takes_flags:
            yield from ((name, flag.help) for name, flag in BY_NAME.items() if name not in own)
    elif placeholders := command.placeholders:
        yield from _values(placeholders[min(n_words, len(placeholders) - 1)], flags, environ)


def _values(
    of: str | Flag | None, flags: Sequence[str], environ: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Give the values of a flag, or those for a placeholder."""
    if isinstance(of, Flag):
        if of.choices:
            yield from ((choice, "") for choice in of.choices)
        elif of.field == "model":
            yield from _values("MODEL", flags, environ)
        elif of.field == "tts" or any(part in of.field for part in _FIELDS_OF_FILES):
            yield FILES, ""
        return
    name = (of or "").strip("[]")
    yield from ((choice, "") for choice in choices_of(name))
    if name in _MODELS:
        yield from _models(flags, environ)
    if name in _FILES | _MODELS:
        yield FILES, ""


def _models(flags: Sequence[str], environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    from trioserve.models.catalog import Catalog

    try:
        entries = Catalog(parse(flags, environ).config, flags, environ).entries
    except TrioServeError:  # the command says why
        return
    for one in entries.values():
        yield one.name, str(one.path or Path(one.name).name)
