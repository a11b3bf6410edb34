"""The command ``trioserve``: read the flags, open the socket, serve until a signal comes.

Exit codes: 0 after a signal and a drain, 1 when the model cannot be loaded or the port not be
opened, 2 when a flag or variable is wrong. A second signal ends the process at once.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, TextIO

import structlog
import trio

from trioserve import llama
from trioserve.cli import help as usage
from trioserve.config import Config, logs, parse
from trioserve.errors import ModelLoadError, TrioServeError

if TYPE_CHECKING:
    import hypercorn

    from trioserve.api.base.service import Service
    from trioserve.engine import AnyBackend

_log = structlog.stdlib.get_logger("trioserve")

#: Connections that the kernel keeps for us until we accept them.
_BACKLOG = 1024

#: Bytes that the kernel holds for a client that does not read; connections inherit it. Left to
#: itself, the kernel would take megabytes, which is thousands of tokens that nobody reads.
_SEND_BUFFER = 128 * 1024

#: Seconds that connections get to close, once no request runs.
_GRACE = 3.0


#: What to print, and then to end.
_TEXTS: Mapping[str, Callable[[], str]] = {
    "help": usage.help_text,
    "version": usage.version_text,
    "list-devices": usage.devices_text,
    "completion-bash": usage.completion_text,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; `argv` is without the name of the program. Returns the exit code."""
    try:
        parsed = parse.parse(sys.argv[1:] if argv is None else argv, os.environ)
        if (text := _TEXTS.get(parsed.action)) is not None:
            print(text(), end="")
            return 0
        logs.configure(parsed.config)
    except TrioServeError as error:
        return _fail(error.message, code=2)
    for note in parsed.notes:
        _log.warning(note)
    try:
        return serve(parsed.config)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def serve(config: Config) -> int:
    """Serve until SIGTERM or SIGINT. Blocks; returns the exit code."""
    from trioserve.llama.model import check_file
    from trioserve.models import BUNDLED

    try:
        check_file(Path(config.model) if config.model else BUNDLED)
    except ModelLoadError as error:
        return _fail(error.message)  # what can be seen at once is told before the port is open
    if config.static_path is not None and not Path(config.static_path).is_dir():
        return _fail(f"--path: {config.static_path} is not a directory")
    try:
        _check_certificate(config)
    except (OSError, ssl.SSLError) as error:
        return _fail(f"the certificate or its key cannot be used: {error.strerror or error}")
    with ExitStack() as closing:
        listening = []
        hosts = [host.strip() for host in config.host.split(",")]
        for host in hosts:
            try:
                opened = open_socket(
                    host, config.port, reuse=config.reuse_port, both=len(hosts) == 1
                )
            except OSError as error:
                where = host if host.endswith(".sock") else f"{host}:{config.port}"
                return _fail(f"cannot listen on {where}: {error.strerror}")
            closing.callback(_close, opened)
            listening.append(opened)
        return _run(config, listening)


def _check_certificate(config: Config) -> None:
    if config.ssl_cert_file is not None:
        ssl.create_default_context().load_cert_chain(config.ssl_cert_file, config.ssl_key_file)


def _fail(message: str, *, code: int = 1) -> int:
    print(f"trioserve: {message}", file=sys.stderr)
    return code


# -- the socket


def open_socket(host: str, port: int, *, reuse: bool = False, both: bool = True) -> socket.socket:
    """Bind a socket: TCP, where port 0 takes a free one, or a path that ends in ``.sock``.

    With `reuse`, other sockets may be bound to the same port. Without `both`, an IPv6 address
    leaves the port free for IPv4.

    Raises:
        OSError: the name is not known, or the port is taken or not allowed.
    """
    if host.endswith(".sock"):
        return _open_path(Path(host))
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    opened = socket.socket(family, kind, protocol)
    try:
        if sys.platform != "win32":  # where it would let two servers share a port
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6 and not both:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        opened.bind(address)
    except OSError:
        opened.close()
        raise
    return opened


def _open_path(path: Path) -> socket.socket:
    """Bind a Unix socket, in the place of one that nobody listens on any more."""
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            if opened.connect_ex(str(path)) == 0:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            path.unlink()
        opened.bind(str(path))
    except OSError:
        opened.close()
        raise
    return opened


def _close(opened: socket.socket) -> None:
    """Close a socket, and remove the path of a Unix socket."""
    name = opened.getsockname()
    opened.close()
    if isinstance(name, str) and name:
        Path(name).unlink(missing_ok=True)


