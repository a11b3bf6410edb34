"""`trioserve completions`: what a press of Tab offers, in the shells that are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gguf_models import write_decoder
from trioserve.cli.commands import COMMANDS
from trioserve.cli.commands.completions import FILES, answer, candidates
from trioserve.cli.main import main
from trioserve.config.flags import BY_NAME


def offered(*words: str, environ: dict[str, str] | None = None) -> list[str]:
    *before, typed = words
    found = candidates(before, typed, environ or {})
    return [word for word, _ in found if word == FILES or word.startswith(typed)]


def test_commands_flags_and_values() -> None:
    assert offered("") == list(COMMANDS)
    assert offered("keys", "") == ["add", "list", "remove"]
    assert offered("keys", "add", "x", "--to") == ["--tokens-per-minute", "--tokens-per-day"]
    assert set(offered("-")) >= set(BY_NAME)
    assert offered("run", "--url", "x", "--flash-attn", "o") == ["on", "off"]
    assert offered("run", "--flash-attn=o") == ["--flash-attn=on", "--flash-attn=off"]
    assert offered("bench", "-o", "js") == ["json", "jsonl"]
    assert offered("bench", "-n", "") == []
    assert offered("store", "check", "") == [FILES]
    assert offered("completions", "z") == ["zsh"]
    assert offered("nonsense", "") == []


def test_models_are_those_of_the_flags(tmp_path: Path) -> None:
    write_decoder(tmp_path / "small.gguf")
    folder = ("--models-dir", str(tmp_path))
    for words in (("run", *folder), ("show", *folder, "-m"), ("serve", *folder, "--model")):
        assert offered(*words, "") == ["small", "bundled", FILES]
    assert offered("ls", "--models-dir", "") == [FILES]
    assert offered("run", "--models-dir", "/nowhere", "") == [FILES]


def test_of_a_line_bash_gets_the_part_that_it_replaces(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "m.ini").write_text("[org/x:Q8_0]\nmodel = x.gguf\n[org/x:F16]\nmodel = y.gguf\n")
    line = f"trioserve run --models-preset '{tmp_path}/m.ini' org/x:Q"
    answer(["--line", line, "Q"], {})
    assert capsys.readouterr().out.splitlines() == ["Q8_0\tx.gguf", FILES]
    answer(["--line", "trioserve store check 'a", "a"], {})
    assert FILES in capsys.readouterr().out


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment in which ``trioserve`` is this one, with a model in a folder."""
    program = tmp_path / "bin" / "trioserve"
    program.parent.mkdir()
    root = Path(__file__).parents[3]
    program.write_text(f'#!/bin/sh\nPYTHONPATH={root} exec {sys.executable} -m trioserve "$@"\n')
    program.chmod(0o755)
    (tmp_path / "models").mkdir()
    write_decoder(tmp_path / "models" / "small.gguf")
    return {
        **os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "HOME": str(tmp_path),
        "LLAMA_ARG_MODELS_DIR": str(tmp_path / "models"),
    }  # fmt: skip


#: Scripts that print the words that each shell offers for $1.
_ASK = {
    "bash": """eval "$(trioserve completions bash)"
        COMP_LINE=$1 COMP_POINT=${#1}; COMP_WORDS=($1); [[ $1 == *' ' ]] && COMP_WORDS+=('')
        COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _trioserve; printf '%s\\n' "${COMPREPLY[@]}" """,
    "zsh": """compdef() { }; _files() { print FILES }; eval "$(trioserve completions zsh)"
        _describe() { print -l -- "${(@)${(P@)2}%%:*}" }
        words=(${=1}); [[ $1 == *' ' ]] && words+=(''); CURRENT=$#words; _trioserve""",
    "fish": "trioserve completions fish | source; complete -C $argv[1]",
}


@pytest.mark.system
@pytest.mark.parametrize("shell", list(_ASK))
def test_in_a_real_shell(shell: str, environ: dict[str, str]) -> None:
    if (program := shutil.which(shell)) is None:
        pytest.skip(f"{shell} is not installed")

    def asked(line: str) -> list[str]:
        name = [] if shell == "fish" else ["-"]
        done = subprocess.run(
            [program, "-c", _ASK[shell], *name, line],
            env=environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.stderr == ""
        return [one.split("\t")[0] for one in done.stdout.splitlines()]

    assert asked("trioserve sho") == ["show"]
    assert set(asked("trioserve run --flash-attn o")) == {"on", "off"}
    assert "--models-dir" in asked("trioserve list --models-d")
    assert "small" in asked("trioserve run sm")


def test_the_flag_of_llama_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion-bash"]) == main(["completions", "bash"]) == 0
    assert capsys.readouterr().out.count("complete -F _trioserve trioserve\n") == 2
