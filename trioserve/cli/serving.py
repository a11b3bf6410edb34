"""Serves until a signal: runs the app with Hypercorn on the sockets."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from trioserve.children import reports
from trioserve.cli.memory import keep_collecting, uncollected
from trioserve.cli.output import complain
from trioserve.cli.progress import EarlyLoad, Reporter, fetch, load
from trioserve.cli.signals import first_signal
from trioserve.cli.systemd import take_sockets
from trioserve.config import Config
from trioserve.config.keys import read_keys
from trioserve.errors import ConfigError, TrioServeError
from trioserve.hosts import is_local
from trioserve.log import get_logger
from trioserve.models import BUNDLED, TOY, resolve
from trioserve.models.fetch import fetch as find_files, is_local as is_on_disk

if TYPE_CHECKING:
    import hypercorn
    from quart_trio import QuartTrio

    from trioserve.api.router.service import RouterService
    from trioserve.api.service import AppState, Service
    from trioserve.children.child import Child
    from trioserve.models.catalog import Catalog
    from trioserve.router.fleet import Fleet
    from trioserve.server.lifecycle.engine import Loader
    from trioserve.server.server import Server
    from trioserve.server.usage import Usage

_log = get_logger("trioserve")

#: From how many models on their names are not listed.
_MANY = 6

#: Connections that the kernel queues until the server accepts them.
_BACKLOG = 1024

#: Seconds for connections to close after the last request.
_GRACE = 3.0

#: Seconds between two reports of usage to a router, and the rows of one, of 300 bytes each.
_USAGE_INTERVAL = 1.0
_USAGE_ROWS = 1000


def serve(
    config: Config,
    status: Reporter | None = None,
    catalog: Catalog | None = None,
    zygote: Child | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT. Blocks; returns the exit code.

    The models of a catalog have a process each, and take the place of the one that the
    configuration names. The zygote was forked for these processes.
    """
    status = status or Reporter()
    if status.parent is not None:
        status.parent.end_with_it()
    exit_code = 0
    with ExitStack() as closing:
        try:
            _check_files(config)
            if catalog is None or config.rpc:
                check_models(config)
            listening = closing.enter_context(open_sockets(config))
            check_reach(config, listening)
        except TrioServeError as error:
            status.tell(reports.Failed.of(complain(error)))
            return 1
        status.tell(reports.Loading(0.0))
        with uncollected():
            loading = begin_load(config, status, closing) if catalog is None else None
            from hypercorn.utils import LifespanFailureError

            from trioserve.api.edge.tcp import raise_limit

            raise_limit()
            app = _make_app(config, status, catalog, zygote, loading)
        try:
            trio.run(_serve, app, config, listening, status)
        except* LifespanFailureError:
            exit_code = 1  # no model or no engine; the service has logged the reason
    return exit_code


def begin_load(config: Config, status: Reporter, closing: ExitStack) -> Loader:
    """Return what loads the model, which has begun if the rest is still to be imported."""
    from trioserve.llama import last_word, room, trial  # noqa: F401 (needed for that)

    last_word.install(2, _last_word)
    loading: Loader = partial(load, status)
    if is_on_disk(config) and not config.rpc and "trioserve.app" not in sys.modules:
        loading = early = EarlyLoad(loading, config)
        closing.callback(early.close)
    return loading


def _last_word(files: str) -> str:
    in_use = f"; it was at work with {files}" if files else ""
    return f"trioserve: a fault in native code ends this process{in_use}"


def check_models(config: Config) -> None:
    """Check the files and the names of models before the port is open.

    Raises:
        ModelLoadError: a file does not exist, or is not a GGUF file; or nothing may be downloaded,
            and a model is not in the cache.
        InvalidRequestError: a name is not one of a model on the hub.
    """
    from trioserve.models.gguf import check_file
    from trioserve.models.hub.cache import is_offline
    from trioserve.models.hub.reference import HubReference
    from trioserve.models.speech import resolve_speech

    for name in filter(None, (config.hf_repo, config.spec_draft_hf)):
        HubReference.parse(name)
    if config.offline or is_offline():
        trio.run(find_files, config)
    if is_on_disk(config):  # others may be downloaded while the port is open
        check_file(resolve(config.model))
        if config.spec_draft_model is not None:
            check_file(resolve(config.spec_draft_model))
        if (speech := resolve_speech(config)) is not None:
            check_file(speech.model)
            check_file(speech.projector)


