"""Architectures other than the bundled model's: each runs as it does in llama.cpp's own loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import tiny_models
from tests.support.architectures import GENERATING, WINDOW
from trioserve import llama
from trioserve.config import Config
from trioserve.errors import DecodeInterruptedError, ModelLoadError
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.library import lib
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


def logits_of(backend: LlamaBackend, *, interrupts: bool) -> list[float]:
    """Decode a text that is longer than the cache of the window; returns the last logits."""
    for start in range(0, 480, WINDOW):
        backend.batch.clear()
        tokens = [2 + (start + 7 * i) % 400 for i in range(WINDOW)]
        row = backend.batch.extend(tokens, start, 0)
        backend.batch.want_logits(row)
        if interrupts:
            backend.interrupt()
            with pytest.raises(DecodeInterruptedError):
                backend.decode()
        backend.decode()
    pointer = lib.llama_get_logits_ith(backend._context.handle, row)
    backend.memory.remove(0, 0)
    return list(pointer[: backend.vocab.n_tokens])


def test_an_interrupted_decode_loses_nothing_of_a_window(folder: Path) -> None:
    path = str(tiny_models.write_generating(folder, "gemma3"))
    with llama.load(Config(model=path, threads=1, ctx_size=512, ubatch_size=WINDOW)) as backend:
        assert isinstance(backend, LlamaBackend)
        expected = logits_of(backend, interrupts=False)
        assert logits_of(backend, interrupts=True) == expected


@pytest.mark.parametrize(("name", "n_seqs"), [("gemma3", 2), ("mamba2", 1)])
def test_a_decode_that_would_lose_something_is_not_interrupted(
    folder: Path, name: str, n_seqs: int
) -> None:
    path = str(tiny_models.write_generating(folder, name))
    with llama.load(Config(model=path, threads=1, ctx_size=512, parallel=2)) as backend:
        for seq in range(n_seqs):
            backend.batch.extend([3, 4, 5], 0, seq)
        backend.interrupt()
        backend.decode()
        backend.batch.clear()
        backend.batch.extend([6], 3, 0)
        backend.decode()  # nor is the next one
