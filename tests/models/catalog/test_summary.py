"""What is in a model file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from tests.support.gguf_models import write_decoder
from trioserve.config import Config
from trioserve.errors import ModelLoadError
from trioserve.llama.model import Model
from trioserve.models import BUNDLED
from trioserve.models.catalog import describe


def test_it_says_what_llama_cpp_says() -> None:
    found = describe(BUNDLED)
    with Model.load(Config()) as model:
        info = model.info
    assert found.path == BUNDLED
    assert found.architecture == info.metadata["general.architecture"]
    assert (found.n_params, found.n_ctx_train, found.n_embd) == (
        info.n_params,
        info.n_ctx_train,
        info.n_embd,
    )
    assert (found.n_layer, found.n_vocab) == (info.n_layer, info.n_vocab)
    assert found.template == info.chat_template
    assert found.quantization in info.ftype
    assert (found.n_files, found.size) == (1, BUNDLED.stat().st_size)


def test_what_a_file_does_not_say_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(str(path), "none")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = describe(path)
    assert (found.name, found.template, found.licence, found.quantization) == ("", "", "", "")
    assert (found.n_params, found.n_ctx_train, found.n_experts, found.languages) == (0, 0, 0, ())


def test_the_parts_of_a_model_are_added(tmp_path: Path) -> None:
    path = write_decoder(tmp_path / "whole.gguf")
    whole = describe(path)
    for i in (1, 2):
        (tmp_path / f"m-0000{i}-of-00002.gguf").write_bytes(path.read_bytes())
    found = describe(tmp_path / "m-00001-of-00002.gguf")
    assert (found.n_files, found.n_params, found.size) == (2, 2 * whole.n_params, 2 * whole.size)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelLoadError, match=r"00002-of-00002\.gguf cannot be read: No such file"):
        describe(tmp_path / "m-00001-of-00002.gguf")


@pytest.mark.system
def test_looking_at_a_file_loads_no_library() -> None:
    code = (
        "import sys; from pathlib import Path; from trioserve.models import BUNDLED; "
        "from trioserve.models.catalog import describe; describe(BUNDLED); "
        "sys.exit('llama_cpp' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
