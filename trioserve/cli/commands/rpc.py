"""``trioserve rpc``: the tools to run a model on several machines."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from trioserve.cli.actions import ActionParser
from trioserve.cli.commands import hush
from trioserve.config import Config
from trioserve.errors import ConfigError

_PORT = 50052  # as llama.cpp's own server


def run(argv: Sequence[str], _environ: Mapping[str, str]) -> int:
    """Run the command; see `trioserve.cli.commands`.

    Raises:
        ConfigError: a flag is invalid, the library cannot be built, or the address is unusable.
    """
    options = _parser().parse_args(list(argv))
    hush(Config())
    return _build(options) if options.action == "build" else _serve(options)


def _parser() -> argparse.ArgumentParser:
    parser = ActionParser("rpc")
    actions = parser.actions()
    build = actions.add_parser("build")
    build.add_argument("--sources", type=Path)
    serve = actions.add_parser("serve")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=_PORT, choices=range(1, 2**16), metavar="PORT")
    serve.add_argument("--device", type=lambda text: text.split(","), default=[])
    serve.add_argument("--threads", type=int, default=0)
    serve.add_argument("--cache", type=Path)
    serve.add_argument("--rpc-allow-public", action="store_true")
    return parser


def _build(options: argparse.Namespace) -> int:
    from trioserve.llama.rpc.library import build

    built = build(options.sources)
    protocol = ".".join(map(str, built.protocol))
    print(f"{built.path}\nggml {built.ggml}, version {protocol} of the protocol")
    return 0


def _serve(options: argparse.Namespace) -> int:
    from trioserve.llama.rpc.serving import serve

    if options.threads < 0:
        raise ConfigError("rpc: --threads must not be negative")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python does not handle signals while ggml serves
    serve(
        options.host,
        options.port,
        names=options.device,
        threads=options.threads,
        cache=options.cache,
        allow_public=options.rpc_allow_public,
    )
    return 1  # ggml has logged the reason