def _check_files(config: Config) -> None:
    """Check other files before the port is open. Raises ConfigError."""
    config.mcp_servers()
    if config.keys_file is not None:
        read_keys(config.keys_file)
    if config.static_path is not None and not Path(config.static_path).is_dir():
        raise ConfigError(f"--path: {config.static_path} is not a directory")
    if config.ssl_cert_file is not None:
        try:
            ssl.create_default_context().load_cert_chain(config.ssl_cert_file, config.ssl_key_file)
        except (OSError, ssl.SSLError) as error:
            reason = error.strerror or error
            raise ConfigError(f"the certificate or its key cannot be used: {reason}") from None


def check_reach(config: Config, listening: Sequence[socket.socket]) -> None:
    """Check that the server does not expose its tools to strangers. Raises ConfigError: it does."""
    if config.has_api_keys or not (config.has_tools or config.has_mcp_proxy):
        return
    for each in listening:
        if each.family != socket.AF_UNIX and not is_local(each.getsockname()[0]):
            raise ConfigError(
                f"any client that reaches {url_of(each, secure=config.ssl_cert_file is not None)} "
                "could use the tools of this server: set --api-key, or listen on 127.0.0.1"
            )


async def _serve(
    app: QuartTrio, config: Config, listening: Sequence[socket.socket], status: Reporter
) -> None:
    """Serve until a signal. Raises a group with LifespanFailureError if the engine is lost."""
    import hypercorn.trio

    from trioserve.api.service import Service

    service: Service | RouterService = app.extensions["trioserve"]
    model = config.model_named or "bundled" if isinstance(service, Service) else "many"
    stop = trio.Event()
    made = hypercorn_config(config, listening)
    async with trio.open_nursery() as watching:
        await watching.start(_until_signal, service, status, stop)
        watching.start_soon(_follow_failure, service, status)
        async with trio.open_nursery() as serving:
            await serving.start(
                partial(hypercorn.trio.serve, app, made, shutdown_trigger=stop.wait)
            )
            secure = config.ssl_cert_file is not None
            urls = [url_of(each, secure=secure) + config.api_prefix for each in listening]
            for url in urls:
                _log.info("listening", url=url, model=model)
            watching.start_soon(_follow_model, service, status, urls, watching)
        watching.cancel_scope.cancel()


def _make_app(
    config: Config,
    status: Reporter,
    catalog: Catalog | None,
    zygote: Child | None,
    loading: Loader | None,
) -> QuartTrio:
    from trioserve.app import create_app, create_router

    if catalog is not None:
        return create_router(config, partial(fleet_of, config, catalog, zygote))
    app = create_app(config, load=loading)
    app.extensions["trioserve"].fetch = partial(fetch, status)
    return app


def hypercorn_config(config: Config, listening: Sequence[socket.socket]) -> hypercorn.Config:
    """Make the configuration of Hypercorn, which serves on these sockets."""
    from hypercorn import Config as HypercornConfig

    from trioserve.api.edge.tcp import HEAD_SECONDS

    logger = logging.getLogger("hypercorn.error")
    logger.setLevel(max(logger.getEffectiveLevel(), logging.WARNING))  # trioserve logs the address
    made = HypercornConfig()
    made.bind = [f"fd://{os.dup(each.fileno())}" for each in listening]
    made.certfile, made.keyfile = config.ssl_cert_file, config.ssl_key_file
    made.backlog = _BACKLOG
    made.accesslog = None  # the app logs each request
    made.errorlog = logger
    made.keep_alive_timeout = config.keep_alive_timeout
    made.ssl_handshake_timeout = HEAD_SECONDS
    made.keep_alive_max_requests = 2**31
    made.graceful_timeout = _GRACE
    made.include_server_header = False
    made.h11_max_incomplete_size = 64 * 1024  # a request's line and headers
    made.wsgi_max_body_size = config.max_body_size
    return made


