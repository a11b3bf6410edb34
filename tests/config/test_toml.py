"""A TOML file, read into a `Config`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.configs import read, refused
from trioserve.config import Config
from trioserve.config.parse import parse
from trioserve.types import SamplingParams


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "trioserve.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_sets_fields(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        # the same names as the flags
        ctx-size = 4096
        cache_prompt = false
        temp = 0.5
        samplers = "top_k;temperature"
        api-key = ["one", "two"]
        "log-level" = "debug"
        """,
    )
    assert read("--config", path) == Config(
        ctx_size=4096,
        cache_prompt=False,
        api_keys=("one", "two"),
        log_level="debug",
        sampling=SamplingParams(temperature=0.5, samplers=("top_k", "temperature")),
    )
    assert read(TRIOSERVE_CONFIG=path).ctx_size == 4096


def test_the_file_in_the_documentation_can_be_read(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    text = page.read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0]
    config = read("--config", written(tmp_path, text))
    assert (config.parallel, config.kv_unified) == (8, False)
    assert config.api_keys == ("first", "second")


def test_flags_win_over_variables_and_variables_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "port = 1\nparallel = 1\nthreads = 1\n")
    config = read(f"--config={path}", "-t", "3", LLAMA_ARG_THREADS="2", LLAMA_ARG_N_PARALLEL="2")
    assert (config.port, config.parallel, config.threads) == (1, 2, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nprot = 1", ":2: prot is not a key of the configuration; did you mean port?"),
        ("[server]\nport = 1", ":1: server is not a key of the configuration"),
        ("port = [1]", ":1: port must be text or a number, not [1]"),
        ("port.x = 1", ":1: port must be text or a number, not a table"),
        ("port = 99999", ":1: port must be at most 65535, not 99999"),
        ("slots = 1", ":1: slots must be true or false, not 1"),
        ("no-slots = true", ":1: no-slots: write slots = true or slots = false instead"),
        ("docker-repo = 'x'", ":1: docker-repo is a flag of llama-server that trioserve does not"),
        ("port = ", " is not valid TOML: Invalid value (at end of document)"),
        (f"port = {'9' * 5000}", " is not valid TOML: Exceeds the limit"),
        (f"port = {'[' * 5000}", " is not valid TOML: maximum recursion depth exceeded"),
    ],
)
def test_a_wrong_file_is_refused_by_the_place(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    assert refused("--config", path).startswith(path + message)


def test_what_cannot_matter_in_a_file_is_noted(tmp_path: Path) -> None:
    path = written(tmp_path, "warmup = true")
    (note,) = parse(["--config", path], {}).notes
    assert note == f"{path}:1: warmup has no effect: the model is not warmed up"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert refused("--config", str(tmp_path / "no")).endswith("cannot be read: No such file or "
                                                              "directory")  # fmt: skip
    (tmp_path / "bytes").write_bytes(b"\xff")
    assert refused("--config", str(tmp_path / "bytes")).endswith("cannot be read: not UTF-8")


def test_a_preset_in_a_file(tmp_path: Path) -> None:
    text = "vision-gemma-4b-default = true\nport = 5\nvision-gemma-12b-default = false\n"
    config = read("--config", written(tmp_path, text))
    assert (config.hf_repo, config.port) == ("ggml-org/gemma-3-4b-it-qat-GGUF", 5)
