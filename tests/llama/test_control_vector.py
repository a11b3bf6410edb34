"""Control vectors, with the bundled model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.support.configs import read, refused
from trioserve.config import Config
from trioserve.errors import ConfigError, ModelLoadError
from trioserve.llama import adapters
from trioserve.llama.backend import LlamaBackend
from trioserve.types import SamplingParams

N_EMBD, N_LAYER = 192, 6


def write(path: Path, tensors: Mapping[str, Any]) -> Path:
    writer = gguf.GGUFWriter(str(path), "controlvector")
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def directions(seed: int, layers: range = range(1, N_LAYER)) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {f"direction.{i}": rng.normal(0, 1.0, N_EMBD).astype(np.float32) for i in layers}


def tokens(**settings: Any) -> list[int]:
    """The first greedy tokens after a prompt."""
    backend = LlamaBackend.load(Config(threads=1, ctx_size=256, parallel=1, **settings))
    try:
        prompt = backend.vocab.tokenize("What is the capital of France?")
        sampler = backend.sampler(SamplingParams(temperature=0.0), prompt, None)
        row = backend.batch.extend(prompt, 0, 0)
        backend.batch.want_logits(row)
        drawn: list[int] = []
        for place in range(12):
            backend.decode()
            drawn.append(sampler.sample(row))
            backend.batch.clear()
            row = backend.batch.add(drawn[-1], len(prompt) + place, 0, logits=True)
        sampler.close()
        return drawn
    finally:
        backend.close()


def test_a_vector_changes_the_output_and_its_opposite_undoes_it(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", directions(1))
    plain = tokens()
    assert tokens(control_vector=(str(path),)) != plain
    assert tokens(control_vector=(f"{path}:0",)) == plain
    assert tokens(control_vector=(str(path), f"{path}:-1")) == plain
    scaled = tokens(control_vector=(f"{path}:0.5", f"{path}:0.5"))
    assert scaled == tokens(control_vector=(str(path),))


def test_only_layers_in_the_range_are_changed(tmp_path: Path) -> None:
    given = directions(1, range(2, 4))
    both = write(tmp_path / "both.gguf", given)
    del given["direction.2"]
    third = write(tmp_path / "third.gguf", given)
    alone = tokens(control_vector=(f"{third}:4",))
    assert tokens(control_vector=(f"{both}:4",), control_vector_layer_range=(3, 3)) == alone
    assert tokens(control_vector=(f"{both}:4",)) != alone


def test_the_values_of_a_file_are_read(tmp_path: Path) -> None:
    given = directions(3, range(2, 9))  # 7 and 8: layers that this model lacks
    rows = adapters.read_control_vector(write(tmp_path / "a.gguf", given), N_LAYER, N_EMBD)
    assert not rows[0].any()
    for layer in range(2, N_LAYER + 1):
        np.testing.assert_array_equal(rows[layer - 1], given[f"direction.{layer}"])


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({}, "has no tensors"),
        ({"direction.0": np.zeros(N_EMBD, dtype=np.float32)}, "has the tensor 'direction.0'"),
        ({"weights": np.zeros(N_EMBD, dtype=np.float32)}, "has the tensor 'weights'"),
        ({"direction.1": np.zeros(64, dtype=np.float32)}, "must have 192 values of type F32"),
        ({"direction.1": np.zeros(N_EMBD, dtype=np.float16)}, "must have 192 values of type F32"),
        ({"direction.1": np.zeros((2, N_EMBD), dtype=np.float32)}, "must have 192 values"),
    ],
)
def test_a_file_that_is_no_control_vector_for_the_model(
    tmp_path: Path, tensors: dict[str, Any], why: str
) -> None:
    path = write(tmp_path / "bad.gguf", tensors)
    with pytest.raises(ModelLoadError, match=why):
        adapters.read_control_vector(path, N_LAYER, N_EMBD)


def test_a_damaged_file(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.gguf", directions(1)).read_bytes()
    (tmp_path / "b.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelLoadError, match="it is damaged"):
        adapters.read_control_vector(tmp_path / "b.gguf", N_LAYER, N_EMBD)
    with pytest.raises(ModelLoadError, match="No such file"):
        adapters.read_control_vector(tmp_path / "none.gguf", N_LAYER, N_EMBD)


def test_the_flags_are_those_of_llama_server() -> None:
    config = read("--control-vector", "a.gguf,b.gguf", "--control-vector-scaled", "c.gguf:0.5",
                  "--control-vector-layer-range", "2", "5")  # fmt: skip
    assert config.control_vector_files == (("a.gguf", 1.0), ("b.gguf", 1.0), ("c.gguf", 0.5))
    assert config.control_vector_layer_range == (2, 5)
    assert read("--control-vector-layer-range", "2,5").control_vector_layer_range == (2, 5)
    assert "needs a value" in refused("--control-vector-layer-range", "2")
    with pytest.raises(ConfigError, match="first and the last layer"):
        Config(control_vector_layer_range=(5, 2))
    with pytest.raises(ConfigError, match="no effect on embeddings"):
        Config(control_vector=("a.gguf",), embeddings=True)