async def _until_loaded(fleet: Fleet, names: Sequence[str]) -> None:
    """Wait until the models are loaded, or not, that are loaded before the first request."""
    from trioserve.router.states import Status

    begun = (Status.LOADING, Status.DOWNLOADING)
    with fleet.events.subscribe() as news:
        while any(fleet.state(name).value in begun for name in names):
            await anext(news)


def tell_how_to_use(config: Config, urls: Sequence[str], model: str) -> None:
    """Say on a terminal, after all that was logged, what the user needs first."""
    level, form = config.log_level, config.log_format
    if not sys.stderr.isatty() or form == "json" or level not in ("debug", "info"):
        return
    url = next((each for each in urls if each.startswith(("http://", "https://"))), "")
    url = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    page = [("page", url)] if config.ui and url else []
    rows = [*page, ("API", f"{url}/v1" if url else urls[0]), ("model", model), ("stop", "Ctrl-C")]
    sys.stderr.write("\n" + "".join(f"  {name:<7}{value}\n" for name, value in rows) + "\n")


async def _follow_model(
    service: Service | RouterService,
    status: Reporter,
    urls: Sequence[str],
    nursery: trio.Nursery,
) -> None:
    """Report each load and unload of the model. Starts garbage collection at the first load."""
    from trioserve.api.service import Service

    await service.wait_loaded()
    nursery.start_soon(keep_collecting, lambda: service.memory.n_held)
    if not isinstance(service, Service):
        fleet = service.fleet
        names = [one.name for one in fleet.catalog.entries.values() if not one.hidden]
        _log.info("ready", models=len(fleet.catalog.entries))
        status.tell(reports.Ready())
        await _until_loaded(fleet, names)
        few = ", ".join(names) if len(names) < _MANY else f"{len(names)}; /v1/models lists them"
        tell_how_to_use(service.config, urls, few)
        return
    tell_ready(service.server)
    tell_how_to_use(service.config, urls, service.server.model.info.name)
    status.tell(reports.Ready())
    await follow_state(service.server, status)


async def follow_state(
    server: Server, status: Reporter, loaded: Callable[[], object] = lambda: None
) -> None:
    """Report each time that the model is freed or loaded again; then, it calls `loaded` before."""
    from trioserve.server import ServerState

    told = ServerState.READY
    async for state in server.lifecycle.state.eventual_values():
        if state in (ServerState.SLEEPING, ServerState.READY) and state is not told:
            told = state
            if state is ServerState.READY:
                loaded()
            status.tell(reports.Ready() if state is ServerState.READY else reports.Sleeping())


async def report_usage(server: Server, status: Reporter) -> None:
    """Report what API keys use, until cancelled, and the rest then."""
    usage = server.resources.usage
    try:
        while True:
            await usage.news.wait()
            await trio.sleep(_USAGE_INTERVAL)
            _tell_usage(usage, status)
    finally:
        _tell_usage(usage, status)


def _tell_usage(usage: Usage, status: Reporter) -> None:
    rows = usage.take_rows()
    for start in range(0, len(rows), _USAGE_ROWS):
        status.tell(reports.Usage(rows[start : start + _USAGE_ROWS]))


def tell_ready(server: Server) -> None:
    """Log that the model is loaded, and what its user should know."""
    model = server.model
    _log.info("ready", model=model.info.name, slots=model.n_slots, longest_request=model.n_ctx_seq)
    if Path(model.info.path) == BUNDLED:
        _log.info(
            f"the bundled model {TOY}; trioserve pull downloads a real one, and -m names its file"
        )
    if model.context_advice is not None:
        _log.warning(model.context_advice)
    if model.has_chat_template is False:
        _log.warning(
            "the model file has no chat template: it may be a base model, whose answers to chats "
            "make no sense; set --chat-template if the model has one"
        )


async def _until_signal(
    service: AppState, status: Reporter, stop: trio.Event, *, task_status: trio.TaskStatus[None]
) -> None:
    """Wait for a signal, drain, and set `stop`."""
    number = await first_signal(task_status)
    _log.info("draining", signal=signal.Signals(number).name)
    status.tell(reports.Draining())
    await service.drain()
    stop.set()


async def _follow_failure(service: AppState, status: Reporter) -> None:
    """Report why the server fails. The process ends with it."""
    await service.wait_ended()
    if service.failure is not None:
        status.tell(reports.Failed.of(service.failure.message))


