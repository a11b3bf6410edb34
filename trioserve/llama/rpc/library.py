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
import stat
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import structlog

from trioserve.config import Config
from trioserve.errors import ConfigError, ModelLoadError
from trioserve.llama import library
from trioserve.llama.devices import ggml
from trioserve.llama.rpc import peers

_log = structlog.stdlib.get_logger("trioserve.rpc")

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
    """A library that was built, and what was noted of it then.

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
        """The file with the rest, beside the library."""
        return self.path.with_suffix(".json")

    def write(self) -> None:
        """Write the note."""
        text = json.dumps({"protocol": self.protocol, "ggml": self.ggml, "sha256": self.sha256})
        self.note.write_text(text + "\n", encoding="utf-8")


def folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where libraries are kept: ``trioserve/rpc`` in the cache of whoever runs this."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "trioserve" / "rpc"


def path_in(where: Path) -> Path:
    """The library for what is installed here."""
    name = f"ggml-rpc-{version('llama-cpp-python')}-{platform.machine()}.so"
    return where / name


def ggml_version() -> str:
    """The version of the installed ggml."""
    return str(ggml("ggml_version")().decode())


def find(where: Path | None = None) -> Built:
    """Find the library for what is installed here, and check it.

    Raises:
        ConfigError: it was not built, or is not what was built.
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
class Backend:
    """ggml's RPC backend, as it is loaded.

    Attributes:
        pointer: ggml's.
        protocol: the version that it speaks; None: it is a part of llama.cpp, which does not tell.
    """

    pointer: int
    protocol: tuple[int, int, int] | None

    def function(self, named: tuple[str, Any]) -> Any:
        """A function of it: `ADD` or `SERVE`."""
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
def backend() -> Backend:
    """Load the backend, unless llama.cpp has it.

    Raises:
        ConfigError: as `check`, or ggml does not take it.
    """
    check()
    if built_in := ggml("ggml_backend_reg_by_name")(_NAME):
        return Backend(built_in, None)
    found = find()
    return Backend(load(found.path), found.protocol)


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
        ModelLoadError: a machine does not answer as it should, or there is no library.
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
        _check_version(peers.greet(named, address, timeout=timeout), loaded.protocol)
        if named not in _addresses:
            ggml("ggml_backend_register")(loaded.function(ADD)(address.encode()))
            _addresses[named] = address


def _check_version(peer: peers.Peer, protocol: tuple[int, int, int] | None) -> None:
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
