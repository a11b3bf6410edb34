"""llama.cpp with CUDA: found in a folder, or compiled into it for one architecture.

The folder holds all that another machine with such a GPU needs, and can be carried there: the
libraries and llama-server in `bin`, and in `python` the package llama_cpp with these libraries. A
program that has `python` first in its PYTHONPATH uses them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes.util import find_library
from importlib.metadata import version
from pathlib import Path

import attrs

from benchmarks.targets import TargetError

_SETTINGS = (
    "CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=ON", "CMAKE_BUILD_RPATH=$ORIGIN",
    "GGML_CUDA=ON", "GGML_CUDA_NCCL=OFF", "GGML_CUDA_COMPRESSION_MODE=size",
    "GGML_NATIVE=OFF",  # the other machine may have another CPU
    "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_BUILD_UI=OFF",
    "LLAMA_USE_PREBUILT_UI=OFF", "LLAMA_OPENSSL=OFF",
)  # fmt: skip


@attrs.frozen
class Build:
    """A folder with a build."""

    folder: Path

    @property
    def llama_server(self) -> Path:
        """The program."""
        return self.folder / "bin" / "llama-server"

    @property
    def is_there(self) -> bool:
        """Whether it is complete."""
        return self.llama_server.exists() and (self.folder / "python" / "llama_cpp").is_dir()

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of programs that use it."""
        folders = [str(path.parent) for path in _packaged("lib/libcublas.so.*")]
        own = {"PYTHONPATH": [str(self.folder / "python")], "LD_LIBRARY_PATH": folders}
        paths = {
            name: os.pathsep.join([*first, *filter(None, [environ.get(name)])])
            for name, first in own.items()
        }
        return {**environ, **{name: path for name, path in paths.items() if path}}


def architecture() -> str:
    """Ask nvidia-smi for the architecture of the first GPU, such as "90".

    Raises:
        TargetError: there is none.
    """
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return read_architecture(done.stdout)
    except (OSError, subprocess.CalledProcessError):
        raise TargetError("nvidia-smi finds no GPU; name the architecture with --arch") from None


def read_architecture(text: str) -> str:
    """Read what nvidia-smi prints, such as "9.0".

    Raises:
        TargetError: it is something else.
    """
    found = re.match(r"(\d+)\.(\d)\s*$", text, re.MULTILINE)
    if found is None:
        raise TargetError(f"nvidia-smi names no architecture: {text.strip()!r}")
    return found[1] + found[2]


def build(
    where: Build, arch: str, sources: Path | None, jobs: int, note: Callable[[str], None]
) -> None:
    """Compile into the folder of a build.

    Args:
        where: the folder; objects of a build that was interrupted are used.
        arch: the architecture of the GPU, such as "90".
        sources: the source distribution of llama-cpp-python, as the file or unpacked; None: pip
            downloads it.
        jobs: compilers at the same time.
        note: reports progress.

    Raises:
        TargetError: there are no sources or no compiler, or it does not compile.
    """
    if shutil.which("nvcc") is None or shutil.which("cmake") is None:
        raise TargetError(f"{where.folder} has no build, and there is no nvcc and cmake to make it")
    objects = where.folder / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="cuda-build-") as name:
        # The sources must stay at one path, or the objects would be compiled again.
        tree = _tree_of(sources or _download(Path(name)), where.folder / "sources")
        settings = [*_SETTINGS, f"CMAKE_CUDA_ARCHITECTURES={arch}", *_cublas(where.folder)]
        if find_library("cuda") is None:
            settings.append("GGML_CUDA_NO_VMM=ON")  # it would be linked with the driver
        note(f"compiling llama.cpp for architecture {arch} into {where.folder}")
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        flags = [f"-D{setting}" for setting in settings]
        _run(["cmake", *generator, "-S", str(tree), "-B", str(objects), *flags])
        targets = ["--target", "llama-server", "mtmd"]
        _run(["cmake", "--build", str(objects), "-j", str(jobs), *targets])
    _collect(objects / "bin", where.folder)
    note(f"{where.folder} has {size_of(where.folder, ('bin', 'python')) / 2**20:.0f} MiB to carry")


def size_of(folder: Path, parts: Sequence[str]) -> int:
    """Return the bytes in some folders of a folder."""
    files = [path for part in parts for path in (folder / part).rglob("*")]
    return sum(path.stat().st_size for path in files if path.is_file() and not path.is_symlink())


def _collect(built: Path, folder: Path) -> None:
    """Copy what is carried: the program, the libraries, and the package around them."""
    binaries, package = folder / "bin", folder / "python" / "llama_cpp"
    for old in (binaries, folder / "python"):
        shutil.rmtree(old, ignore_errors=True)
    binaries.mkdir(parents=True)
    for path in sorted(built.iterdir()):
        if path.name == "llama-server" or ".so" in path.suffixes:
            shutil.copy2(path, binaries / path.name, follow_symlinks=False)
    whole = [path for path in binaries.iterdir() if not path.is_symlink()]
    if shutil.which("strip") is not None:
        _run(["strip", "--strip-unneeded", *map(str, whole)])
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise TargetError("llama-cpp-python is not installed")
    ignored = shutil.ignore_patterns("lib", "__pycache__")
    shutil.copytree(Path(spec.origin).parent, package, ignore=ignored)
    (package / "lib").symlink_to(Path("..", "..", "bin"))


def _cublas(folder: Path) -> Iterator[str]:
    """Give the settings for cuBLAS of a Python package, if CUDA's own folder has none."""
    nvcc = shutil.which("nvcc")
    assert nvcc is not None
    home = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    if any((root / "include" / "cublas_v2.h").exists() for root in (home, Path(nvcc).parents[1])):
        return
    headers = _packaged("include/cublas_v2.h")
    if not headers:
        raise TargetError("CUDA has no cuBLAS here; pip install nvidia-cublas")
    # Its other headers are of another version than the compiler.
    own = folder / "cublas"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    for header in headers[0].parent.glob("cublas*.h"):
        (own / header.name).symlink_to(header)
    for library in (headers[0].parents[1] / "lib").glob("libcublas*.so.*"):
        (own / library.name.partition(".so")[0]).with_suffix(".so").symlink_to(library)
    yield f"CMAKE_LIBRARY_PATH={own}"
    yield from (f"CMAKE_{language}_FLAGS=-isystem {own}" for language in ("CUDA", "CXX"))


def _packaged(pattern: str) -> list[Path]:
    """Return files of NVIDIA's Python packages."""
    folders = [Path(path) / "nvidia" for path in sys.path]
    return [path for folder in folders for path in folder.glob(f"*/{pattern}")]


def _download(folder: Path) -> Path:
    wanted = f"llama-cpp-python=={version('llama-cpp-python')}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    _run([*command, "--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder), wanted])
    return next(folder.glob("*.tar.gz"))


def _tree_of(sources: Path, folder: Path) -> Path:
    """Return llama.cpp's folder in a source distribution, unpacked if it is a file."""
    if sources.is_file():
        with tarfile.open(sources) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", lambda one, _: one)
            archive.extractall(folder)
        sources = folder
    for tree in (sources, sources / "vendor" / "llama.cpp", *sources.glob("*/vendor/llama.cpp")):
        if (tree / "ggml" / "src" / "ggml-cuda").is_dir():
            return tree.resolve()
    raise TargetError(f"{sources} is not the source distribution of llama-cpp-python")


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if done.returncode:
        raise TargetError(f"{command[0]} failed:\n{done.stdout[-3000:]}")
