"""The fields of a `Config`: what goes together, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import read, refused
from trioserve.config import Config
from trioserve.config.checks import BUILTIN_TOOLS
from trioserve.config.flags import FLAGS, PRESETS
from trioserve.errors import ConfigError

DRAFT = {"spec_draft_model": "d.gguf"}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"port": "80"}, "port"),
    ({"port": True}, "port"),
    ({"slots_endpoint": 1}, "slots_endpoint"),
    ({"model": 3}, "model"),
    ({"api_keys": "one"}, "api_keys"),
    ({"api_keys": ("",)}, "api_keys"),
    ({"drain_timeout": math.inf}, "drain_timeout"),
    ({"log_level": "loud"}, "log_level"),
    ({"host": ""}, "host"),
    ({"alias": " "}, "alias"),
    ({"reranking": True, "pooling": "mean"}, "reranking needs pooling 'rank', not 'mean'"),
    ({"pooling": "mean", "embd_ctx_size": 0}, "pooling has no effect"),
    ({"pooling": "rank"}, "pooling 'rank' has no effect"),
    ({"rpc": ("gpu-box.lan:1", "gpu-box.lan:1")}, "rpc names a machine twice"),
    ({"hf_repo": "a/b", "model": "x"}, "hf_repo names a model, so"),
    ({"hf_repo": "a/b", "model_url": "http://x"}, "hf_repo names a model, so"),
    ({"hf_file": "x.gguf"}, "hf_file has no effect without hf_repo"),
    ({"spec_draft_hf": "a/b", **DRAFT}, "spec_draft_hf names a draft model"),
    ({"spec_draft_hf": "a/b", "embeddings": True}, "spec_draft_model has no effect on embe"),
    ({"embeddings": True, **DRAFT}, "spec_draft_model has no effect on embeddings"),
    ({"spec_draft_n_max": 0, **DRAFT}, "spec_draft_n_max must be at least 1"),
    ({"spec_draft_n_min": 17, **DRAFT}, "spec_draft_n_min must be at most spec_draft_n_max"),
    ({"spec_draft_p_min": 1.5, **DRAFT}, "spec_draft_p_min must be at most 1"),
    ({"spec_draft_override_tensor": ("x",), **DRAFT}, "spec_draft_override_tensor must be PATTER"),
    ({"tools": ("cat",)}, "tools has 'cat', which is none of read_file"),
    ({"tools_dir": ("/no/such",)}, "tools_dir has '/no/such', which is not a directory"),
    ({"ui_mcp_proxy_hosts": ("a b",)}, "ui_mcp_proxy_hosts has 'a b', which is not HOST"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_a_config_refuses_what_it_cannot_use(fields: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config(**fields)
    assert error.value.message.startswith(message)


MACHINES = [
    "host", "host:", ":1", "host:0", "host:65536", "host:1:2", "[::1]:1", "a b:1", "-x:1",
    "http://host:1", "host:1/",
]  # fmt: skip


@pytest.mark.parametrize("text", MACHINES)
def test_other_machines_have_a_name_and_a_port(text: str) -> None:
    with pytest.raises(ConfigError, match="rpc must be HOST:PORT"):
        Config(rpc=("10.0.0.1:50052", text))


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


# -- the model


def test_a_model_on_the_hub() -> None:
    config = read("-hf", "user/repo:Q8_0", "-hff", "x.gguf", "-hft", "secret", "--offline")
    assert config == Config(hf_repo="user/repo:Q8_0", hf_file="x.gguf", hf_token="secret",
                            offline=True)  # fmt: skip
    assert read(LLAMA_ARG_HF_REPO="user/repo", HF_TOKEN="t").hf_token == "t"
    assert read("-mu", "http://x/y.gguf", "-m", "z.gguf").model_url == "http://x/y.gguf"


def test_the_name_of_the_model() -> None:
    assert Config().model_named is None
    assert Config(model="x.gguf").model_named == "x.gguf"
    assert Config(hf_repo="user/repo").model_named == "user/repo"
    assert Config(model="x.gguf", model_url="http://x/y.gguf").model_named == "http://x/y.gguf"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_can_be_used_and_later_flags_win(name: str) -> None:
    fields = PRESETS[name][1]
    config = read(name, "--port", "1", "-c", "2048")
    assert (config.hf_repo, config.hf_file) == (fields["hf_repo"], fields.get("hf_file"))
    assert (config.port, config.ctx_size) == (1, 2048)
    assert next(one for one in FLAGS if name in one.names).group == "Presets"


def test_presets_have_the_values_of_llama_server() -> None:
    config = read("--gpt-oss-20b-default")
    assert (config.port, config.batch_size, config.ubatch_size) == (8013, 32768, 2048)
    assert (config.parallel, config.ctx_size) == (2, 262144)
    sampling = config.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert sampling.min_p == 0.01
    assert read("--embd-gemma-default").embeddings
    draft = read("--fim-qwen-7b-spec").spec_draft_hf
    assert draft == "ggml-org/Qwen2.5-Coder-0.5B-Q8_0-GGUF"


# -- the draft model


def test_flags_of_drafts_are_those_of_llama_server() -> None:
    for flag in ("-md", "--model-draft", "--spec-draft-model"):
        assert read(flag, "d.gguf").spec_draft_model == "d.gguf"
    config = read(
        *("-md", "d.gguf", "--draft-p-min", "0.75", "--spec-draft-n-max", "8", "-td", "2"),
        *("-ngld", "all", "-devd", "CUDA0,CUDA1", "-otd", "ffn=CPU", "-cmoed", "-ctkd", "q8_0"),
    )
    assert (config.spec_draft_p_min, config.spec_draft_n_max) == (0.75, 8)
    assert (config.spec_draft_threads, config.spec_draft_ngl) == (2, -1)
    assert config.spec_draft_device == ("CUDA0", "CUDA1")
    assert config.spec_draft_override_tensor == ("ffn=CPU",)
    assert config.spec_draft_cpu_moe
    assert (config.spec_draft_type_k, config.spec_draft_type_v) == ("q8_0", "f16")
    assert read(LLAMA_ARG_SPEC_DRAFT_MODEL="x").spec_draft_model == "x"


@pytest.mark.parametrize(
    "fields",
    [
        {"spec_draft_n_max": 9},
        {"spec_draft_p_min": 0.5},
        {"spec_draft_threads": 1},
        {"spec_draft_type_k": "q8_0"},
        {"spec_draft_device": ("none",)},
    ],
)
def test_without_a_draft_model_its_options_have_no_effect(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="has no effect without spec_draft_model"):
        Config(**fields)
    Config(**DRAFT, **fields)


def test_a_draft_model_on_the_hub_is_a_draft_model() -> None:
    config = read("-hfd", "user/draft", "--spec-draft-n-max", "4", "--spec-type", "draft-simple")
    assert (config.spec_draft_hf, config.draft_types) == ("user/draft", ("draft-simple",))
    assert refused("--spec-draft-n-max", "4").endswith("has no effect without --spec-draft-model")


# -- images, sound and video


def test_the_flags_of_a_projector() -> None:
    config = read("-mm", "p.gguf", "--no-mmproj-offload", "-mmdev", "none")
    assert (config.mmproj, config.mmproj_offload, config.mmproj_device) == ("p.gguf", False, "none")
    assert Config().mmproj_auto and not read("--no-mmproj").mmproj_auto
    assert read(LLAMA_ARG_MMPROJ="p.gguf", LLAMA_ARG_NO_MMPROJ_AUTO="1") == Config(
        mmproj="p.gguf", mmproj_auto=False
    )
    assert read(MTMD_BACKEND_DEVICE="CUDA0").mmproj_device == "CUDA0"


def test_files_and_addresses_of_media(tmp_path: Path) -> None:
    config = read("--media-path", str(tmp_path), "--media-urls", "a.example, .b.example")
    assert config.media_path == str(tmp_path)
    assert config.media_urls == ("a.example", ".b.example")
    assert (Config().media_path, Config().media_urls) == (None, ())


# -- speech


def test_the_flags_of_speech(tmp_path: Path) -> None:
    recording = str(tmp_path / "ada.wav")
    config = read(
        *(
            "-m",
            "chat.gguf",
            "--tts",
            "user/voice:Q8_0",
            "--tts-mmproj",
            "https://a.example/p.gguf",
        ),
        *("--tts-voices", str(tmp_path), "--tts-speaker-file", recording, "--tts-lang", "de"),
    )
    assert config == Config(
        model="chat.gguf", tts="user/voice:Q8_0", tts_mmproj="https://a.example/p.gguf",
        tts_voices=str(tmp_path), tts_speaker_file=recording, tts_lang="de",
    )  # fmt: skip
    assert read(TRIOSERVE_TTS="v.gguf", TRIOSERVE_TTS_LANG="fr") == Config(
        tts="v.gguf", tts_lang="fr"
    )


def test_without_a_speech_model_its_options_have_no_effect(tmp_path: Path) -> None:
    for field in ("tts_mmproj", "tts_voices", "tts_speaker_file", "tts_lang"):
        fields: dict[str, Any] = {field: str(tmp_path)}
        for other in ({"model": "x.gguf"}, {"tts": "none"}):
            with pytest.raises(ConfigError, match=f"tts has to be a model for {field} to"):
                Config(**other, **fields)
        Config(model="x.gguf", tts="v.gguf", **fields)
    Config(tts_voices=str(tmp_path))  # for the voice of the bundled model
    with pytest.raises(ConfigError, match="tts has to be a model for tts_mmproj to"):
        Config(tts_mmproj="p.gguf")
    with pytest.raises(ConfigError, match="tts has to be a model for tts_lang to"):
        Config(tts_lang="de", embeddings=True)
    with pytest.raises(ConfigError, match="tts has no effect on embeddings"):
        Config(tts="v.gguf", embeddings=True)
    assert refused("-m", "x", "--tts-lang", "de") == (
        "--tts has to be a model for --tts-lang to have an effect"
    )
    assert refused("--tts-voices", "/no/such").startswith("--tts-voices is '/no/such', which is no")


# -- tools


def servers(**commands: str) -> str:
    return json.dumps({"mcpServers": {name: {"command": it} for name, it in commands.items()}})


def test_tools_are_off_unless_they_are_named_and_come_in_one_order() -> None:
    config = Config()
    assert not (config.builtin_tools or config.has_tools or config.has_mcp_proxy)
    assert Config(tools=("get_info", "read_file")).builtin_tools == ("read_file", "get_info")
    assert Config(tools=("all",)).builtin_tools == BUILTIN_TOOLS
    config = Config(agent=True)
    assert (config.builtin_tools, config.has_mcp_proxy) == (BUILTIN_TOOLS, True)


def test_servers_of_the_file_and_of_the_json_come_together(tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(servers(a="one", b="two"))
    config = Config(mcp_servers_config=str(file), mcp_servers_json=servers(b="three", c="four"))
    commands = {name: one["command"] for name, one in config.mcp_servers()["mcpServers"].items()}
    assert commands == {"a": "one", "b": "three", "c": "four"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mcp_servers_json": "{"}, "mcp_servers_json is not valid JSON"),
        ({"mcp_servers_json": "[]"}, "mcp_servers_json must be a JSON object with an object mcpS"),
        ({"mcp_servers_json": '{"mcpServers": []}'}, "mcp_servers_json must be a JSON object with"),
        ({"mcp_servers_config": "/no/such"}, "mcp_servers_config: /no/such cannot be read"),
    ],
)
def test_an_invalid_description_of_servers(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config(**fields).mcp_servers()
    assert error.value.message.startswith(message)


@pytest.mark.parametrize(
    ("fields", "extra"),
    [
        ({"tools": ("read_file",)}, "tools"),
        ({"mcp_servers_json": servers(one="a")}, "mcp"),
        ({"mmproj": "mmproj.gguf"}, "media"),
        ({"tts": "voice.gguf"}, "speech"),
    ],
)
def test_an_extra_has_to_be_installed(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], extra: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"install trioserve\[{extra}\]"):
        Config(**fields)
