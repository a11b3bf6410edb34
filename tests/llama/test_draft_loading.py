"""Draft models that go with a model, and those that do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from tests.support import fim_model, gguf_models, tiny_models
from trioserve import llama
from trioserve.config import Config
from trioserve.errors import ModelLoadError
from trioserve.llama import context, layout
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.drafter import LlamaDrafter, draft_config
from trioserve.llama.library import lib
from trioserve.models import BUNDLED


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "qwen3", "gemma3", "mamba2"):
        tiny_models.write_generating(folder, name)
    tiny_models.write_t5(folder)
    return folder


def load(model: Path | None, draft: Path, **config: object) -> LlamaBackend:
    name = None if model is None else str(model)
    config = {"ctx_size": 512, "parallel": 2} | config
    backend = llama.load(Config(threads=1, model=name, spec_draft_model=str(draft), **config))
    assert isinstance(backend, LlamaBackend)
    return backend


def refusal(model: Path | None, draft: Path, **config: object) -> str:
    """Load a pair that does not go together; returns what the error says of the draft model."""
    with pytest.raises(ModelLoadError) as caught:
        load(model, draft, **config)
    message = caught.value.message
    assert str(draft) in message
    assert message.endswith(".")
    return message


def changed(source: Path, path: Path, change: Callable[[Any], None]) -> Path:
    path.write_bytes(source.read_bytes())
    change(GGUFReader(path, "r+"))
    return path


@pytest.mark.parametrize("draft", ["qwen3", "gemma3"])
def test_a_draft_model_of_the_same_vocabulary(folder: Path, draft: str) -> None:
    backend = load(folder / "llama.gguf", folder / f"{draft}.gguf")
    (drafter,) = backend.drafters
    assert isinstance(drafter, LlamaDrafter)
    assert (drafter.name, drafter.is_free) == ("draft-simple", False)
    backend.close()


def test_the_other_model_has_logits_for_drafts_and_the_draft_model_has_not(folder: Path) -> None:
    path = folder / "llama.gguf"
    with load(path, path, kv_unified=False) as backend:
        assert backend.n_outputs == 2 + context.DRAFT_ROWS
        (drafter,) = backend.drafters
        assert isinstance(drafter, LlamaDrafter)
        assert drafter._context.n_outputs == 2


@pytest.mark.parametrize("model", ["gemma3", "mamba2", "llama"])
@pytest.mark.parametrize("draft", ["gemma3", "mamba2"])
def test_sequences_that_cannot_be_cut_may_have_drafts(folder: Path, model: str, draft: str) -> None:
    with load(folder / f"{model}.gguf", folder / f"{draft}.gguf") as backend:
        assert len(backend.drafters) == 1


def test_a_draft_model_with_an_encoder(folder: Path) -> None:
    assert "has an encoder" in refusal(folder / "llama.gguf", folder / "t5.gguf")


def test_a_draft_model_for_embeddings(folder: Path, tmp_path: Path) -> None:
    bert = gguf_models.write_bert(tmp_path / "bert.gguf")
    assert "bert" in refusal(folder / "llama.gguf", bert.path)


def test_another_vocabulary(folder: Path, tmp_path: Path) -> None:
    message = refusal(None, folder / "llama.gguf")
    assert "its vocabulary is not that of the model in " in message
    fim_model.write(tmp_path / "fim.gguf")
    message = refusal(folder / "llama.gguf", tmp_path / "fim.gguf")
    assert message.endswith("it has 300 tokens, and not 512.")


def test_a_vocabulary_with_another_token(folder: Path, tmp_path: Path) -> None:
    def rename(reader: Any, token: int) -> None:
        field = reader.fields["tokenizer.ggml.tokens"]
        field.parts[field.data[token]][:] = ord("Q")

    path = folder / "llama.gguf"
    odd = changed(path, tmp_path / "odd.gguf", lambda reader: rename(reader, 300))
    message = refusal(path, odd)
    assert "token 300 is 'Q" in message
    odd = changed(path, tmp_path / "odd.gguf", lambda reader: rename(reader, 4))
    load(path, odd).close()


def test_a_vocabulary_that_begins_texts_differently(folder: Path, tmp_path: Path) -> None:
    def begin(reader: Any) -> None:
        field = reader.fields["tokenizer.ggml.add_bos_token"]
        field.parts[field.data[0]][0] = 1

    path = folder / "llama.gguf"
    message = refusal(path, changed(path, tmp_path / "odd.gguf", begin))
    assert message.endswith("it begins or ends a text with other tokens.")


def test_progress_goes_through_both_models() -> None:
    shares: list[float] = []

    def note(share: float) -> bool:
        shares.append(share)
        return True

    config = Config(threads=1, ctx_size=256, spec_draft_model=str(BUNDLED))
    backend = llama.load(config, progress=note)
    backend.close()
    assert shares == sorted(shares)
    assert shares[0] < 0.1
    assert shares[-1] == 1.0
    assert any(0.4 < share < 0.6 for share in shares)


def test_loading_can_be_cancelled_in_the_draft_model() -> None:
    config = Config(threads=1, ctx_size=256, spec_draft_model=str(BUNDLED))
    with pytest.raises(ModelLoadError, match="was cancelled"):
        llama.load(config, progress=lambda share: share <= 0.5)


def test_a_draft_model_for_which_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [2**40, 2**40]  # for the layout and the cache of the first model
    monkeypatch.setattr(layout, "free_memory", lambda: left.pop() if left else 0)
    message = refusal(None, BUNDLED)
    assert "The KV cache for 512 tokens does not fit" in message


def test_the_draft_model_is_run_as_its_flags_say(folder: Path) -> None:
    path = folder / "llama.gguf"
    with load(path, path) as backend:
        config = Config(
            spec_draft_model="d.gguf",
            spec_draft_threads=3,
            spec_draft_type_k="q8_0",
            spec_draft_ngl=2,
            spec_draft_device=("CUDA1",),
            spec_draft_override_tensor=("a=CPU",),
            spec_draft_n_cpu_moe=4,
            threads_batch=5,
            parallel=7,
            n_gpu_layers=9,
            rope_freq_scale=0.5,
            lora=("x.gguf",),
        )
        own = draft_config(config, backend._context)
    assert (own.model, own.spec_draft_model) == ("d.gguf", None)
    assert (own.threads, own.threads_batch) == (3, 3)
    assert (own.cache_type_k, own.cache_type_v) == ("q8_0", "f16")
    assert (own.n_gpu_layers, own.device, own.split_mode) == (2, ("CUDA1",), "layer")
    assert (own.override_tensor, own.n_cpu_moe) == (("a=CPU",), 4)
    assert (own.ctx_size, own.parallel, own.cache_seqs) == (512, 7, 0)
    assert (own.rope_freq_scale, own.lora, own.swa_full) == (0.5, (), True)


@pytest.mark.parametrize(("config", "expected"), [({}, 2), ({"spec_draft_threads": 1}, 1)])
def test_the_draft_model_follows_the_threads_of_the_other(
    folder: Path, config: dict[str, object], expected: int
) -> None:
    with load(folder / "llama.gguf", folder / "llama.gguf", **config) as backend:
        backend.set_threads(2)
        (drafter,) = backend.drafters
        assert lib.llama_n_threads(backend._context.handle) == 2
        assert lib.llama_n_threads(drafter._context.handle) == expected
