"""Variables, read into a `Config`."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import attrs
import pytest

from tests.support.configs import read, refused
from trioserve.config import Config
from trioserve.config.parse import from_environment, parse
from trioserve.config.readers import FALSE_WORDS, TRUE_WORDS


@pytest.mark.parametrize(
    ("environ", "field", "value"),
    [
        ({"LLAMA_ARG_MODEL": "a.gguf"}, "model", "a.gguf"),
        ({"LLAMA_ARG_MODEL": ""}, "model", None),
        ({"LLAMA_ARG_PORT": "90"}, "port", 90),
        ({"LLAMA_API_KEY": "a,b"}, "api_keys", ("a", "b")),
        ({"LLAMA_ARG_ENDPOINT_SLOTS": "off"}, "slots_endpoint", False),
        ({"LLAMA_ARG_NO_CACHE_PROMPT": "true"}, "cache_prompt", False),
        ({"LLAMA_ARG_FLASH_ATTN": "enabled"}, "flash_attn", "on"),
        ({"LLAMA_ARG_LOG_JSONL": "1"}, "log_format", "json"),
        ({"TRIOSERVE_DRAIN_TIMEOUT": "3"}, "drain_timeout", 3.0),
        ({"HOME": "/", "LLAMA_CACHE": "/tmp"}, "port", 8080),
    ],
)
def test_a_variable_sets_its_field(environ: Mapping[str, str], field: str, value: object) -> None:
    assert from_environment(environ) == attrs.evolve(Config(), **{field: value})


@pytest.mark.parametrize("word", sorted(TRUE_WORDS | FALSE_WORDS))
def test_the_words_for_on_and_off(word: str) -> None:
    assert read(LLAMA_ARG_KV_UNIFIED=word).kv_unified is (word in TRUE_WORDS)


def test_the_command_line_wins() -> None:
    config = read("--port", "1", "--api-key", "mine", LLAMA_ARG_PORT="2", LLAMA_API_KEY="theirs")
    assert (config.port, config.api_keys) == (1, ("mine",))
    assert read(LLAMA_ARG_TOP_K="3").sampling.top_k == 3


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("LLAMA_ARG_PORT", "x", "LLAMA_ARG_PORT: 'x' is not an integer"),
        ("LLAMA_ARG_KV_UNIFIED", "maybe", "LLAMA_ARG_KV_UNIFIED must be true or false, not"),
        ("LLAMA_ARG_PROT", "1", "LLAMA_ARG_PROT is not a variable of trioserve; did you mean LLAM"),
        ("TRIOSERVE_QQQQ", "1", "TRIOSERVE_QQQQ is not a variable of trioserve"),
        ("LLAMA_ARG_FIT", "x", "LLAMA_ARG_FIT must be one of on, off, not 'x'"),
        ("LLAMA_ARG_RPC", "1", "LLAMA_ARG_RPC must be HOST:PORT with the name of a machine or"),
        ("LLAMA_ARG_TOOLS", "x", "LLAMA_ARG_TOOLS has 'x', which is none of read_file, file_glo"),
        ("LLAMA_ARG_DOCKER_REPO", "x", "LLAMA_ARG_DOCKER_REPO is a variable of llama-server"),
    ],
)
def test_a_wrong_variable_is_refused_by_its_name(name: str, text: str, message: str) -> None:
    assert refused(**{name: text}).startswith(message)


def test_variables_that_cannot_matter() -> None:
    environ = {
        "LLAMA_ARG_PERF": "1",
        "LLAMA_ARG_MTMD_BATCH_MAX_TOKENS": "512",
        "LLAMA_ARG_BACKEND_SAMPLING": "0",  # says no to what is not there
    }
    parsed = parse((), environ)
    assert parsed.config == Config()
    assert [note.partition(" ")[0] for note in parsed.notes] == list(environ)[:2]


def test_where_to_listen_is_not_for_an_embedded_app(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="trioserve"):
        from_environment({"LLAMA_ARG_PORT": "1"})
    assert caplog.messages == [
        "LLAMA_ARG_PORT has no effect here: the program that serves the app opens the socket"
    ]
