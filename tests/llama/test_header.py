"""Files whose header would make llama.cpp end the process: refused, and by name."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest

from tests.support.gguf_models import write_decoder
from trioserve.config import Config
from trioserve.errors import ModelLoadError
from trioserve.llama import header, room
from trioserve.llama.model import LlamaModel
from trioserve.models import gguf as gguf_files

INT, FLOAT = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32
Entry = tuple[Any, gguf.GGUFValueType]

BAD: dict[str, list[Entry]] = {
    "llama.block_count": [(0, INT), (513, INT), (2**32 - 1, INT)],
    "llama.context_length": [(0, INT), (2**32 - 1, INT)],
    "llama.embedding_length": [(0, INT)],
    "llama.attention.layer_norm_rms_epsilon": [
        (math.nan, FLOAT),
        (math.inf, FLOAT),
        (-1.0, FLOAT),
        (1e30, FLOAT),
    ],
    "llama.attention.head_count": [(3, INT), (5, INT)],
    "llama.attention.head_count_kv": [(3, INT), (8, INT), (2**31, INT)],
    "llama.rope.freq_base": [(math.nan, FLOAT), (0.0, FLOAT)],
    "llama.rope.scaling.type": [("other", gguf.GGUFValueType.STRING)],
    "llama.expert_count": [(4, INT), (5000, INT)],
    "llama.expert_used_count": [(1, INT)],
    "llama.nextn_predict_layers": [(3, INT), (2**32 - 1, INT)],
    "llama.expert_group_count": [(1, INT)],
    "tokenizer.ggml.tokens": [(["a"] * 512, gguf.GGUFValueType.ARRAY)],
}


def write(path: Path, monkeypatch: pytest.MonkeyPatch, key: str, entry: Entry) -> None:
    """Write a model in which one entry has this value."""
    original = gguf.GGUFWriter.write_header_to_file

    def write_header(self: gguf.GGUFWriter) -> None:
        self.kv_data[0].pop(key, None)
        value, kind = entry
        if kind is gguf.GGUFValueType.ARRAY:
            self.add_array(key, value)
        else:
            self.add_key_value(key, value, kind)
        original(self)

    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", write_header)
        write_decoder(path, pooling=None)


@pytest.mark.parametrize(
    ("key", "entry"), [(key, entry) for key, entries in BAD.items() for entry in entries]
)
def test_a_bad_value_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, entry: Entry
) -> None:
    path = tmp_path / "model.gguf"
    write(path, monkeypatch, key, entry)
    with pytest.raises(ModelLoadError, match=r"cannot be used: (llama|tokenizer)\.") as caught:
        LlamaModel.load(Config(model=str(path)))
    assert key.rpartition(".")[0] in str(caught.value)


def test_what_is_overridden_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "llama.context_length"
    path = tmp_path / "model.gguf"
    write(path, monkeypatch, key, (0, INT))
    with LlamaModel.load(Config(model=str(path), override_kv=(f"{key}=int:256",))) as model:
        assert model.info.n_ctx_train == 256


@pytest.mark.parametrize(
    "key", ["feed_forward_length", "attention.key_length", "attention.value_length"]
)
def test_a_size_that_is_too_large_to_compute_with_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    path = tmp_path / "model.gguf"
    write(path, monkeypatch, f"llama.{key}", (1e308, gguf.GGUFValueType.FLOAT64))
    with pytest.raises(ModelLoadError, match="does not fit into memory"):
        room.plan(Config(model=str(path)))


def test_a_file_without_tensors_is_measured(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    shape = header.check_model(tmp_path / "model.gguf")
    assert shape is not None and shape.weights == 0


def test_a_good_file_has_no_problem(tmp_path: Path) -> None:
    path = write_decoder(tmp_path / "model.gguf")
    header.check_model(path)
    with gguf_files.read(path) as found:
        assert found.has_tensor((b"none", b"token_embd.weight"))
        assert not found.has_tensor((b"none",))


# -- any byte

LOAD = """
import sys
from pathlib import Path
from trioserve.config import Config
from trioserve.errors import TrioServeError
from trioserve.llama import load_here
from trioserve.types import SamplingParams
for name in sys.argv[1:]:
    print(name, flush=True)
    try:
        with load_here(Config(model=name, threads=1, ctx_size=256, parallel=1)) as backend:
            tokens = backend.vocab.tokenize("Once \\U0001f600")[:16] or (0,)
            row = backend.batch.extend(tokens, 0, 0)
            backend.batch.want_logits(row)
            backend.decode()
            with backend.sampler(SamplingParams(), tokens) as sampler:
                sampler.sample(row)
    except TrioServeError:
        pass
"""


@pytest.mark.system
def test_no_changed_byte_ends_the_process(tmp_path: Path) -> None:
    whole = write_decoder(tmp_path / "whole.gguf", pooling=None).read_bytes()
    end = whole.index(b"token_embd.weight") + 2000  # the header, with the list of the tensors
    chosen = random.Random(7)
    names = []
    for i in range(200):
        bad = bytearray(whole)
        for _ in range(chosen.randint(1, 3)):
            # Most of the header is the vocabulary; what comes before it is more of interest.
            place = chosen.randrange(700 if i % 2 else end)
            bad[place] = chosen.choice((0, 255, bad[place] ^ 1 << chosen.randrange(8)))
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(bad)
        names.append(str(path))
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *names], capture_output=True, text=True, check=False
    )
    last = done.stdout.strip().splitlines()[-1:]
    assert done.returncode == 0, f"{last}: {done.stderr[-1000:]}"
