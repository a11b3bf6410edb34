"""The header of a GGUF file, read without llama.cpp."""

from __future__ import annotations

import math
import os
import struct
import tracemalloc
from pathlib import Path

import gguf as reference
import pytest

from trioserve.errors import ModelLoadError
from trioserve.models import BUNDLED, gguf
from trioserve.models.catalog import describe


def test_it_reads_what_the_reference_reads() -> None:
    theirs = reference.GGUFReader(BUNDLED)
    with gguf.read(BUNDLED) as ours:
        keys = [name for name in theirs.fields if not name.startswith("GGUF.")]
        assert list(ours) == keys
        for key in keys:
            value = theirs.fields[key].contents()
            if isinstance(value, bool):
                assert ours.numbers(key) == [value]
            elif isinstance(value, str):
                assert ours.text(key) == value
            elif isinstance(value, list) and isinstance(value[0], str):
                assert [one.decode() for one in ours.texts(key) or ()] == value
                assert ours.count(key) == len(value)
            else:
                numbers = value if isinstance(value, list) else [value]
                assert ours.numbers(key) == pytest.approx(numbers)
        assert [(one.name.decode(), one.shape, one.kind) for one in ours.tensors()] == [
            (one.name, tuple(one.shape), one.tensor_type) for one in theirs.tensors
        ]


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def write(path: Path, *entries: bytes, n_entries: int | None = None, version: int = 3) -> Path:
    count = len(entries) if n_entries is None else n_entries
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", version, 0, count) + b"".join(entries))
    return path


def integer(key: bytes, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


def test_a_number_that_is_not_finite_is_no_whole_one(tmp_path: Path) -> None:
    entry = text(b"general.alignment") + struct.pack("<If", 6, math.inf)
    with gguf.read(write(tmp_path / "model.gguf", entry)) as header:
        assert header.number("general.alignment") == math.inf
        assert header.whole("general.alignment") == 0
        assert header.data_start() % 32 == 0


def refused(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught, gguf.read(path):
        pass
    assert caught.value.message.startswith(f"The model file {path} cannot be read: ")
    return caught.value.message.partition("cannot be read: ")[2]


def test_texts_end_at_a_null_as_in_llama_cpp(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", integer(b"a\0b", 1), integer(b"a", 2))
    with gguf.read(path) as header:
        assert list(header) == ["a"]
        assert header.numbers("a") == [1]


def test_what_is_not_there_is_empty(tmp_path: Path) -> None:
    with gguf.read(write(tmp_path / "x.gguf", integer(b"n", 7))) as header:
        assert header.text("n") == header.text("none") == ""
        assert header.texts("n") is header.texts("none") is None
        assert header.numbers("none") == []
        assert header.number("n") == 7
        assert header.number("none") is None
        assert header.count("n") == header.count("none") == 0
        assert not header.flag("n") and not header.flag("none")


def test_flags(tmp_path: Path) -> None:
    entries = [text(key) + struct.pack("<I?", 7, value) for key, value in ((b"a", 1), (b"b", 0))]
    with gguf.read(write(tmp_path / "x.gguf", *entries)) as header:
        assert header.flag("a")
        assert not header.flag("b")


@pytest.mark.parametrize("size", [0, 3, 23, 24, 30, 200])
def test_a_file_that_ends_early(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(BUNDLED.read_bytes()[:size])
    assert refused(path) == f"it ends within its header, at {size} bytes."


def test_numbers_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    assert "has 9,223,372,036,854,775,808 entries" in refused(write(path, n_entries=2**63))
    assert "ends within its header" in refused(write(path, n_entries=2**16))
    assert "a text has 4,611,686,018,427,387,904" in refused(write(path, struct.pack("<Q", 2**62)))
    one_text = text(b"k") + struct.pack("<IQ", 8, 2**62)
    assert "header is larger" in refused(write(path, one_text))
    assert "unknown type 99" in refused(write(path, text(b"k") + struct.pack("<I", 99)))
    lists = text(b"k") + struct.pack("<IIQ", 9, 8, 2**60)
    assert "a list has 1,152,921,504,606,846,976 items" in refused(write(path, lists))
    lists = text(b"k") + struct.pack("<IIQ", 9, 8, 2**20)
    assert "ends within its header" in refused(write(path, lists))


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_text("a text that is long enough", encoding="utf-8")
    assert refused(path) == "it is not a GGUF file, for it does not begin with GGUF."
    assert refused(write(path, version=1)) == "version 1 of GGUF is not supported."
    assert refused(tmp_path / "none.gguf") == "No such file or directory."
    assert refused(tmp_path) == "Is a directory."


def test_a_damaged_list_of_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    tensor = text(b"t") + struct.pack("<I", 9)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + tensor)
    with gguf.read(path) as header, pytest.raises(ModelLoadError, match="has 9 dimensions"):
        header.has_tensor((b"t",))


def test_the_parts_of_a_model() -> None:
    first = Path("/m/big-Q4-00001-of-00003.gguf")
    assert [one.name for one in gguf.parts_of(first)] == [
        f"big-Q4-0000{i}-of-00003.gguf" for i in (1, 2, 3)
    ]
    assert gguf.parts_of(Path("/m/small.gguf")) == (Path("/m/small.gguf"),)


def test_sizes_are_added(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12")
    (tmp_path / "b").write_bytes(b"345")
    assert gguf.total_size([tmp_path / "a", tmp_path / "b", tmp_path / "none"]) == 5


def hole(path: Path, *head: bytes, n_entries: int = 1, n_tensors: int = 0) -> Path:
    """Write a file of 100 MB that is a hole, except for its head."""
    fixed = struct.pack("<4sIQQ", b"GGUF", 3, n_tensors, n_entries)
    path.write_bytes(fixed + b"".join(head))
    os.truncate(path, 100_000_000)
    return path


def the_list(key: bytes, kind: int, count: int) -> bytes:
    return text(key) + struct.pack("<IIQ", 9, kind, count)


@pytest.mark.parametrize(
    ("head", "counts", "problem"),
    [
        ([the_list(b"x.context_length", 0, 99_000_000)], {}, "a list has 99,000,000 items"),
        ([the_list(b"general.languages", 8, 12_000_000)], {}, "a list has 12,000,000 items"),
        ([], {"n_entries": 7_000_000}, "its header has 7,000,000 entries"),
        ([integer(b"a", 1)], {"n_tensors": 4_000_000}, "its header has 4,000,000 tensors"),
        ([struct.pack("<Q", 90_000_000)], {}, "a text has 90,000,000 bytes"),
    ],
)
def test_a_hostile_header_takes_little_memory(
    tmp_path: Path, head: list[bytes], counts: dict[str, int], problem: str
) -> None:
    path = hole(tmp_path / "x.gguf", *head, **counts)
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError, match=problem):
            describe(path)
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()


def test_lists_where_a_few_items_are_due(tmp_path: Path) -> None:
    many = the_list(b"x.context_length", 0, 100_000) + bytes(100_000)
    path = write(tmp_path / "x.gguf", text(b"general.architecture") + value_of(b"x"), many)
    with pytest.raises(ModelLoadError, match="context_length has 100,000 numbers"):
        describe(path)
    languages = the_list(b"general.languages", 8, 100_000) + text(b"") * 100_000
    assert describe(write(tmp_path / "y.gguf", languages)).languages == ()


def value_of(value: bytes) -> bytes:
    return struct.pack("<I", 8) + text(value)
