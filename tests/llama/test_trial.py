"""A model is tried out before it serves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import structlog

from tests.support import media_models
from tests.support.draft_models import write_weak_draft
from tests.support.gguf_models import write_bert, write_decoder
from tests.support.lora_files import make_lora
from trioserve import llama
from trioserve.config import Config
from trioserve.errors import DecodeError, EncodeError, ModelLoadError
from trioserve.llama import load_here, trial
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.embedding import LlamaEmbedder
from trioserve.types import Adapters, MediaChunk


def load(**settings: object) -> LlamaBackend:
    backend = load_here(Config(threads=1, ctx_size=512, parallel=2, **settings))
    assert isinstance(backend, LlamaBackend)
    return backend


def spied(
    backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Adapters], list[str]]:
    """Note the adapters that are set, and the kinds of chunks that are encoded."""
    used: list[Adapters] = []
    encoded: list[str] = []
    set_adapters = backend.set_adapters

    def use(adapters: Adapters) -> None:
        used.append(adapters)
        set_adapters(adapters)

    monkeypatch.setattr(backend, "set_adapters", use)
    if (projector := backend.projector) is not None:
        encode = projector.encode

        def note(chunk: MediaChunk) -> object:
            encoded.append(chunk.kind)
            return encode(chunk)

        monkeypatch.setattr(projector, "encode", note)
    return used, encoded


def test_everything_is_used_once_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = [str(make_lora(tmp_path / f"{i}.gguf", seed=i)) for i in range(2)]
    draft = write_weak_draft(tmp_path / "draft.gguf")
    with load(lora=tuple(adapters), spec_draft_model=str(draft)) as backend:
        used, encoded = spied(backend, monkeypatch)
        trial.try_out(backend)
        assert used == [((0, 1.0),), ((1, 1.0),), ()]
        assert encoded == ["image", "audio"]
        assert {backend.memory.last(seq) for seq in range(backend.n_seqs)} == {-1}
        assert not len(backend.batch)
        used.clear()
        encoded.clear()
        trial.try_out(backend, everything=False)
        assert not used and not encoded


@pytest.mark.parametrize("kind", ["gemma3", "qwen2vl", "idefics3", "mixed"])
def test_kinds_of_projectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    with load(**media_models.write_pair(tmp_path, kind).settings) as backend:
        _, encoded = spied(backend, monkeypatch)
        trial.try_out(backend)
        assert encoded


def test_a_decode_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise DecodeError("it failed.")

    monkeypatch.setattr(LlamaBackend, "decode", lambda self: fail())
    closed: list[LlamaBackend] = []
    close = LlamaBackend.close

    def note(self: LlamaBackend) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(LlamaBackend, "close", note)
    with pytest.raises(ModelLoadError, match=r"The model in .* cannot be used: it failed\."):
        llama.load(Config(threads=1, ctx_size=256))
    assert len(closed) == 1


def test_numbers_that_are_not_finite_are_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(weights: dict[str, object]) -> None:
        weights["output_norm.weight"] = float("nan") * weights["output_norm.weight"]  # type: ignore[operator]

    path = write_decoder(tmp_path / "nan.gguf", pooling=None, change=spoil)
    with load(model=str(path)) as backend, structlog.testing.capture_logs() as lines:
        trial.try_out(backend)
    assert "the model gives bad numbers" in [line["event"] for line in lines]

    def encode(chunk: MediaChunk) -> None:
        raise EncodeError("Numbers that are not finite.")

    with load() as backend, structlog.testing.capture_logs() as lines:
        monkeypatch.setattr(backend.projector, "encode", encode)
        trial.try_out(backend)
    events = [line["event"] for line in lines if line["log_level"] == "warning"]
    assert events == 2 * ["the projector gives bad numbers"]


@pytest.mark.parametrize("pooling", ["mean", "none"])
def test_models_for_embeddings(tmp_path: Path, pooling: str) -> None:
    texts: list[Sequence[int]] = []
    for path in (write_bert(tmp_path / "bert.gguf").path, write_decoder(tmp_path / "causal.gguf")):
        config = Config(model=str(path), embeddings=True, pooling=pooling, threads=1)
        embedder = load_here(config)
        assert isinstance(embedder, LlamaEmbedder)
        try:
            trial.try_out(embedder)
            texts.append(embedder.vocab.tokenize("cat"))
            assert not len(embedder.batch)
        finally:
            embedder.close()
    assert all(texts)
