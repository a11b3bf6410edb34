"""The memory need of a model, without loading it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import attrs
import pytest

from tests.support import gguf_models, media_models, tiny_models
from tests.support.lora_files import make_lora
from tests.support.speech_models import SpeechPair, write_pocket, write_qwen
from trioserve import llama
from trioserve.config import Config
from trioserve.errors import BackendMismatchError, ModelLoadError
from trioserve.llama import estimate as module, layout, library
from trioserve.llama.context import Context, generation_params, open_context
from trioserve.llama.embedding import LlamaEmbedder, embedding_params
from trioserve.llama.estimate import measure
from trioserve.llama.library import lib
from trioserve.llama.model import LlamaModel
from trioserve.llama.speech.speaker import size_of
from trioserve.models import BUNDLED
from trioserve.models.speech import SpeechFiles


def really(config: Config) -> tuple[int, int, int]:
    """Return the bytes that llama.cpp allocates for the model and its context."""
    lines: list[str] = []
    with LlamaModel.load(config) as model, library.listening(lines.append):
        if config.serves_embeddings:
            Context(model, embedding_params(model, config)).close()
        else:
            open_context(model, config).close()
        return (lib.llama_model_size(model.handle), *module._sizes(lines))


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_unified": True},
        {"ctx_size": 512, "parallel": 2, "kv_unified": True},
        {"ctx_size": 1024, "kv_unified": False, "cache_type_k": "q8_0", "flash_attn": "on"},
        {"ubatch_size": 64, "repack": False, "parallel": 1},
    ],
)
def test_it_is_what_is_allocated(fields: dict[str, object]) -> None:
    config = Config(embd_ctx_size=0, threads=1, mmproj_auto=False, tts="none", **fields)
    found = measure(config)
    assert (found.weights, found.cache, found.compute) == really(config)
    assert found.cache > 0
    assert found.compute > 0
    assert found.n_ctx == (config.ctx_size or 4096)
    assert found.total == found.weights + found.cache + found.compute


def test_of_an_elastic_cache_the_cells_that_may_be_written_to_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config(
        embd_ctx_size=0, threads=1, mmproj_auto=False, tts="none", parallel=4, ctx_size=2048
    )
    found, (_, addresses, _) = measure(config), really(config)
    assert found.n_ctx == 2048
    assert 2 * found.cache == addresses, "its tokens, and as many in copies"
    monkeypatch.setattr(layout, "free_memory", lambda: 0)  # for copies
    assert 4 * measure(config).cache == addresses


@pytest.mark.parametrize("name", ["gemma3", "granitehybrid"])
def test_of_every_kind_of_memory(tmp_path: Path, name: str) -> None:
    path = str(tiny_models.write_generating(tmp_path, name))
    config = Config(embd_ctx_size=0, model=path, threads=1, kv_unified=True)
    found = measure(config)
    assert (found.weights, found.cache, found.compute) == really(config)
    assert found.cache > 0


def test_of_an_elastic_cache_windows_count_whole(tmp_path: Path) -> None:
    path = str(tiny_models.write_generating(tmp_path, "gemma3"))
    config = Config(embd_ctx_size=0, model=path, threads=1, parallel=4)
    lines: list[str] = []
    with LlamaModel.load(config) as model, library.listening(lines.append):
        open_context(model, config).close()
    windows, (whole, _) = module._windows(lines), module._sizes(lines)
    assert 0 < windows < whole
    assert measure(config).cache == pytest.approx((whole - windows) / 2 + windows, abs=2)


def test_of_embeddings(tmp_path: Path) -> None:
    path = gguf_models.write_bert(tmp_path / "bert.gguf").path
    config = Config(embd_ctx_size=0, model=str(path), embeddings=True, threads=1)
    found = measure(config)
    assert (found.weights, found.cache, found.compute) == really(config)
    assert found.cache == 0


def test_a_context_for_embeddings_beside_text_is_counted() -> None:
    alone = Config(embd_ctx_size=0, threads=1, mmproj_auto=False, tts="none", ctx_size=2048)
    both = attrs.evolve(alone, embd_ctx_size=512)
    lines: list[str] = []
    with LlamaModel.load(alone) as model, library.listening(lines.append):
        LlamaEmbedder.beside(model, both).close()
    cache, compute = module._sizes(lines)
    one, two = measure(alone), measure(both)
    assert (two.weights, two.cache, two.compute) == (
        one.weights, one.cache + cache, one.compute + compute
    )  # fmt: skip
    assert cache > 0 and compute > 0


def test_draft_models_and_adapters_are_counted(tmp_path: Path) -> None:
    alone = measure(Config(embd_ctx_size=0, threads=1, mmproj_auto=False, tts="none"))
    both = measure(
        Config(
            embd_ctx_size=0, threads=1, mmproj_auto=False, tts="none", spec_draft_model=str(BUNDLED)
        )
    )
    assert both.weights == 2 * alone.weights
    assert both.cache > alone.cache
    adapter = make_lora(tmp_path / "a.gguf")
    with_adapter = measure(
        Config(embd_ctx_size=0, threads=1, mmproj_auto=False, tts="none", lora=(str(adapter),))
    )
    assert with_adapter.weights == alone.weights + adapter.stat().st_size


def test_a_projector_is_counted(tmp_path: Path) -> None:
    pair = media_models.write_pair(tmp_path, "mlp")
    alone = measure(Config(embd_ctx_size=0, model=str(pair.model), ctx_size=256))
    both = measure(Config(**pair.settings, ctx_size=256, embd_ctx_size=0))
    assert both.weights - alone.weights == pair.projector.stat().st_size


def test_what_does_not_fit_is_only_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "free_memory", lambda: 2**20)
    config = Config(embd_ctx_size=0, threads=1)
    assert measure(config).cache > 2**20
    with pytest.raises(ModelLoadError, match="does not fit"), LlamaModel.load(config) as model:
        generation_params(model, config)


def test_a_context_that_cannot_even_be_counted() -> None:
    with pytest.raises(ModelLoadError, match="context of 2147483392 tokens does not fit"):
        measure(Config(embd_ctx_size=0, threads=1, ctx_size=2**31 - 257))


def test_a_log_without_sizes_is_not_taken_for_nothing() -> None:
    with pytest.raises(BackendMismatchError, match="does not log the sizes"):
        module._sizes(["llama_kv_cache: size =   12.00 MiB (  4096 cells,   4 layers"])


MEASURE = """
import resource
from pathlib import Path
from trioserve.config import Config
from trioserve.llama.estimate import measure

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

