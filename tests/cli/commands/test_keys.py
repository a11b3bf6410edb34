"""`trioserve keys`: adds, lists and removes."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from trioserve.cli.main import run
from trioserve.config.keys import digest_of, read_keys

HASH = f'hash = "sha256:{digest_of("a").hex()}"'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def keys(path: Path, *argv: str) -> int:
    return run("keys", [*argv, "--file", str(path)], {})


def files(path: Path) -> list[str]:
    """The files in the folder beside the lock."""
    return [one.name for one in path.parent.iterdir() if one.name != ".keys.toml.lock"]


def test_a_new_key_is_printed_once_and_only_its_hash_is_written(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys(path, "add", "alice") == 0
    shown = capsys.readouterr().out.strip()
    assert len(shown) > 40 and shown not in path.read_text()
    (key,) = read_keys(str(path))
    assert key.digest == digest_of(shown) and not key.may_manage and key.models is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert files(path) == ["keys.toml"]
    assert keys(path, "add", "bob") == 0
    assert capsys.readouterr().out.strip() != shown


def test_all_settings(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--manage", "--models", "qwen3-*,gemma", "--requests-per-minute", "5",
             "--tokens-per-minute", "0", "--tokens-per-day", "9", "--priority", "3",
             "--weight", "1.5"]  # fmt: skip
    assert keys(path, "add", "alice", *words) == 0
    (key,) = read_keys(str(path))
    assert key.may_manage and key.models == ("qwen3-*", "gemma")
    assert (key.requests, key.tokens) == (5, 0)
    assert (key.daily_tokens, key.priority, key.weight) == (9, 3, 1.5)
    capsys.readouterr()
    assert keys(path, "list") == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split()[0] == "NAME"
    assert row.replace("no limit", "none").split() == [
        "alice", "yes", "qwen3-*,gemma", "5", "none", "9", "3", "1.5",
    ]  # fmt: skip


def test_the_rest_of_the_file_stays_as_it_is(path: Path) -> None:
    first = f"# Keys of the office\n\n# Alice\n[alice]\n{HASH} # of her laptop\n"
    path.write_text(first)
    path.chmod(0o644)
    assert keys(path, "add", "bob") == 0
    assert path.read_text().startswith(f"{first}\n[bob]\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys(path, "remove", "bob") == 0
    assert path.read_text() == f"{first}\n"


def test_comments_of_the_next_key_stay(path: Path) -> None:
    last = f'# Bob\n["bob"]\nhash = "sha256:{digest_of("b").hex()}"\nmodels = [\n  "x", # new\n]'
    path.write_text(f"[ 'alice' ] # a\n{HASH}\n\nweight = 2\n\n{last}")
    assert keys(path, "remove", "alice") == 0
    assert path.read_text() == f"\n{last}"
    assert keys(path, "remove", "bob") == 0
    assert path.read_text() == "\n# Bob\n"


def test_commands_that_run_at_once_lose_nothing_and_bring_nothing_back(path: Path) -> None:
    for i in range(8):
        assert keys(path, "add", f"old-{i}") == 0
    codes = []

    def change(i: int) -> None:
        codes.append(keys(path, "remove", f"old-{i}"))
        codes.extend(keys(path, "add", f"new-{i}-{n}") for n in range(3))

    threads = [threading.Thread(target=change, args=(i,)) for i in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert codes == [0] * 32
    names = {key.name for key in read_keys(str(path))}
    assert names == {f"new-{i}-{n}" for i in range(8) for n in range(3)}
    assert files(path) == ["keys.toml"]
    assert stat.S_IMODE(path.with_name(".keys.toml.lock").stat().st_mode) == 0o600


def test_a_link_stays_one(path: Path) -> None:
    real = path.with_name("real.toml")
    real.touch()
    path.symlink_to(real)
    assert keys(path, "add", "alice") == 0
    assert path.is_symlink() and [key.name for key in read_keys(str(real))] == ["alice"]


@pytest.mark.parametrize(
    ("text", "argv", "problem"),
    [
        (f"[a]\n{HASH}", ("add", "a"), "has a key 'a' already"),
        (f"[a]\n{HASH}", ("remove", "b"), "has no key 'b'"),
        (f"a = {{ {HASH} }}", ("remove", "a"), "only an editor can remove"),
        ("[a", ("add", "b"), "not valid TOML"),
        ("", ("add", "a b"), "must have a name"),
        ("", ("add", "key-1"), "the name of a key of --api-key"),
        ("", ("add", "a", "--priority", "101"), "an integer from 0 to 100"),
        ("", ("add", "a", "--weight", "x"), "--weight"),
        ("", ("add",), "NAME"),
        ("", (), "add"),
    ],
)
def test_what_is_refused_changes_nothing(
    path: Path, text: str, argv: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_text(text)
    assert keys(path, *argv) == 2
    said = capsys.readouterr()
    assert problem in said.err and not said.out
    assert path.read_text() == text
    assert files(path) == ["keys.toml"]


def test_where_the_file_is(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("keys", ["add", "alice"], {"TRIOSERVE_API_KEYS": str(path)}) == 0
    assert run("keys", ["list"], {}) == 2
    assert "--file" in capsys.readouterr().err
    assert run("keys", ["list", "--file", str(path.with_name("none"))], {}) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.parent.chmod(0o500)
    assert keys(path, "add", "alice") == 2
    said = capsys.readouterr()
    assert "cannot be written" in said.err and not said.out
