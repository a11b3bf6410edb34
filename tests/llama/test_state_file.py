from __future__ import annotations

import struct
import tempfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from trioserve import llama
from trioserve.config import Config
from trioserve.errors import InvalidRequestError
from trioserve.llama import state_file
from trioserve.llama.backend import LlamaBackend
from trioserve.testing import ScriptedProjector
from trioserve.types import AdapterInfo, CacheRoot, SlotState
from trioserve.types.media import ChunkOutline

PREFIX = b"\0" * state_file.PREFIX
LORA = (AdapterInfo(path="/adapters/a.gguf"),)
SAVED = SlotState(keys=(5, 6, 7), root=CacheRoot(((0, 0.5),)), state=PREFIX + bytes(range(40)))


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
    saved = SlotState(keys=tokens, root=CacheRoot(((0, 1.0),)), state=PREFIX + state)
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder), saved)
        good = path.read_bytes()
        for place in {*range(12), *range(len(good) - 16, len(good)), *range(12, len(good), 7)}:
            bad = bytearray(good)
            bad[place] ^= data.draw(st.integers(1, 255))
            path.write_bytes(bad)
            with pytest.raises(InvalidRequestError, match="Unable to restore slot"):
                read(path)


def test_a_list_of_tokens_as_old_servers_wrote_it_is_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = path.read_bytes()
    (n_words,) = struct.unpack_from("<I", data, 8)
    tokens, rest = data[24 : 24 + 3 * 4], data[12 + 4 * n_words :]
    old = data[:8] + struct.pack("<I", 3) + tokens + rest
    path.write_bytes(old)
    assert read(path) == SAVED
    path.write_bytes(old[:12] + b"\x09" + old[13:])  # another token
    with pytest.raises(InvalidRequestError, match="checksum"):
        read(path)


def test_a_file_without_a_checksum_is_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    end = path.read_bytes().index(b'{"lora"')
    path.write_bytes(path.read_bytes()[:end])  # as llama-server writes it
    assert read(path) == SlotState(keys=SAVED.keys, state=SAVED.state)


def test_a_damaged_file_is_refused_by_the_backend(tmp_path: Path) -> None:
    with llama.load(Config(threads=1, ctx_size=256, parallel=1)) as backend:
        assert isinstance(backend, LlamaBackend)
        batch = backend.batch
        batch.clear()
        for i, token in enumerate(backend.vocab.tokenize("Once upon a time")):
            batch.add(token, i, 0, logits=False)
        backend.decode()
        saved = SlotState(keys=(1,) * len(batch), state=backend.memory.save(0))
        path = tmp_path / "slot.bin"
        backend.write_state(path, saved)
        assert backend.read_state(path, ())[0] == saved
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1  # among the keys and values, which llama.cpp does not look at
        path.write_bytes(data)
        with pytest.raises(InvalidRequestError, match="its checksum is wrong"):
            backend.read_state(path, ())


# -- with media


def media_keys(*chunks: tuple[int, int, int]) -> tuple[int, ...]:
    """Two tokens before each chunk, of a digest, cells and positions, and one at the end."""
    keys: list[int] = []
    for number, n_cells, n_positions in chunks:
        digest = bytes([number]) * 16
        keys += [7, 8, *ChunkOutline(digest, n_cells, n_positions).keys]
    return (*keys, 9)


MEDIA = SlotState(keys=media_keys((0, 5, 5), (255, 3, 1)), state=PREFIX + bytes(range(40)))


def read_media(path: Path, projector: str | None = "p") -> SlotState:
    return state_file.read(path, PREFIX, LORA, (), max_tokens=1000, projector=projector)[0]


def test_a_state_with_media_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "slot.bin"
    state_file.write(path, MEDIA, LORA, projector="p")
    assert read_media(path) == MEDIA
    with pytest.raises(InvalidRequestError, match="another projector"):
        read_media(path, "q")
    with pytest.raises(InvalidRequestError, match="without an mmproj"):
        read_media(path, None)
    with pytest.raises(InvalidRequestError, match="more than the 12 tokens"):
        state_file.read(path, PREFIX, LORA, (), max_tokens=12, projector="p")


def test_the_outline_of_a_chunk_is_in_the_keys_of_its_cells() -> None:
    chunk = ScriptedProjector(n_cells=6, n_positions=2).chunk("image", "x")
    outlines = {ChunkOutline.of(key) for key in chunk.keys}
    assert [one.keys for one in outlines] == [chunk.keys]
    assert (one := outlines.pop()).n_cells == 6 and one.n_positions == 2


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_what_a_list_of_media_may_not_say(data: st.DataObject) -> None:
    """With a right checksum: the list is as it was, or is refused, and nothing else happens."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slot.bin"
        state_file.write(path, MEDIA, LORA, projector="p")
        whole = path.read_bytes()
        end = whole.index(MEDIA.state[len(PREFIX) :])
        place = data.draw(st.integers(16, end - 1))
        bad = bytearray(whole)
        bad[place] ^= data.draw(st.integers(1, 255))
        start = len(bad) - 12
        bad[start : start + 4] = zlib.crc32(bad[:start]).to_bytes(4, "little")
        path.write_bytes(bad)
        try:
            keys = read_media(path).keys
        except InvalidRequestError:
            return
        assert len(keys) == len(MEDIA.keys) and keys != MEDIA.keys


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((-1, 1, 2, 5, -1, 1, 0), "from llama-server and has media"),
        ((-1, 77, 1, 5, 0), "by another version"),
        ((-1, 1, 9, 5, 0), "no end"),
        ((-1, 1, 2, 5, -1, 0), "tokens below 0"),
        ((5, -7), "tokens below 0"),
    ],
)
def test_lists_of_others(tmp_path: Path, words: tuple[int, ...], why: str) -> None:
    path = tmp_path / "slot.bin"
    path.write_bytes(
        struct.pack("<III", 0x67677371, 3, len(words)) + struct.pack(f"<{len(words)}i", *words)
    )
    with pytest.raises(InvalidRequestError, match=why):
        read_media(path)
