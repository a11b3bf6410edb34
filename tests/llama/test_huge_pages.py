"""Huge pages for weights and KV cache."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from trioserve.config import Config
from trioserve.llama import machine, model
from trioserve.llama.machine import HugePages
from trioserve.llama.model import LlamaModel
from trioserve.models import BUNDLED

MB = 2**20

needs_huge_pages = pytest.mark.skipif(
    not machine.has_huge_pages(), reason="the system gives no huge pages"
)


def huge_bytes(address: int) -> int:
    """Read how much of the mapping at an address is in huge pages."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            start, end = (int(each, 16) for each in name.split("-"))
            here = start <= address < end
        elif here and name == "AnonHugePages:":
            return int(rest[0]) * 1024
    return 0


@needs_huge_pages
@pytest.mark.parametrize("advised", [True, False])
def test_what_is_allocated_gets_huge_pages(advised: bool) -> None:
    pages = HugePages()
    with mmap.mmap(-1, 32 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        if advised:
            pages.advise()
        memory[:] = bytes(32 * MB)
        view = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(view) + 16 * MB
        del view
        always = "[always]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        assert (huge_bytes(address) > 0) == (advised or always)


@needs_huge_pages
def test_nothing_is_asked_for_twice() -> None:
    pages = HugePages()
    pages.advise()
    with mmap.mmap(-1, 32 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        pages.advise()
        memory[:1] = b"x"


@pytest.mark.parametrize("text", ["always madvise [never]", None])
def test_a_system_without_them(
    text: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "enabled").write_text(text)
    monkeypatch.setattr(machine, "_ENABLED", tmp_path / "enabled")
    assert not machine.has_huge_pages()
    HugePages().advise()
    assert model.load_mode(BUNDLED, Config()) == "auto"


@pytest.mark.parametrize(
    ("load_mode", "free", "chosen"),
    [
        ("auto", 2 * BUNDLED.stat().st_size, "none"),
        ("auto", 2 * BUNDLED.stat().st_size - 1, "auto"),
        ("auto", None, "auto"),
        ("mmap", 10**12, "mmap"),
    ],
)
def test_weights_are_read_where_twice_their_size_is_free(
    load_mode: str, free: int | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "has_huge_pages", lambda: True)
    monkeypatch.setattr(model, "is_in_use", lambda path: False)
    monkeypatch.setattr(model, "free_memory", lambda: free)
    assert model.load_mode(BUNDLED, Config(load_mode=load_mode)) == chosen


@pytest.mark.skipif(sys.platform == "win32", reason="files are not marked there")
def test_what_is_loaded_again_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "has_huge_pages", lambda: True)
    monkeypatch.setattr(model, "free_memory", lambda: 10**12)
    path = Path(shutil.copy(BUNDLED, tmp_path))
    with LlamaModel.load(Config(model=str(path))):
        assert model.load_mode(path, Config()) == "auto"
        assert model.load_mode(path, Config(load_mode="none")) == "none"
        with LlamaModel.load(Config(model=str(path))):
            pass
        assert machine.is_in_use(path), "the first one still has it"
    assert model.load_mode(path, Config()) == "none"
    assert (
        not machine.is_in_use(tmp_path / "none") and machine.mark_in_use(tmp_path / "none") is None
    )


@given(st.lists(st.integers(0, 60), unique=True), st.lists(st.integers(0, 60), unique=True))
def test_ranges_without_others(edges: list[int], other_edges: list[int]) -> None:
    ranges, others = (
        list(zip(sorted(each)[::2], sorted(each)[1::2], strict=False))
        for each in (edges, other_edges)
    )
    left = machine.without(ranges, others)
    numbers = [n for start, end in left for n in range(start, end)]
    excluded = {n for start, end in others for n in range(start, end)}
    assert numbers == [n for start, end in ranges for n in range(start, end) if n not in excluded]
    assert all(start < end for start, end in left)
