"""Which model, and where it comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.configs import read, refused
from trioserve.config import Config
from trioserve.config.flags import FLAGS, PRESETS
from trioserve.errors import ConfigError


def test_a_model_on_the_hub() -> None:
    config = read("-hf", "user/repo:Q8_0", "-hff", "x.gguf", "-hft", "secret", "--offline")
    assert config == Config(hf_repo="user/repo:Q8_0", hf_file="x.gguf", hf_token="secret",
                            offline=True)  # fmt: skip
    assert read(LLAMA_ARG_HF_REPO="user/repo", HF_TOKEN="t").hf_token == "t"
    assert read("-hfd", "user/draft").spec_draft_hf == "user/draft"
    assert read("-mu", "http://x/y.gguf", "-m", "z.gguf").model_url == "http://x/y.gguf"


def test_what_names_the_model() -> None:
    assert Config().model_named is None
    assert Config(model="x.gguf").model_named == "x.gguf"
    assert Config(hf_repo="user/repo").model_named == "user/repo"
    assert Config(model="x.gguf", model_url="http://x/y.gguf").model_named == "http://x/y.gguf"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"hf_repo": "a/b", "model": "x"}, "hf_repo names a model, so"),
        ({"hf_repo": "a/b", "model_url": "http://x"}, "hf_repo names a model, so"),
        ({"hf_file": "x.gguf"}, "hf_file has no effect without hf_repo"),
        ({"spec_draft_hf": "a/b", "spec_draft_model": "x"}, "spec_draft_hf names a draft model"),
        ({"spec_draft_hf": "a/b", "embeddings": True}, "has no effect on embeddings"),
    ],
)
def test_what_does_not_go_together(fields: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Config(**fields)


def test_a_draft_model_on_the_hub_is_a_draft_model() -> None:
    config = read("-hfd", "user/draft", "--spec-draft-n-max", "4", "--spec-type", "draft-simple")
    assert config.draft_types == ("draft-simple",)
    assert refused("--spec-draft-n-max", "4").endswith("has no effect without --spec-draft-model")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_can_be_used_and_what_follows_it_wins(name: str) -> None:
    fields = PRESETS[name][1]
    config = read(name, "--port", "1", "-c", "2048")
    assert config.hf_repo == fields["hf_repo"]
    assert config.hf_file == fields.get("hf_file")
    assert (config.port, config.ctx_size) == (1, 2048)
    assert next(one for one in FLAGS if name in one.names).group == "Presets"


def test_a_preset_sets_what_llama_server_does() -> None:
    config = read("--gpt-oss-20b-default")
    assert (config.port, config.batch_size, config.ubatch_size) == (8013, 32768, 2048)
    assert (config.parallel, config.ctx_size) == (2, 262144)
    sampling = config.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert sampling.min_p == 0.01
    assert read("--embd-gemma-default").embeddings
    draft = read("--fim-qwen-7b-spec").spec_draft_hf
    assert draft == "ggml-org/Qwen2.5-Coder-0.5B-Q8_0-GGUF"


def test_a_preset_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trioserve.toml"
    path.write_text("vision-gemma-4b-default = true\nport = 5\nvision-gemma-12b-default = false\n")
    config = read("--config", str(path))
    assert (config.hf_repo, config.port) == ("ggml-org/gemma-3-4b-it-qat-GGUF", 5)
