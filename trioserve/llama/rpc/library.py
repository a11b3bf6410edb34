"""ggml's RPC backend: loading it, and giving llama.cpp the machines that `--rpc` names.

The wheels of llama-cpp-python come without this backend, but they can load it from a library. That
has to be of the same version, because the two share structures. `find` looks for the one that
`trioserve rpc build` has made, and checks that nothing has happened to it since. A llama.cpp that
was built with `GGML_RPC` needs none.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs

from trioserve.config import Config
from trioserve.config.files import user_cache
from trioserve.errors import ConfigError, ModelLoadError
from trioserve.llama import library
from trioserve.llama.devices import ggml
from trioserve.llama.rpc import peers
from trioserve.log import get_logger

_log = get_logger("trioserve.rpc")

#: ggml's function to add a server, and to be one, with what they take and return.
ADD = ("ggml_backend_rpc_add_server", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p))
SERVE = (
    "ggml_backend_rpc_start_server",
    ctypes.CFUNCTYPE(
        None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p
    ),
)

_NAME = b"RPC"

_BUILD = "run `trioserve rpc build`"

#: The address of each server that this process has, by its name. It stays the same while a model
#: sleeps: llama.cpp would take another one for another machine.
_addresses: dict[str, str] = {}


@attrs.frozen
class Built:
    """A built library, and the properties recorded at its build.

    Attributes:
        path: the library.
        protocol: the version of the protocol that it speaks.
        ggml: the version of ggml that it belongs to.
        sha256: of the file.
    """

    path: Path
    protocol: tuple[int, int, int]
    ggml: str
    sha256: str

    @property
    def note(self) -> Path:
        """The file with its properties, beside the library."""
        return self.path.with_suffix(".json")

    def write(self) -> None:
        """Write the note beside the library."""
        text = json.dumps({"protocol": self.protocol, "ggml": self.ggml, "sha256": self.sha256})
        self.note.write_text(text + "\n", encoding="utf-8")


def folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of libraries: ``trioserve/rpc`` in the user's cache folder."""
    return user_cache(environ) / "trioserve" / "rpc"


def path_in(where: Path) -> Path:
    """The library for the installed llama.cpp."""
    name = f"ggml-rpc-{version('llama-cpp-python')}-{platform.machine()}.so"
    return where / name


def ggml_version() -> str:
    """The version of the installed ggml."""
    return str(ggml("ggml_version")().decode())