def _url(listening: socket.socket, *, secure: bool = False) -> str:
    scheme = "https" if secure else "http"
    name = listening.getsockname()
    if isinstance(name, str):
        return f"{scheme}+unix://{name}"
    host, port = name[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _hypercorn_config(config: Config, listening: Sequence[socket.socket]) -> hypercorn.Config:
    from hypercorn import Config as HypercornConfig

    logger = logging.getLogger("hypercorn.error")
    logger.setLevel(max(logger.getEffectiveLevel(), logging.WARNING))  # we say where we listen
    settings = HypercornConfig()
    settings.bind = [f"fd://{os.dup(each.fileno())}" for each in listening]
    settings.certfile, settings.keyfile = config.ssl_cert_file, config.ssl_key_file
    settings.backlog = _BACKLOG
    settings.accesslog = None  # requests have log lines of their own
    settings.errorlog = logger
    settings.keep_alive_timeout = config.keep_alive_timeout
    settings.keep_alive_max_requests = 2**31
    settings.graceful_timeout = _GRACE
    settings.include_server_header = False
    settings.h11_max_incomplete_size = 64 * 1024  # a request's line and headers
    settings.wsgi_max_body_size = config.max_body_size
    return settings


# -- serving


def _run(config: Config, listening: Sequence[socket.socket]) -> int:
    from hypercorn.utils import LifespanFailureError

    exit_code = 0
    try:
        trio.run(_serve, config, listening)
    except* LifespanFailureError:
        exit_code = 1  # there is no model; the service has logged why
    return exit_code


async def _serve(config: Config, listening: Sequence[socket.socket]) -> None:
    """Serve until a signal.

    Raises:
        ExceptionGroup: of `LifespanFailureError`, when the model cannot be loaded.
    """
    import hypercorn.trio

    from trioserve.app import create_app

    app = create_app(config, load=_load)
    service: Service = app.extensions["trioserve"]
    stop = trio.Event()
    settings = _hypercorn_config(config, listening)
    async with trio.open_nursery() as watching:
        await watching.start(_until_signal, service, stop)
        watching.start_soon(_announce, service)
        async with trio.open_nursery() as serving:
            await serving.start(
                partial(hypercorn.trio.serve, app, settings, shutdown_trigger=stop.wait)
            )
            for each in listening:
                url = _url(each, secure=config.ssl_cert_file is not None) + config.api_prefix
                _log.info("listening", url=url, model=config.model or "bundled")
        watching.cancel_scope.cancel()


async def _announce(service: Service) -> None:
    await service.wait_loaded()
    server = service.server
    # What was made until now stays: the garbage collector need not look at it again and again.
    gc.collect()
    gc.freeze()
    _log.info("ready", model=server.info.name, slots=server.n_slots, context=server.n_ctx_seq)


async def _until_signal(
    service: Service, stop: trio.Event, *, task_status: trio.TaskStatus[None]
) -> None:
    """Wait for a signal, drain, and set `stop`. A second signal meets the default action."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    with trio.open_signal_receiver(*numbers) as signals:
        task_status.started()
        number = await anext(signals)
    for each in numbers:
        signal.signal(each, signal.SIG_DFL)
    _log.info("draining", signal=signal.Signals(number).name)
    await service.drain()
    _exit_soon()
    stop.set()


def _exit_soon() -> None:
    """End the process even if a connection cannot be closed.

    Hypercorn writes to a socket under a shield, so a client that does not read could keep the
    server from ending for as long as it likes.
    """

    def end() -> None:
        _log.warning("some connections did not close in time")
        sys.stderr.flush()
        os._exit(0)

    timer = threading.Timer(_GRACE + 2.0, end)
    timer.daemon = True
    timer.start()


# -- loading


def _load(config: Config, *, progress: Callable[[float], bool] | None = None) -> AnyBackend:
    """Load the model, and tell how far it is. Runs in a worker thread."""
    report = LoadReport(config.model or "the bundled model", sys.stderr)

    def both(share: float) -> bool:
        report(share)
        return progress is None or progress(share)

    try:
        return llama.load(config, progress=both)
    finally:
        report.end()


class LoadReport:
    """Tells how far loading is: a line that changes on a terminal, else a log line each quarter.

    Says nothing in the first `patience` seconds, because most models are there by then.
    """

    def __init__(self, name: str, stream: TextIO, *, patience: float = 1.0) -> None:
        self._name = name
        self._stream = stream
        self._speaks_at = monotonic() + patience
        self._quarters = 0
        self._has_line = False

    def __call__(self, share: float) -> None:
        """Report that `share` (0.0 to 1.0) is loaded."""
        if monotonic() < self._speaks_at:
            return
        if self._stream.isatty():
            self._has_line = True
            self._stream.write(f"\rLoading {self._name}: {share:4.0%}")
            self._stream.flush()
        elif int(share * 4) > self._quarters:
            self._quarters = int(share * 4)
            _log.info("loading", model=self._name, percent=self._quarters * 25)

    def end(self) -> None:
        """Leave the terminal's line clean."""
        if self._has_line:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
