from __future__ import annotations

import gc
from pathlib import Path

import pytest
import structlog

from tests.support.drafted import write_head
from trioserve import llama
from trioserve.config import Config
from trioserve.engine.backend import Backend
from trioserve.errors import EngineError, ModelLoadError, ServerClosingError
from trioserve.llama import library
from trioserve.llama.backend import LlamaBackend
from trioserve.types import SamplingParams

CONFIG = Config(threads=1, ctx_size=256, parallel=2, cache_seqs=0)


def test_it_is_a_backend() -> None:
    with llama.load(CONFIG) as loaded:
        backend: Backend = loaded
        assert isinstance(backend, LlamaBackend)
        assert (backend.n_ctx, backend.n_ctx_seq, backend.n_batch) == (256, 256, 256)
        assert (backend.n_slots, backend.n_seqs) == (2, 2)
        assert backend.can_cut
        assert backend.info.n_vocab == backend.vocab.n_tokens


def test_a_sequence_holds_no_more_than_the_model_was_trained_for() -> None:
    with llama.load(Config(threads=1, ctx_size=8192)) as backend:
        assert (backend.n_ctx, backend.n_ctx_seq) == (8192, 4096)


def test_a_context_that_does_not_fit_frees_the_model() -> None:
    with pytest.raises(ModelLoadError):
        llama.load(Config(ctx_size=2**31 - 1))
    gc.collect()  # a model that was not closed would warn, and a warning fails the test


def test_closing_frees_all_and_twice_is_fine() -> None:
    backend = llama.load(CONFIG)
    sampler = backend.sampler(SamplingParams(), (1, 2))
    row = backend.batch.add(1, 0, 0, logits=True)
    backend.decode()
    assert sampler.sample(row) in range(backend.vocab.n_tokens)
    backend.close()
    backend.close()
    with pytest.raises(EngineError, match="closed"):
        sampler.sample(row)
    with pytest.raises(EngineError, match="closed"):
        backend.decode()
    with pytest.raises(EngineError, match="closed"):
        backend.memory.last(0)
    with pytest.raises(ServerClosingError):
        backend.vocab.tokenize("late")
    sampler.close()


def test_samplers_context_and_model_are_freed_in_this_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    freed: list[str] = []
    backend = llama.load(CONFIG)
    for name in ("llama_sampler_free", "llama_free", "llama_model_free"):
        real = getattr(library.lib, name)

        def free(handle: object, name: str = name, real: object = real) -> None:
            freed.append(name)
            real(handle)  # type: ignore[operator]

        monkeypatch.setattr(library.lib, name, free)
    keep = [backend.sampler(SamplingParams(), ()) for _ in range(3)]
    keep[0].close()
    backend.close()
    assert freed == ["llama_sampler_free"] * 3 + ["llama_free", "llama_model_free"]


def test_a_forgotten_sampler_warns() -> None:
    with llama.load(CONFIG) as backend:
        sampler = backend.sampler(SamplingParams(), ())
        with pytest.warns(ResourceWarning, match="was not closed"):
            sampler.__del__()


def test_two_backends_live_side_by_side() -> None:
    with llama.load(CONFIG) as one, llama.load(CONFIG) as other:
        for backend in (one, other):
            backend.batch.extend((1, 2, 3), 0, 1)
            backend.decode()
        one.memory.remove(1, 0)
        assert (one.memory.last(1), other.memory.last(1)) == (-1, 2)


@pytest.mark.parametrize(
    "used", ["lazy_pages", "encoder_threads", "no_logits", "staged", "nothing"]
)
def test_the_log_names_what_is_beyond_llama_cpps_interface(tmp_path: Path, used: str) -> None:
    """A llama.cpp that no longer allows one of these means fails here."""
    settings: dict[str, dict[str, object]] = {
        "lazy_pages": {"parallel": 16, "ctx_size": 4096},
        "encoder_threads": {"mmproj_auto": True},
        "no_logits": {"embeddings": True, "pooling": "last"},
    }
    if used == "staged":
        settings[used] = write_head(tmp_path, "glm4moe", is_good=False)
    config = {"ctx_size": 256, "parallel": 1, "mmproj_auto": False, **settings.get(used, {})}
    with structlog.testing.capture_logs() as lines:
        llama.load(Config(**{"threads": 1, **config})).close()
    event = "beyond llama.cpp's interface"
    assert [line["used"] for line in lines if line["event"] == event] == [used]
