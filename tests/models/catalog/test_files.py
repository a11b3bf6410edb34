"""Models of a directory, and the properties in their files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from tests.support.gguf_models import write_decoder
from trioserve.config import Config
from trioserve.errors import ConfigError, ModelLoadError
from trioserve.llama.model import LlamaModel
from trioserve.models import BUNDLED
from trioserve.models.catalog import describe
from trioserve.models.catalog.files import models_in


def make(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.touch()


def found(folder: Path) -> dict[str, list[str]]:
    return {
        one.name: [str(path.relative_to(folder)) for path in one.files] for one in models_in(folder)
    }


def test_the_directory_of_llama_servers_documentation(tmp_path: Path) -> None:
    parts = [f"Kimi/Kimi-IQ1_S-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    make(
        tmp_path,
        "llama-3.2-1b-Q4_K_M.gguf",
        "gemma-3-4b-it-Q8_0/gemma.gguf",
        "gemma-3-4b-it-Q8_0/mmproj-F16.gguf",
        *parts,
    )
    assert found(tmp_path) == {
        "llama-3.2-1b-Q4_K_M": ["llama-3.2-1b-Q4_K_M.gguf"],
        "gemma-3-4b-it-Q8_0": ["gemma-3-4b-it-Q8_0/gemma.gguf"],
        "Kimi": parts,
    }
    by_name = {one.name: one for one in models_in(tmp_path)}
    assert by_name["gemma-3-4b-it-Q8_0"].mmproj == tmp_path / "gemma-3-4b-it-Q8_0/mmproj-F16.gguf"
    assert by_name["Kimi"].mmproj is None


def test_names_that_are_no_unicode(tmp_path: Path) -> None:
    for name in (b"bad\xff.gguf", b"bad\xfe.gguf", "süß.gguf".encode(), b"dir\xff/x.gguf"):
        path = Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name)))
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert sorted(found(tmp_path)) == ["bad\\xfe", "bad\\xff", "dir\\xff", "süß"]


def test_what_is_no_model_is_left_out(tmp_path: Path) -> None:
    make(
        tmp_path,
        "readme.md",
        "x.gguf.incomplete",
        "._x.gguf",
        "mmproj-x.gguf",
        "mtp-x.gguf",
        "dflash-x.gguf",
        ".hidden/x.gguf",
        "empty/notes.txt",
        "only/mmproj.gguf",
    )
    assert found(tmp_path) == {}


def test_several_models_in_a_folder_are_told_apart(tmp_path: Path) -> None:
    make(tmp_path, "qwen/a-Q4.gguf", "qwen/a-Q8.GGUF", "qwen/deeper/b.gguf")
    assert found(tmp_path) == {"qwen/a-Q4": ["qwen/a-Q4.gguf"], "qwen/a-Q8": ["qwen/a-Q8.GGUF"]}


def test_parts_beside_other_files(tmp_path: Path) -> None:
    make(tmp_path, "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "a.gguf")
    assert found(tmp_path) == {
        "a": ["a.gguf"],
        "big": ["big-00001-of-00002.gguf", "big-00002-of-00002.gguf"],
    }


def test_a_missing_part_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, "big-00001-of-00003.gguf", "big-00003-of-00003.gguf")
    assert found(tmp_path) == {}
    path = tmp_path / "big-00001-of-00003.gguf"
    assert caplog.messages == [f"{path} is left out, for big-00002-of-00003.gguf is missing"]


def test_links_are_followed(tmp_path: Path) -> None:
    make(tmp_path, "elsewhere/x.bin", "models/y.txt")
    (tmp_path / "models" / "x.gguf").symlink_to(tmp_path / "elsewhere" / "x.bin")
    (tmp_path / "models" / "gone.gguf").symlink_to(tmp_path / "nowhere")
    assert found(tmp_path / "models") == {"x": ["x.gguf"]}


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models_dir: .* cannot be read: No such file"):
        models_in(tmp_path / "none")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_cannot_be_read_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, "a.gguf", "secret/b.gguf")
    (tmp_path / "secret").chmod(0)
    assert found(tmp_path) == {"a": ["a.gguf"]}
    assert "cannot be read: Permission denied" in caplog.text


def test_it_says_what_llama_cpp_says() -> None:
    found = describe(BUNDLED)
    with LlamaModel.load(Config()) as model:
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