# -- sockets

#: Bytes that the kernel keeps for a client that does not read, in all and unsent. The default
#: would be megabytes, so that a request runs on for thousands of tokens before it is paused.
_SEND_BUFFER, _UNSENT = 128 * 1024, 32 * 1024


@contextmanager
def open_sockets(config: Config) -> Iterator[list[socket.socket]]:
    """Bind a socket to each address of `Config.host`; they are closed at the end of the block.

    Sockets that systemd has opened take their place.

    Raises:
        ConfigError: an address cannot be used.
    """
    hosts = [host.strip() for host in config.host.split(",")]
    with ExitStack() as closing:
        opened = [closing.enter_context(one) for one in take_sockets(os.environ)]
        for one in opened:
            _bound_unread(one)
        for host in hosts if not opened else ():
            try:
                one = open_socket(host, config.port, reuse=config.reuse_port, both=len(hosts) == 1)
                closing.callback(_close, one)
                one.listen()  # where another socket of the list has the address, this fails
            except OSError as error:
                where = host if host.endswith(".sock") else f"{host}:{config.port}"
                reason = error.strerror or error
                raise ConfigError(f"cannot listen on {where}: {reason}") from None
            opened.append(one)
        yield opened


def open_socket(host: str, port: int, *, reuse: bool = False, both: bool = True) -> socket.socket:
    """Bind a socket: TCP, where port 0 takes a free one, or a path that ends in ``.sock``.

    With `reuse`, other sockets may be bound to the same port. Without `both`, an IPv6 address
    leaves the port free for IPv4.

    Raises:
        OSError: the name is not known, or the port is taken or not allowed.
    """
    if host.endswith(".sock"):
        return _open_path(Path(host))
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    opened = socket.socket(family, kind, protocol)
    try:
        if sys.platform != "win32":  # where it would let two servers share a port
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6 and not both:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        _bound_unread(opened)
        opened.bind(address)
    except OSError:
        opened.close()
        raise
    return opened


def _bound_unread(opened: socket.socket) -> None:
    """Bound what the kernel keeps of answers that are not read; connections inherit it."""
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    if opened.family in (socket.AF_INET, socket.AF_INET6):
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)


def _open_path(path: Path) -> socket.socket:
    """Bind a Unix socket. Replaces the socket of a server that has ended."""
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
    name = opened.getsockname()
    opened.close()
    if isinstance(name, str) and name:
        Path(name).unlink(missing_ok=True)


def url_of(listening: socket.socket, *, secure: bool = False) -> str:
    """Return the URL that clients use for a listening socket."""
    scheme = "https" if secure else "http"
    name = listening.getsockname()
    if isinstance(name, str):
        return f"{scheme}+unix://{name}"
    host, port = name[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


# -- one model or many


def catalog_of(
    config: Config, argv: Sequence[str], environ: Mapping[str, str], *, watched: bool = False
) -> Catalog | None:
    """Find the models of the catalog; None if this process serves a single model. Blocks.

    A model that runs on several machines has a catalog with only itself: its process may end or
    hang with any of them, and must be watched. `watched`: another program does so, and restarts it.

    Raises:
        ConfigError: the models cannot be listed, or this machine cannot use other machines.
    """
    if config.rpc and not watched:
        from trioserve.llama.rpc import library

        library.check()
    if config.model_named is None:
        from trioserve.models.catalog import Catalog

        catalog = Catalog(config, argv, environ)
        # A program that watches this process, as `trioserve launch` does, already is what a router
        # would be for a single model.
        if not watched or len(catalog.entries) > 1 or config.models_dir or config.models_preset:
            return catalog
    if not config.rpc or watched:
        return None
    from trioserve.models.catalog import OneModel

    return OneModel(config, argv, environ)


def fleet_of(config: Config, catalog: Catalog, zygote: Child | None = None) -> Fleet:
    """Make the fleet that runs the models of a catalog."""
    from trioserve.router.fleet import Fleet

    return Fleet(
        catalog,
        max_models=config.models_max,
        max_memory=config.models_memory * 2**20,
        drain_timeout=config.drain_timeout,
        zygote=zygote,
    )
