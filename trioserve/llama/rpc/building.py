"""Compiling ggml's RPC backend as a library for the llama.cpp that is installed.

It is two files of C++, which take seconds. They are in the source distribution of llama-cpp-python
of the same version, which pip downloads: from where, and how, is for pip's configuration to say.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from trioserve.errors import ConfigError
from trioserve.llama.rpc import library
from trioserve.llama.rpc.library import Built

_GGML = "vendor/llama.cpp/ggml"

#: Of the source distribution, what is unpacked.
_NEEDED = re.compile(
    rf"[^/]+/{_GGML}/(CMakeLists\.txt|include/[^/]+|src/[^/]+\.h|src/ggml-rpc/[^/]+)"
)

_SOURCES = ("ggml-rpc.cpp", "transport.cpp")

#: As ggml's own build sets them for a backend that is loaded, on Linux.
_FLAGS = (
    "-std=c++17", "-O2", "-fPIC", "-shared", "-DNDEBUG", "-DGGML_BACKEND_DL",
    "-DGGML_BACKEND_SHARED", "-DGGML_BACKEND_BUILD", "-DGGML_SHARED",
)  # fmt: skip


def build(sources: Path | None = None, where: Path | None = None) -> Built:
    """Build the library, and put it where `library.find` looks for it. Blocks.

    Args:
        sources: the source distribution of llama-cpp-python, as the file or unpacked; None: pip
            downloads it.
        where: the folder for the library; the default is that of `library.find`.

    Raises:
        ConfigError: there are no sources, no compiler, or they do not fit what is installed.
    """
    where = (where or library.folder()).resolve()
    base = _installed_base()
    with tempfile.TemporaryDirectory(prefix="trioserve-rpc-") as name:
        temporary = Path(name)
        ggml = _unpack(sources or _download(temporary), temporary / "sources").resolve()
        _check_version(ggml)
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
        # In the folder where it will be, so that putting it in place is one step.
        unfinished = where / f".{os.getpid()}.so"
        try:
            _compile(ggml, base, unfinished)
            library.load(unfinished)
            path = library.path_in(where)
            built = Built(
                path,
                _protocol(ggml),
                library.ggml_version(),
                hashlib.sha256(unfinished.read_bytes()).hexdigest(),
            )
            built.write()
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    return library.find(where)


def _installed_base() -> Path:
    """The installed library that the new one stands on."""
    from llama_cpp._ggml import libggml

    base = Path(libggml._name).parent / "libggml-base.so"
    if not base.exists():
        raise ConfigError(
            f"rpc: there is no {base}, so a backend cannot be added to this build of llama.cpp; "
            "build llama-cpp-python with CMAKE_ARGS=-DGGML_RPC=on"
        )
    return base


def _download(folder: Path) -> Path:
    wanted = f"llama-cpp-python=={version('llama-cpp-python')}"
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(folder), wanted,
    ]  # fmt: skip
    _run(command, f"pip cannot download the sources of {wanted}; name them with --sources")
    return next(folder.glob("*.tar.gz"))


def _unpack(sources: Path, folder: Path) -> Path:
    """Return ggml's folder, unpacked if it is not."""
    if sources.is_dir():
        found = [sources / _GGML, *sources.glob(f"*/{_GGML}")]
    else:
        try:
            with tarfile.open(sources) as archive:
                archive.extractall(folder, _needed(archive), filter="data")
        except (OSError, tarfile.TarError) as error:
            raise ConfigError(f"rpc: the sources {sources} cannot be unpacked: {error}") from None
        found = list(folder.glob(f"*/{_GGML}"))
    for ggml in found:
        if all((ggml / "src" / "ggml-rpc" / name).exists() for name in _SOURCES):
            return ggml
    raise ConfigError(
        f"rpc: {sources} is not the source distribution of llama-cpp-python: it has no "
        f"{_GGML}/src/ggml-rpc"
    )


def _needed(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    return (one for one in archive if one.isfile() and _NEEDED.fullmatch(one.name))


def _check_version(ggml: Path) -> None:
    """Refuse sources of another version: they would have other structures."""
    text = (ggml / "CMakeLists.txt").read_text(encoding="utf-8")
    found = ".".join(
        _number(text, rf"GGML_VERSION_{part} (\d+)") for part in ("MAJOR", "MINOR", "PATCH")
    )
    if found != (installed := library.ggml_version()):
        raise ConfigError(f"rpc: the sources are of ggml {found}, and {installed} is installed")


def _protocol(ggml: Path) -> tuple[int, int, int]:
    text = (ggml / "include" / "ggml-rpc.h").read_text(encoding="utf-8")
    major, minor, patch = (
        int(_number(text, rf"RPC_PROTO_{part}_VERSION +(\d+)"))
        for part in ("MAJOR", "MINOR", "PATCH")
    )
    return major, minor, patch


def _number(text: str, pattern: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise ConfigError("rpc: the sources do not say which version they are")
    return found[1]


def _compile(ggml: Path, base: Path, output: Path) -> None:
    named = os.environ.get("CXX")
    candidates = [named] if named else ["c++", "g++", "clang++"]
    compiler = next(filter(None, map(shutil.which, candidates)), None)
    if compiler is None:
        raise ConfigError(
            f"rpc: there is no C++ compiler{f' {named!r}' if named else ''}; install one, such as "
            "g++, or name one in CXX"
        )
    command = [
        compiler, *_FLAGS, f"-I{ggml / 'include'}", f"-I{ggml / 'src'}", *_SOURCES, str(base),
        "-pthread", "-o", str(output),
    ]  # fmt: skip
    _run(command, "the backend cannot be compiled", folder=ggml / "src" / "ggml-rpc")


def _run(command: Sequence[str], what: str, *, folder: Path | None = None) -> None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise ConfigError(f"rpc: {what}:\n{said}")
