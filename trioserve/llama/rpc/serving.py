"""Being an RPC server: ggml's own, which computes for the machine that connects to it."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from trioserve.errors import ConfigError
from trioserve.llama import devices
from trioserve.llama.machine import physical_cores
from trioserve.llama.rpc import library, peers


def serve(
    host: str,
    port: int,
    *,
    names: Sequence[str] = (),
    threads: int = 0,
    cache: Path | None = None,
    allow_public: bool = False,
) -> None:
    """Serve until the process ends: ggml does not return, and no signal handler of Python runs.

    Args:
        host: the IPv4 address to listen on, or a name of this machine.
        port: the port.
        names: the devices to offer; the default is the GPUs, or else the CPU.
        threads: of the CPU; 0: one for each physical core.
        cache: a folder for large tensors, which then need not be sent again.
        allow_public: whether the address may be of the public internet, or of all networks.

    Raises:
        ConfigError: the address or a device cannot be used, or ggml has no RPC backend.
    """
    address = _address(host, port, allow_public=allow_public)
    library.abort_at_once()
    loaded = library.backend()
    handles = _offered(names)
    array = (ctypes.c_void_p * len(handles))(*handles)
    if cache is not None:
        cache.mkdir(parents=True, exist_ok=True)
    loaded.function(library.SERVE)(
        f"{address}:{port}".encode(),
        None if cache is None else os.fsencode(cache),
        threads or physical_cores(),
        len(handles),
        ctypes.cast(array, ctypes.c_void_p),
    )


def _address(host: str, port: int, *, allow_public: bool) -> str:
    """Find the numeric address to listen on, and check that it is free: ggml's error is vague."""
    try:
        address = str(socket.getaddrinfo(host, port, socket.AF_INET)[0][4][0])
        if not allow_public and (address == "0.0.0.0" or peers.is_public(address)):
            raise ConfigError(
                f"{host} can be reached by others than the machines of this network, and any "
                "client that connects can run code here; name an address of a private network or "
                "of a VPN, or set --rpc-allow-public"
            )
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((address, port))
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from None
    return address


def _offered(names: Sequence[str]) -> list[int]:
    known = devices.devices()
    if names:
        by_name = {one.name: one.handle for one in known}
        for name in names:
            if name not in by_name:
                raise ConfigError(f"there is no device {name!r}; available: {', '.join(by_name)}")
        return [by_name[name] for name in names]
    return [one.handle for one in known if one.is_gpu] or [
        one.handle for one in known if one.is_cpu
    ]
