from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from trioserve import llama
from trioserve.config import Config
from trioserve.errors import InvalidRequestError
from trioserve.llama import state_file
from trioserve.types import AdapterInfo, CacheRoot, SlotState

PREFIX = b"\0" * state_file.PREFIX
LORA = (AdapterInfo(path="/adapters/a.gguf"),)
SAVED = SlotState(tokens=(5, 6, 7), root=CacheRoot(((0, 0.5),)), state=PREFIX + bytes(range(40)))


def written(folder: Path, saved: SlotState = SAVED) -> Path:
    path = folder / "slot.bin"
    size = state_file.write(path, saved, LORA)
    assert size == path.stat().st_size
    return path


def read(path: Path) -> SlotState:
    return state_file.read(path, PREFIX, LORA, (), max_tokens=1000)[0]


def test_a_state_comes_back(tmp_path: Path) -> None:
    assert read(written(tmp_path)) == SAVED


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple),
    state=st.binary(max_size=30),
    data=st.data(),
)
def test_any_changed_byte_is_found(
    tokens: tuple[int, ...], state: bytes, data: st.DataObject
) -> None:
    saved = SlotState(tokens=tokens, root=CacheRoot(((0, 1.0),)), state=PREFIX + state)
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder), saved)
        good = path.read_bytes()
        for place in {*range(12), *range(len(good) - 16, len(good)), *range(12, len(good), 7)}:
            bad = bytearray(good)
            bad[place] ^= data.draw(st.integers(1, 255))
            path.write_bytes(bad)
            with pytest.raises(InvalidRequestError, match="Unable to restore slot"):
                read(path)


def test_a_file_without_a_checksum_is_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    end = path.read_bytes().index(b'{"lora"')
    theirs = path.read_bytes()[:end]
    path.write_bytes(theirs)  # as llama-server writes it
    assert read(path) == SlotState(tokens=SAVED.tokens, state=SAVED.state)
    note = b'{"lora": [["a.gguf", 0.5]]}'
    path.write_bytes(theirs + note + struct.pack("<I8s", len(note), b"trioserv"))  # before 1.5
    assert read(path) == SAVED


def test_a_damaged_file_is_refused_by_the_backend(tmp_path: Path) -> None:
    with llama.load(Config(threads=1, ctx_size=256, parallel=1)) as backend:
        assert isinstance(backend, llama.LlamaBackend)
        batch = backend.batch
        batch.clear()
        for i, token in enumerate(backend.vocab.tokenize("Once upon a time")):
            batch.add(token, i, 0, logits=False)
        backend.decode()
        saved = SlotState(tokens=(1,) * len(batch), state=backend.state_get(0))
        path = tmp_path / "slot.bin"
        backend.write_state(path, saved)
        assert backend.read_state(path, ())[0] == saved
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1  # among the keys and values, which llama.cpp does not look at
        path.write_bytes(data)
        with pytest.raises(InvalidRequestError, match="its checksum is wrong"):
            backend.read_state(path, ())
