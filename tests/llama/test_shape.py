"""Headers of any content: they are read in the server's process, which must not fail for them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import pytest

from tests.support.gguf_models import write_decoder
from trioserve.config import Config
from trioserve.errors import ModelLoadError
from trioserve.llama import room
from trioserve.llama.model import LlamaModel
from trioserve.llama.shape import MAX_LAYERS, read_shape

INT, FLOAT = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32
DOUBLE = gguf.GGUFValueType.FLOAT64
Entry = tuple[Any, gguf.GGUFValueType]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that writes a model in which one entry has another value."""

    def write(key: str, value: object, kind: gguf.GGUFValueType) -> Path:
        original = gguf.GGUFWriter.write_header_to_file

        def write_header(self: gguf.GGUFWriter) -> None:
            self.kv_data[0].pop(key, None)
            self.add_key_value(key, value, kind)
            original(self)

        with monkeypatch.context() as patch:
            patch.setattr(gguf.GGUFWriter, "write_header_to_file", write_header)
            write_decoder(tmp_path / "model.gguf", pooling=None)
        return tmp_path / "model.gguf"

    return write


@pytest.mark.parametrize("config", [{}, {"embeddings": True}, {"parallel": 9, "kv_unified": False}])
@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("block_count", 0, INT),
        ("block_count", 2**32 - 1, INT),
        ("block_count", math.nan, FLOAT),
        ("context_length", 0, INT),
        ("context_length", 2**32 - 1, INT),
        ("context_length", -math.inf, FLOAT),
        ("embedding_length", 0, INT),
        ("attention.head_count", 0, INT),
        ("attention.head_count", -1.0, FLOAT),
        ("attention.head_count_kv", 2**31, INT),
        ("attention.sliding_window", 2**32 - 1, INT),
        ("expert_used_count", 2**32 - 1, INT),
        ("ssm.conv_kernel", 1e308, DOUBLE),
    ],
)
def test_any_value_gives_a_plan_or_a_refusal(
    write: Any, key: str, value: object, kind: gguf.GGUFValueType, config: dict[str, Any]
) -> None:
    path = write(f"llama.{key}", value, kind)
    shape = read_shape(path)
    assert shape is not None and 0 <= len(shape.layers) <= MAX_LAYERS
    found, problem = None, ""
    try:
        found = room.plan(Config(model=str(path), **config))
    except ModelLoadError as error:
        problem = error.message
    assert "does not fit into memory" in problem or (found is not None and found.need.ram > 0)


@pytest.mark.parametrize(
    "key", ["feed_forward_length", "attention.key_length", "attention.value_length"]
)
def test_a_size_that_is_too_large_to_compute_with_does_not_fit(write: Any, key: str) -> None:
    path = write(f"llama.{key}", 1e308, DOUBLE)
    with pytest.raises(ModelLoadError, match="does not fit into memory"):
        room.plan(Config(model=str(path)))


def test_a_value_that_is_replaced_does_not_count(write: Any) -> None:
    path = write("llama.context_length", 0, INT)
    config = Config(model=str(path), override_kv=("llama.context_length=int:256",))
    found = room.plan(config)
    assert found is not None and found.need.n_ctx == 256
    with LlamaModel.load(config) as model:
        assert model.info.n_ctx_train == 256


def test_a_file_without_tensors_is_measured(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    shape = read_shape(tmp_path / "model.gguf")
    assert shape is not None and shape.weights == 0
