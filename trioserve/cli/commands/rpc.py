"""``trioserve rpc``: the tools to run a model on several machines."""

from __future__ import annotations

import signal

from trioserve.cli.options import Arguments, hush
from trioserve.errors import ConfigError


def build(given: Arguments) -> int:
    """Make the library. Raises ConfigError: it cannot be built."""
    from trioserve.llama.rpc import library

    hush()
    built = library.build(given["sources"])
    protocol = ".".join(map(str, built.protocol))
    print(f"{built.path}\nggml {built.ggml}, version {protocol} of the protocol")
    return 0


def serve(given: Arguments) -> int:
    """Compute for others. Raises ConfigError: the address is unusable."""
    from trioserve.llama.rpc import serving

    hush()
    if given["port"] >= 2**16:
        raise ConfigError(f"--port must be below 65536, not {given['port']}")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python does not handle signals while ggml serves
    serving.serve(
        given["host"],
        given["port"],
        names=given["device"],
        threads=given["threads"],
        cache=given["cache"],
        allow_public=given["rpc_allow_public"],
    )
    return 1  # ggml has logged the reason
