"""The commands beside serving: how they are found, and what each says."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import Terminal
from tests.support.gguf_models import write_decoder
from trioserve.cli.commands import ALIASES, COMMANDS, ELSEWHERE
from trioserve.cli.main import main
from trioserve.cli.output import has_colors, write_file
from trioserve.errors import ConfigError
from trioserve.models import BUNDLED
from trioserve.store.database import Database
from trioserve.units import bytes_text, count_text, duration_text, rate_text


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("LLAMA_CACHE", raising=False)


def said(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    """The standard output of a command."""
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert err == ""
    return out


def complaint(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 2) -> str:
    """The one line of a command that fails."""
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("trioserve: ")
    assert err.count("\n") == 1
    return err.removeprefix("trioserve: ").rstrip("\n")


# -- finding a command


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "serve"])
def test_each_command_has_help(capsys: pytest.CaptureFixture[str], name: str) -> None:
    text = said(capsys, name, "--help")
    assert text.startswith(f"usage: trioserve {name} ")
    assert said(capsys, name, "-h") == text


def test_help_on_one_topic(capsys: pytest.CaptureFixture[str]) -> None:
    overview = said(capsys, "--help")
    assert all(f"\n  {name} " in overview for name in COMMANDS)
    assert said(capsys, "help") == overview
    assert said(capsys, "help", "show") == said(capsys, "show", "--help")
    assert said(capsys, "help", "serve") == said(capsys, "--help")
    group = said(capsys, "help", "context", "and", "threads")
    assert group.startswith("Context and threads\n")
    assert "--ctx-size" in group and "--port" not in group
    assert group in said(capsys, "--help-all")
    assert said(capsys, "help", "-c") in group
    assert complaint(capsys, "help", "netwrk").endswith("'netwrk'; did you mean network?")


@pytest.mark.parametrize("word", ["--version", "version"])
def test_versions(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "llama-cpp-python 0." in said(capsys, word)


def test_serve_takes_the_flags_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "serve", "--help") == said(capsys, "--help")
    assert complaint(capsys, "serve", "--prot", "1").startswith("--prot is not a flag")


def test_what_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, "shwo") == "'shwo' is not a command; did you mean show?"
    assert complaint(capsys, "xyzzy") == "'xyzzy' is not a command; see trioserve --help"
    assert complaint(capsys, "x.gguf") == "'x.gguf' is not a command; name a model with -m"
    assert complaint(capsys, str(BUNDLED)).endswith("name a model with -m")


def test_words_of_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    for word, name in ALIASES.items():
        assert said(capsys, word, "--help") == said(capsys, name, "--help")
    for word, how in ELSEWHERE.items():
        assert complaint(capsys, word) == f"there is no command {word}: {how}"
    assert complaint(capsys, "statsu").endswith("did you mean status?")


def test_list_has_what_a_server_would_offer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write_decoder(tmp_path / "small.gguf")
    for argv in (["list", "--models-dir", str(tmp_path)], ["ls", f"--models-dir={tmp_path}"]):
        assert [line.split()[0] for line in said(capsys, *argv).splitlines()] == [
            "NAME", "small", "bundled",
        ]  # fmt: skip
    small, _ = json.loads(said(capsys, "list", "--json", "--models-dir", str(tmp_path)))
    assert (small["path"], small["size"]) == (str(path), path.stat().st_size)


def test_each_list_is_aligned_and_has_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    keys, store = str(tmp_path / "keys.toml"), str(tmp_path / "store.db")
    assert main(["keys", "add", "alice", "--file", keys]) == 0
    Database(store).close()
    capsys.readouterr()
    for argv in (
        ["list"],
        ["keys", "list", "--file", keys],
        ["store", "check", store],
        ["config", "show", "-c", "512"],
        ["usage", "--store", store],
    ):
        head, *rows = said(capsys, *argv).splitlines()
        found = json.loads(said(capsys, *argv, "--json"))
        assert isinstance(found, list) and len(found) == len(rows)
        last = head.rindex(" ") + 1
        for row in rows:
            assert row[last - 1] == " " or len(row) == len(head)


def test_colors_are_for_terminals_that_have_them() -> None:
    terminal, file = Terminal(), io.StringIO()
    assert has_colors(terminal, {}) and not has_colors(file, {})
    assert has_colors(file, {"FORCE_COLOR": "1"}) and not has_colors(file, {"FORCE_COLOR": "0"})
    assert not has_colors(terminal, {"NO_COLOR": "1", "FORCE_COLOR": "1"})
    assert not has_colors(terminal, {"TERM": "dumb"})


# -- show


def test_show_the_bundled_model(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "show")
    assert text.startswith(f"{BUNDLED}\n")
    rows = dict(line.strip().split("  ", 1) for line in text.splitlines()[1:])
    assert rows["size"].strip() == bytes_text(BUNDLED.stat().st_size)
    assert rows["context"].strip() == "4096 tokens"
    assert "of 4096 tokens" in rows["memory"]
    assert rows["memory"].endswith("are free")
    assert said(capsys, "show", "bundled").startswith(f"{BUNDLED}\n")


def test_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    alone = ("--embd-ctx-size", "0", "--tts", "none")
    small, large = (
        json.loads(said(capsys, "show", "--json", "-c", size, *alone)) for size in ("512", "2048")
    )
    assert small["path"] == str(BUNDLED)
    assert small["memory"]["n_ctx"] == 512
    assert large["memory"]["cache"] == pytest.approx(4 * small["memory"]["cache"], rel=0.02)
    assert small["problem"] is None


def test_show_what_would_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "show", "bundled", "--fit")
    assert text.count("\n") == 1 and "a context of 4096 tokens, nothing had to be" in text
    found = json.loads(said(capsys, "show", "--json", "--fit", "-c", "512"))
    assert found["need"]["n_ctx"] == 512 and found["changes"] == []
    assert 0 < found["need"]["ram"] < found["free"]["ram"]
    text = said(capsys, "show", "--fit", "-c", str(2**31 - 257), code=1)
    assert "does not fit into memory" in text and "would fit" in text
    assert "architecture" in said(capsys, "show", "--fit", "off"), "there it is the server's flag"


def test_show_a_template(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "bundled", "--template"]) == 0
    template, found = capsys.readouterr()
    assert found.splitlines()[0] == "format: derived"
    assert "call_as_json: ToolCalls(starts=('<tool_call>')" in found
    assert template == json.loads(said(capsys, "show", "--json"))["template"]
    assert "messages" in template


def test_show_a_file_and_a_model_of_a_directory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write_decoder(tmp_path / "small.gguf")
    by_path = json.loads(said(capsys, "show", str(path), "--json"))
    by_name = json.loads(said(capsys, "show", "SMALL", "--json", "--models-dir", str(tmp_path)))
    by_flag = json.loads(said(capsys, "show", "--json", "-m", str(path)))
    for one in (by_path, by_name, by_flag):
        assert (one["path"], one["architecture"]) == (str(path), "llama")


def test_show_a_model_of_the_cache(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--org--x-GGUF"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    (repo / "snapshots" / ("0" * 40)).mkdir(parents=True)
    path = write_decoder(repo / "snapshots" / ("0" * 40) / "x-Q8_0.gguf")
    for argv in (["org/x-GGUF"], ["ORG/x-gguf:q8_0"], ["-hf", "org/x-GGUF"], ["-m", "org/x-GGUF"]):
        found = json.loads(said(capsys, "show", *argv, "--json"))
        assert (found["path"], found["problem"]) == (str(path), None)
    missing = "is not on this machine yet; trioserve pull downloads it."
    assert complaint(capsys, "show", "-hf", "org/y", code=1) == f"The model org/y {missing}"
    (tmp_path / "m.ini").write_text("[y]\nhf-repo = org/y\n")
    flags = ("--models-preset", str(tmp_path / "m.ini"))
    assert complaint(capsys, "show", "y", *flags, code=1) == f"The model org/y {missing}"


def test_models_that_cannot_be_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    path.write_bytes(BUNDLED.read_bytes()[: BUNDLED.stat().st_size // 2])
    text = said(capsys, "show", str(path), code=1)
    assert "is cut short at" in text.splitlines()[-1]
    assert "There is no model 'none'" in complaint(capsys, "show", "none", code=1)
    path.write_text("a text that is long enough", encoding="utf-8")
    assert "it is not a GGUF file" in complaint(capsys, "show", str(path), code=1)


@pytest.mark.system
def test_a_reader_that_has_enough() -> None:
    command = f"{sys.executable} -m trioserve show --json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


# -- numbers


def test_numbers_for_people() -> None:
    texts = {0: "0 bytes", 1023: "1023 bytes", 1024: "1.0 KiB", 99.94 * 2**20: "99.9 MiB",
             241.4 * 2**20: "241 MiB", 5000 * 2**40: "5000 TiB"}  # fmt: skip
    assert {size: bytes_text(size) for size in texts} == texts
    texts = {7: "7", 999: "999", 12_345: "12.3 K", 268_098_176: "268 M", 671e9: "671 B"}
    assert {number: count_text(number) for number in texts} == texts
    texts = {0: "0.0 s", 1.24: "1.2 s", 59.4: "59 s", 59.6: "1 min", 290: "4 min 50 s",
             7205: "2 h", 100_000: "1 d 3 h"}  # fmt: skip
    assert {seconds: duration_text(seconds) for seconds in texts} == texts
    assert rate_text(31.44, "tokens") == "31.4 tokens/s"
    assert (rate_text(812.3, "tokens"), rate_text(2**21)) == ("812 tokens/s", "2.0 MiB/s")


# -- rpc


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "rpc needs an action; its actions are build, serve"),
        (("sing",), "rpc has no action 'sing'"),
        (("serve", "--prot", "1"), "--prot is not a flag of trioserve rpc serve; did you mean"),
        (("serve", "--port", "0"), "--port must be between 1 and"),
        (("serve", "--port", "65536"), "--port must be below 65536"),
        (("serve", "--threads", "-1"), "--threads takes one whole number, not '-1'"),
        (("serve", "--host", "0.0.0.0"), "0.0.0.0 can be reached by others than the machines of"),
        (("serve", "--host", "8.8.8.8"), "8.8.8.8 can be reached by others than the machines of"),
        (("serve", "--host", "10.255.255.254"), "cannot listen on 10.255.255.254:50052: Cannot"),
    ],
)
def test_what_rpc_refuses(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    assert main(("rpc", *argv)) == 2
    assert capsys.readouterr().err.startswith(f"trioserve: {message}")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be written: Is a directory"):
        write_file(tmp_path, "{}")
