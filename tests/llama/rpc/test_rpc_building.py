"""Building the library: what keeps it from being built is said. `tests/rpc` really builds it."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from trioserve.errors import ConfigError
from trioserve.llama.rpc import library
from trioserve.llama.rpc.library import build

ROOT = "llama_cpp_python-0.3.36"
GGML = "vendor/llama.cpp/ggml"
BROKEN = "#error this is not ggml\n"


def files(version: str) -> dict[str, str]:
    """Sources that say which version they are, and cannot be compiled."""
    major, minor, patch = version.split(".")
    return {
        "CMakeLists.txt": f"set(GGML_VERSION_MAJOR {major})\nset(GGML_VERSION_MINOR {minor})\n"
        f"set(GGML_VERSION_PATCH {patch})\n",
        "include/ggml-rpc.h": "",
        "src/ggml-rpc/ggml-rpc.cpp": BROKEN,
        "src/ggml-rpc/transport.cpp": BROKEN,
    }


def archive(path: Path, version: str) -> Path:
    """Write such sources as pip downloads them, with more in it."""
    with tarfile.open(path, "w:gz") as written:
        for name, text in {**files(version), "../../models/large.gguf": "x"}.items():
            member = tarfile.TarInfo(f"{ROOT}/{GGML}/{name}")
            member.size = len(text)
            written.addfile(member, io.BytesIO(text.encode()))
    return path


def unpacked(folder: Path, version: str) -> Path:
    for name, text in files(version).items():
        path = folder / GGML / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def problem(sources: Path, where: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        build(sources, where)
    assert not list(where.glob("*"))
    assert not list(where.glob(".*"))
    return caught.value.message


def test_what_are_no_sources(tmp_path: Path) -> None:
    text = tmp_path / "sources.tar.gz"
    text.write_text("no archive", encoding="utf-8")
    assert "cannot be unpacked" in problem(text, tmp_path / "out")
    assert "is not the source distribution" in problem(tmp_path, tmp_path / "out")
    assert "cannot be unpacked: " in problem(tmp_path / "missing", tmp_path / "out")


def test_sources_of_another_version(tmp_path: Path) -> None:
    said = problem(archive(tmp_path / "s.tar.gz", "0.1.2"), tmp_path / "out")
    assert said == f"rpc: the sources are of ggml 0.1.2, and {library.ggml_version()} is installed"


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = unpacked(tmp_path / "sources", library.ggml_version())
    monkeypatch.setenv("CXX", "no-such-compiler")
    said = problem(sources, tmp_path / "out")
    assert "there is no C++ compiler 'no-such-compiler'; install one" in said
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert "there is no C++ compiler; install one" in problem(sources, tmp_path / "out")


@pytest.mark.system
def test_what_the_compiler_says_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho broken >&2\nexit 1\n", encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    sources = archive(tmp_path / "s.tar.gz", library.ggml_version())
    assert problem(sources, tmp_path / "out") == "rpc: the backend cannot be compiled:\nbroken"
