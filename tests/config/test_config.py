"""What a configuration refuses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from trioserve.config import Config
from trioserve.errors import ConfigError


@pytest.mark.parametrize(
    "fields",
    [
        {"port": "80"},
        {"port": True},
        {"slots_endpoint": 1},
        {"model": 3},
        {"api_keys": "one"},
        {"api_keys": ("",)},
        {"drain_timeout": math.inf},
        {"log_level": "loud"},
        {"host": ""},
        {"alias": " "},
    ],
)
def test_a_config_refuses_what_it_cannot_use(fields: Mapping[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        Config(**fields)  # type: ignore[arg-type]


def test_fields_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="reranking needs pooling 'rank', not 'mean'"):
        Config(reranking=True, pooling="mean")
    with pytest.raises(ConfigError, match="pooling has no effect"):
        Config(pooling="mean", embd_ctx_size=0)
    with pytest.raises(ConfigError, match="pooling 'rank' has no effect"):
        Config(pooling="rank")


@pytest.mark.parametrize(
    "text",
    [
        "host",
        "host:",
        ":1",
        "host:0",
        "host:65536",
        "host:1:2",
        "[::1]:1",
        "a b:1",
        "-x:1",
        "http://host:1",
        "host:1/",
    ],
)
def test_other_machines_have_a_name_and_a_port(text: str) -> None:
    with pytest.raises(ConfigError, match="rpc must be HOST:PORT"):
        Config(rpc=("10.0.0.1:50052", text))


def test_other_machines_are_named_once() -> None:
    with pytest.raises(ConfigError, match="rpc names a machine twice"):
        Config(rpc=("gpu-box.lan:1", "gpu-box.lan:1"))


def test_prompts_on_disk_need_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for wrong in (file, file / "new"):
        with pytest.raises(ConfigError, match=r"cache_disk is .*, which is not a directory"):
            Config(cache_disk=str(wrong))
    for right in (tmp_path, tmp_path / "new" / "one", "~"):
        assert Config(cache_disk=str(right)).cache_disk == str(right)


def test_names_and_adapters_are_taken_apart() -> None:
    config = Config(model="a.gguf", alias="a, b", lora=("x:2.0",))
    assert (config.aliases, config.lora_files) == (("a", "b"), (("x", 2.0),))
