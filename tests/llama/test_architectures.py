"""Architectures other than the bundled model's: each runs as it does in llama.cpp's own loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import tiny_models
from tests.support.architectures import GENERATING
from trioserve import llama
from trioserve.config import Config
from trioserve.errors import ModelLoadError
from trioserve.llama.model import LlamaModel

CANNOT_BE_CUT = {"gemma3", "gpt-oss", "mamba2", "granitehybrid", "lfm2", "qwen3next"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def test_a_model_is_small_and_always_the_same(folder: Path) -> None:
    name = "granitehybrid"
    data = tiny_models.write_generating(folder, name).read_bytes()
    assert len(data) < 600_000
    assert tiny_models.write_generating(folder, name).read_bytes() == data
    assert tiny_models.write_generating(folder, name, seed=1).read_bytes() != data


@pytest.mark.parametrize("name", GENERATING)
def test_what_kind_it_is(folder: Path, name: str) -> None:
    path = tiny_models.write_generating(folder, name)
    with LlamaModel.load(Config(model=str(path))) as model:
        assert model.arch == name
        assert model.can_cut == (name not in CANNOT_BE_CUT)


@pytest.mark.parametrize("embeddings", [False, True])
def test_a_model_with_an_encoder_is_refused(folder: Path, embeddings: bool) -> None:
    path = tiny_models.write_t5(folder)
    with pytest.raises(ModelLoadError) as caught:
        llama.load(Config(model=str(path), embeddings=embeddings))
    assert caught.value.message == (
        f"The model in {path}, of the architecture t5, has an encoder that reads the prompt; "
        "such models are not supported."
    )


@pytest.mark.parametrize("name", ["gemma3", "llama"])
@pytest.mark.parametrize("swa_full", [False, True])
def test_with_a_window_a_batch_is_one_physical_one(folder: Path, name: str, swa_full: bool) -> None:
    """Else llama.cpp loses cells of the window where a batch finds no room, or nearly none."""
    path = tiny_models.write_generating(folder, name)
    config = Config(model=str(path), threads=1, ctx_size=1024, ubatch_size=128, swa_full=swa_full)
    with llama.load(config) as backend:
        assert backend.n_batch == (1024 if name == "llama" or swa_full else 128)