measure(Config(threads=1))  # what is loaded once
before = resident()
found = measure(Config(embd_ctx_size=0, threads=1, ctx_size=2**20))
print(found.cache, resident() - before)
"""


@pytest.mark.system
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_next_to_nothing_is_allocated() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True)
    cache, grown = map(int, done.stdout.splitlines()[-1].split())
    assert cache > 2**29
    assert grown < cache / 4


@pytest.mark.parametrize("write", [write_pocket, write_qwen])
def test_a_model_that_speaks_counts(tmp_path: Path, write: Callable[[Path], SpeechPair]) -> None:
    pair = write(tmp_path)
    alone = measure(Config(embd_ctx_size=0, threads=1, mmproj_auto=False, tts="none"))
    both = measure(Config(embd_ctx_size=0, threads=1, mmproj_auto=False, **pair.settings))
    config = Config(threads=1, **pair.settings)
    with closing(llama.load_speaker(config, SpeechFiles(pair.model, pair.projector))) as speaker:
        n_cells, width = speaker.n_ctx, pair.model.stat().st_size
    assert both.n_ctx == alone.n_ctx
    assert both.cache - alone.cache >= n_cells * 2 * 2 * 2 * 16  # two layers of keys and values
    weights = both.weights - alone.weights
    assert pair.projector.stat().st_size < weights < width + pair.projector.stat().st_size
    assert both.compute > alone.compute
    by_headers = size_of(SpeechFiles(pair.model, pair.projector), config)
    assert by_headers >= weights + both.cache - alone.cache
