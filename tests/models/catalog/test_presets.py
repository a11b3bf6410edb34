"""Files of presets."""

from __future__ import annotations

from pathlib import Path

import pytest

from trioserve.errors import ConfigError
from trioserve.models.catalog.presets import Preset, read_presets


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "presets.ini"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_file_of_llama_servers_documentation(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
version = 1

; (Optional) This section provides global settings shared across all presets.
[*]
c = 8192
n-gpu-layers = 8

[ggml-org/MY-MODEL-GGUF:Q8_0]
; string value
chat-template = chatml
; numeric value
n-gpu-layers = 123
; flag value
jinja = true
; shorthand argument (for example, context size)
c = 4096
; environment variable name
LLAMA_ARG_CACHE_RAM = 0
model-draft = ./my-models/draft.gguf
model-draft = /Users/abc/my-models/draft.gguf

[custom_model]
model = /Users/abc/my-awesome-model-Q4_K_M.gguf
""",
    )
    everywhere, sections = read_presets(path)
    assert everywhere == Preset(
        {"ctx_size": ("--ctx-size", "8192"), "n_gpu_layers": ("--n-gpu-layers", "8")}
    )
    assert sections == {
        "ggml-org/MY-MODEL-GGUF:Q8_0": Preset(
            {
                "chat_template": ("--chat-template", "chatml"),
                "n_gpu_layers": ("--n-gpu-layers", "123"),
                "jinja": ("--jinja",),
                "ctx_size": ("--ctx-size", "4096"),
                "cache_ram": ("--cache-ram", "0"),
                "spec_draft_model": ("--spec-draft-model", "/Users/abc/my-models/draft.gguf"),
            }
        ),
        "custom_model": Preset({"model": ("--model", "/Users/abc/my-awesome-model-Q4_K_M.gguf")}),
    }


def options(tmp_path: Path, text: str) -> dict[str, tuple[str, ...]]:
    return dict(read_presets(write(tmp_path, f"[m]\n{text}"))[1]["m"].options)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("metrics = on", ("--metrics",)),
        ("metrics = 0", ()),
        ("jinja = false", ("--no-jinja",)),
        ("no-jinja = true", ("--no-jinja",)),
        ("no-jinja = false", ("--jinja",)),
        ("LLAMA_ARG_NO_JINJA = true", ("--no-jinja",)),
        ("nkvo = 1", ("--no-kv-offload",)),
        ("ctx_size = 512 # a comment", ("--ctx-size", "512")),
        ("samplers = top_k;top_p", ("--samplers", "top_k;top_p")),
        ("temp = 0.5", ("--temperature", "0.5")),
        ("r = a#b", ("--reverse-prompt", "a#b")),
    ],
)
def test_keys_and_values(tmp_path: Path, line: str, words: tuple[str, ...]) -> None:
    assert list(options(tmp_path, line).values()) == [words]


def test_settings_that_are_no_flags(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "[*]\nstop-timeout = 3\ndedup-cache-models = true\n"
        "[m]\nload-on-startup = true\n[n]\nstop-timeout = 0.5\n",
    )
    everywhere, sections = read_presets(path)
    assert everywhere == Preset(stop_timeout=3.0, dedup=True)
    assert sections["m"] == Preset(load_on_startup=True)
    assert sections["n"].over(everywhere) == Preset(stop_timeout=0.5, dedup=True)


def test_what_belongs_to_the_server_in_front_is_dropped(tmp_path: Path) -> None:
    assert options(tmp_path, "host = 0.0.0.0\nport = 1\napi-key = x\nmodels-max = 2\nc = 1") == {
        "ctx_size": ("--ctx-size", "1")
    }


def test_the_quantization_in_a_name_is_written_as_in_the_cache(tmp_path: Path) -> None:
    _, sections = read_presets(write(tmp_path, "[a/b:q8_0]\n[a/c:UD-q4_k_xl]\n[local:small]\n"))
    assert list(sections) == ["a/b:Q8_0", "a/c:Q4_K_XL", "local:small"]


def test_keys_without_a_section_are_a_preset_of_the_name_default(tmp_path: Path) -> None:
    _, sections = read_presets(write(tmp_path, "model = x.gguf\n[m]\n"))
    assert sections == {"default": Preset({"model": ("--model", "x.gguf")}), "m": Preset()}


def test_a_flag_without_effect_is_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert options(tmp_path, "warmup = true") == {}
    assert caplog.messages == [
        f"{tmp_path / 'presets.ini'}: [m] warmup has no effect: the model is not warmed up"
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("ctx-siz = 1", "ctx-siz is not a flag of trioserve; did you mean ctx-size?"),
        ("c = many", "c: 'many' is not an integer"),
        ("c = -5", "c must be at least 0, not -5"),
        ("jinja = yes", "jinja must be true or false, not 'yes'"),
        ("load-on-startup = yes", "load-on-startup must be true or false, not 'yes'"),
        ("stop-timeout = soon", "stop-timeout: 'soon' is not a number"),
        ("stop-timeout = -1", "stop-timeout must be a number of seconds, not -1"),
        ("stop-timeout = inf", "stop-timeout must be a number of seconds, not inf"),
        (
            "hf-token = x",
            "hf-token: clients can see it here; use HF_TOKEN in the environment instead",
        ),
        (
            "mcp-servers-json = {}",
            "mcp-servers-json: clients can see it here; use mcp-servers-config instead",
        ),
        ("docker-repo = x", "docker-repo is a flag of llama-server that trioserve does not have "
            "yet: models come from the hub or from an address; see -hf and -mu"),
    ],
)  # fmt: skip
def test_a_wrong_key_or_value_is_told_with_its_place(
    tmp_path: Path, line: str, problem: str
) -> None:
    path = write(tmp_path, f"[m]\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        read_presets(path)
    assert caught.value.message == f"{path}: [m] {problem}"


def test_a_line_that_is_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, "[m]\nc = 1\nwhat is this\n")
    with pytest.raises(ConfigError) as caught:
        read_presets(path)
    assert (
        caught.value.message == f"{path}:3 is neither a section in brackets nor a key with a value"
    )


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models_preset: .* cannot be read: No such file"):
        read_presets(tmp_path / "none.ini")
