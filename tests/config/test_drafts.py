"""The fields of the draft model."""

from __future__ import annotations

import pytest

from tests.support.configs import read, refused
from trioserve.config import Config
from trioserve.errors import ConfigError


def test_the_flags_are_those_of_llama_server() -> None:
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
def test_without_a_draft_model_its_options_have_no_effect(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="has no effect without spec_draft_model"):
        Config(**fields)
    Config(spec_draft_model="d.gguf", **fields)


def test_values_that_cannot_be() -> None:
    for fields, message in (
        ({"spec_draft_n_max": 0}, "spec_draft_n_max must be at least 1"),
        ({"spec_draft_n_min": 17}, "spec_draft_n_min must be at most spec_draft_n_max"),
        ({"spec_draft_p_min": 1.5}, "spec_draft_p_min must be at most 1"),
        ({"spec_draft_override_tensor": ("x",)}, "spec_draft_override_tensor must be PATTERN="),
        ({"embeddings": True}, "spec_draft_model has no effect on embeddings"),
    ):
        with pytest.raises(ConfigError, match=message):
            Config(spec_draft_model="d.gguf", **fields)


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("--draft-p-split", "a draft is one line of guesses, not a tree"),
        ("--spec-synth-len", "drafts that are accepted at random make an output that is wrong"),
        ("--cpu-mask-draft", "threads are left to the operating system"),
        ("--draft-max", "llama-server has removed it"),
    ],
)
def test_what_is_refused_is_refused_with_the_reason(flag: str, why: str) -> None:
    assert why in refused(flag, "1")