def find(where: Path | None = None) -> Built:
    """Find the library for the installed llama.cpp, and check it.

    Raises:
        ConfigError: it was not built, or was changed since.
    """
    path = path_in(where or folder())
    try:
        note = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        major, minor, patch = note["protocol"]
        built = Built(path, (major, minor, patch), note["ggml"], note["sha256"])
        content = path.read_bytes()
        kept = (path.parent.stat(), path.stat())
    except FileNotFoundError:
        raise ConfigError(f"rpc needs a library that is not there yet; {_BUILD}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"rpc: {path} cannot be read ({error}); {_BUILD} again") from None
    if hashlib.sha256(content).hexdigest() != built.sha256:
        raise ConfigError(f"rpc: {path} is not the file that was built; {_BUILD} again")
    if any(one.st_uid not in (0, os.getuid()) or one.st_mode & stat.S_IWOTH for one in kept):
        raise ConfigError(f"rpc: {path} may be changed by other users, so it is not loaded")
    if built.ggml != ggml_version():
        raise ConfigError(
            f"rpc: {path} is for ggml {built.ggml}, and {ggml_version()} is installed; {_BUILD} "
            "again"
        )
    return built


@attrs.frozen
class RpcBackend:
    """ggml's RPC backend, as it is loaded.

    Attributes:
        pointer: ggml's.
        protocol: the version that it speaks; None: it is a part of llama.cpp, which does not tell.
    """

    pointer: int
    protocol: tuple[int, int, int] | None

    def function(self, named: tuple[str, Any]) -> Any:
        """Look up a function of the backend: `ADD` or `SERVE`."""
        name, kind = named
        return kind(ggml("ggml_backend_reg_get_proc_address")(self.pointer, name.encode()))


def check() -> None:
    """Check, without loading anything, that a process here can have RPC servers.

    Raises:
        ConfigError: it cannot; the message says what to do.
        BackendMismatchError: llama.cpp cannot be used at all.
    """
    library.check_library()
    if sys.platform != "linux":
        raise ConfigError(f"rpc works on Linux only so far, not on {sys.platform}")
    if not ggml("ggml_backend_reg_by_name")(_NAME):
        find()


@cache
def backend() -> RpcBackend:
    """Load the backend, unless llama.cpp has it.

    Raises:
        ConfigError: as `check`, or ggml does not take it.
    """
    check()
    if built_in := ggml("ggml_backend_reg_by_name")(_NAME):
        return RpcBackend(built_in, None)
    found = find()
    return RpcBackend(load(found.path), found.protocol)


def load(path: Path) -> int:
    """Load a library into ggml, and return ggml's pointer to its backend.

    Raises:
        ConfigError: ggml does not take it.
    """
    library.start()
    if not (pointer := ggml("ggml_backend_load")(os.fsencode(path))):
        raise ConfigError(f"rpc: ggml cannot load {path}; {_BUILD} again")
    return int(pointer)


def abort_at_once() -> None:
    """Have ggml start no debugger when it aborts this process, which would hold up the end."""
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")


def connect(config: Config, *, timeout: float = peers.TIMEOUT) -> None:
    """Have the machines of a configuration be devices of llama.cpp, RPC0 and so on. Blocks.

    Call it before each load. If one of them fails later, this process ends or hangs, so it must be
    one that is watched.

    Raises:
        ModelLoadError: a machine does not answer as it should, or the library is missing.
    """
    abort_at_once()
    try:
        loaded = backend()
    except ConfigError as error:
        raise ModelLoadError(error.message) from None
    for named in config.rpc:
        address = _addresses.get(named)
        if address is None:
            address = peers.locate(named, allow_public=config.rpc_allow_public)
            if address in _addresses.values():
                raise ModelLoadError(f"rpc names the machine at {address} twice.")
        _check_protocol(peers.greet(named, address, timeout=timeout), loaded.protocol)
        if named not in _addresses:
            ggml("ggml_backend_register")(loaded.function(ADD)(address.encode()))
            _addresses[named] = address


def _check_protocol(peer: peers.Peer, protocol: tuple[int, int, int] | None) -> None:
    theirs = ".".join(map(str, peer.version))
    if protocol is not None and peer.version != protocol:
        ours = ".".join(map(str, protocol))
        raise ModelLoadError(
            f"The RPC server {peer.named} speaks version {theirs} of the protocol, and this "
            f"machine {ours}; install the same version of llama.cpp on both."
        )
    free = sum(free for free, _ in peer.memory)
    _log.info("rpc server", server=peer.named, address=peer.address, devices=len(peer.memory),
              free_mib=free // 2**20, protocol=theirs)  # fmt: skip


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
    where = (where or folder()).resolve()
    base = _installed_base()
    with tempfile.TemporaryDirectory(prefix="trioserve-rpc-") as name:
        temporary = Path(name)
        tree = _unpack(sources or _download(temporary), temporary / "sources").resolve()
        _check_version(tree)
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
        # In the folder where it will be, so that putting it in place is one step.
        unfinished = where / f".{os.getpid()}.so"
        try:
            _compile(tree, base, unfinished)
            load(unfinished)
            path = path_in(where)
            built = Built(
                path,
                _protocol(tree),
                ggml_version(),
                hashlib.sha256(unfinished.read_bytes()).hexdigest(),
            )
            built.write()
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    return find(where)


def _installed_base() -> Path:
    """The installed library that the new one stands on."""
    base = Path(library.bindings("_ggml").libggml._name).parent / "libggml-base.so"
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
                # Python 3.11.3 and older know no filters; `_needed` leaves nothing for one to do.
                archive.extraction_filter = getattr(tarfile, "data_filter", lambda one, _: one)
                archive.extractall(folder, _needed(archive))
        except (OSError, tarfile.TarError) as error:
            raise ConfigError(f"rpc: the sources {sources} cannot be unpacked: {error}") from None
        found = list(folder.glob(f"*/{_GGML}"))
    for tree in found:
        if all((tree / "src" / "ggml-rpc" / name).exists() for name in _SOURCES):
            return tree
    raise ConfigError(
        f"rpc: {sources} is not the source distribution of llama-cpp-python: it has no "
        f"{_GGML}/src/ggml-rpc"
    )


def _needed(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for one in archive:
        if one.isfile() and _NEEDED.fullmatch(one.name) and ".." not in one.name.split("/"):
            yield one


def _check_version(tree: Path) -> None:
    """Refuse sources of another version: they would have other structures."""
    text = (tree / "CMakeLists.txt").read_text(encoding="utf-8")
    found = ".".join(
        _number(text, rf"GGML_VERSION_{part} (\d+)") for part in ("MAJOR", "MINOR", "PATCH")
    )
    if found != (installed := ggml_version()):
        raise ConfigError(f"rpc: the sources are of ggml {found}, and {installed} is installed")


def _protocol(tree: Path) -> tuple[int, int, int]:
    text = (tree / "include" / "ggml-rpc.h").read_text(encoding="utf-8")
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


def _compile(tree: Path, base: Path, output: Path) -> None:
    named = os.environ.get("CXX")
    candidates = [named] if named else ["c++", "g++", "clang++"]
    compiler = next(filter(None, map(shutil.which, candidates)), None)
    if compiler is None:
        raise ConfigError(
            f"rpc: there is no C++ compiler{f' {named!r}' if named else ''}; install one, such as "
            "g++, or name one in CXX"
        )
    command = [
        compiler, *_FLAGS, f"-I{tree / 'include'}", f"-I{tree / 'src'}", *_SOURCES, str(base),
        "-pthread", "-o", str(output),
    ]  # fmt: skip
    _run(command, "the backend cannot be compiled", folder=tree / "src" / "ggml-rpc")


def _run(command: Sequence[str], what: str, *, folder: Path | None = None) -> None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise ConfigError(f"rpc: {what}:\n{said}")
