"""Projectors: loaded, limited, and refused where they cannot be used."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from tests.support.media_models import random_image, write_pair
from trioserve import llama
from trioserve.config import Config
from trioserve.errors import ModelLoadError
from trioserve.llama.backend import LlamaBackend
from trioserve.models import BUNDLED


def refused(config: Config) -> str:
    with pytest.raises(ModelLoadError) as caught, llama.load(config):
        pass
    return caught.value.message


def test_a_file_that_is_no_projector(tmp_path: Path) -> None:
    missing, text = tmp_path / "missing.gguf", tmp_path / "text.gguf"
    text.write_text("Hello there, this is no model.")
    assert "No such file" in refused(Config(mmproj=str(missing)))
    assert "is not a GGUF file" in refused(Config(mmproj=str(text)))
    assert refused(Config(mmproj=str(BUNDLED))) == (
        f"The file {BUNDLED} is no projector: its architecture is llama."
    )


def test_a_projector_of_another_model(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "mlp")
    message = refused(Config(mmproj=str(pair.projector)))  # the bundled model is wider
    assert message.startswith(f"The projector {pair.projector} cannot be loaded: ")
    assert "mismatch between text model (n_embd = 192) and mmproj (n_embd = 32)" in message


def test_a_model_without_the_tokens_around_tiles(tmp_path: Path) -> None:
    projector = write_pair(tmp_path, "idefics3").projector
    model = write_pair(tmp_path, "mlp").model
    message = refused(Config(model=str(model), mmproj=str(projector)))
    assert message.endswith("its vocabulary lacks tokens that go around images.")


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "mlp")
    pair.projector.write_bytes(pair.projector.read_bytes()[:-1000])
    assert refused(Config(**pair.settings)).startswith(f"The projector {pair.projector} cannot be ")


def test_a_physical_batch_has_room_for_an_image_that_is_decoded_whole(tmp_path: Path) -> None:
    config = Config(**write_pair(tmp_path, "gemma3").settings, ctx_size=256, threads=1, parallel=1)
    for size, n_ubatch in ((8, 16), (64, 64)):
        small = attrs.evolve(config, ubatch_size=size, batch_size=size, cache_seqs=0)
        with llama.load(small) as backend:
            assert isinstance(backend, LlamaBackend)
            assert (backend._context.n_ubatch, backend.n_batch) == (n_ubatch, n_ubatch)


def test_images_may_be_limited(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "qwen2vl")
    sizes = []
    for most in (-1, 20):
        config = Config(**pair.settings, ctx_size=256, threads=1, image_max_tokens=most)
        with llama.load(config) as backend:
            assert isinstance(backend, LlamaBackend)
            assert backend.projector is not None
            prompt = backend.projector.prepare([random_image(560, 560)], add_special=False)
            sizes.append(prompt.media[0][1].n_cells)
    assert sizes[0] == 400
    assert sizes[1] <= 20


def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = Config(**write_pair(tmp_path, "mlp").settings, mmproj_device="CUDA9")
    assert refused(config).startswith("There is no device 'CUDA9' to offload to")


@pytest.mark.parametrize("settings", [{"mmproj_device": "none"}, {"mmproj_offload": False}])
def test_the_cpu_may_be_asked_for(tmp_path: Path, settings: dict[str, object]) -> None:
    config = Config(**write_pair(tmp_path, "mlp").settings, **settings, threads=1)  # type: ignore[arg-type]
    with llama.load(config) as backend:
        assert isinstance(backend, LlamaBackend)
        assert backend.projector is not None
