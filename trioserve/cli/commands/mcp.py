"""``trioserve mcp``: an MCP server that offers models, by standard input and output or by HTTP."""

from __future__ import annotations

import socket
import webbrowser
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import trio

from trioserve.cli.address import Address, place_of
from trioserve.cli.named import with_files
from trioserve.cli.options import Arguments
from trioserve.cli.output import note
from trioserve.cli.serving import fleet_of, hypercorn_config, open_sockets, url_of
from trioserve.cli.signals import run_until_signal
from trioserve.config import Config, logs
from trioserve.config.parse import parse
from trioserve.errors import ConfigError
from trioserve.log import get_logger
from trioserve.models import gguf, resolve
from trioserve.models.catalog import Catalog, OneModel
from trioserve.models.fetch import is_local
from trioserve.server.keys import Keys

if TYPE_CHECKING:
    from trioserve.mcp_server.models import ModelSource

#: Offers models to clients until they are gone.
Serve: TypeAlias = "Callable[[ModelSource], Awaitable[None]]"

_log = get_logger("trioserve.mcp")


def run(given: Arguments) -> int:
    """Run the command; see `trioserve.cli.commands`."""
    words = with_files(given.flags, given.environ)
    parsed = parse(words, given.environ)
    config = parsed.config
    logs.configure(config)
    try:
        if given.words:
            return _login(given.words, config)
        from trioserve.mcp_server.models import models_of_server
        from trioserve.mcp_server.stdio import taken
    except ImportError as error:
        message = f"mcp: {error.name} is not installed; install trioserve with its extra mcp"
        raise ConfigError(message) from None
    url, http = given["url"], given["http"]
    for each in parsed.notes:
        _log.warning(each)
    keys = Keys(config)
    keys.load()
    if url is None:
        if keys.needed and http is None and not keys.first:
            raise ConfigError("keys_file has no effect without --http: leave it out")
        models = _own(config, keys, words, given.environ)
    else:
        address = Address.of(url, config)
        models = models_of_server(
            address.url, socket_path=address.socket_path, api_key=address.api_key
        )
    with ExitStack() as closing:
        if http is None:
            serve: Serve = partial(_serve_stdio, *closing.enter_context(taken()))
        else:
            host, port = place_of(http)
            config = attrs.evolve(config, host=host, port=port)
            serve = partial(_serve_http, config, keys, closing.enter_context(open_sockets(config)))

        async def work() -> None:
            async with models as opened:
                await serve(opened)

        run_until_signal(work)
    return 0


def _login(words: Sequence[str], config: Config) -> int:
    word, *names = words
    if word != "login" or len(names) != 1:
        raise ConfigError("mcp takes no word but login, and the name of an MCP server after it")
    from trioserve.tools.mcp.entries import HttpEntry
    from trioserve.tools.mcp.login import login
    from trioserve.tools.mcp.tools import entries_of

    entries = {each.name: each for each in entries_of(config) if isinstance(each, HttpEntry)}
    if (entry := entries.get(names[0])) is None:
        raise ConfigError(
            f"no MCP server at an address is called {names[0]!r}; there are: {', '.join(entries)}"
        )

    async def show(url: str) -> None:
        note(f"log in at {url}")
        await trio.to_thread.run_sync(webbrowser.open, url)

    path = trio.run(login, entry, show)
    note("this server wants no login" if path is None else f"the token is in {path}")
    return 0


def _own(
    config: Config, keys: Keys, words: Sequence[str], environ: Mapping[str, str]
) -> AbstractAsyncContextManager[ModelSource]:
    from trioserve.mcp_server.models import models_of_fleet

    if config.model_named is None and not config.rpc:
        catalog = Catalog(config, words, environ)
    else:
        if is_local(config):
            with gguf.read(resolve(config.model)):  # report a bad file now, not at the first call
                pass
        catalog = OneModel(config, words, environ, load_on_startup=False)
    return models_of_fleet(fleet_of(config, catalog), keys)


async def _serve_stdio(stdin: int, stdout: int, models: ModelSource) -> None:
    from trioserve.mcp_server.serving import mcp_server
    from trioserve.mcp_server.stdio import connected

    async with connected(stdin, stdout) as (heard, said):
        server = mcp_server(models)
        await server.run(heard, said, server.create_initialization_options())


async def _serve_http(
    config: Config, keys: Keys, listening: Sequence[socket.socket], models: ModelSource
) -> None:
    import hypercorn.trio

    from trioserve.api.edge.tcp import raise_limit
    from trioserve.cli.mcp_http import PATH, mcp_app

    raise_limit()
    made = hypercorn_config(config, listening)
    app: Any  # Hypercorn's type of an app has messages that are classes
    async with mcp_app(models, config, keys) as app, trio.open_nursery() as nursery:
        await nursery.start(
            partial(hypercorn.trio.serve, app, made, shutdown_trigger=trio.sleep_forever)
        )
        for each in listening:
            url = url_of(each, secure=config.ssl_cert_file is not None)
            _log.info("listening", url=f"{url}{config.api_prefix}{PATH}")
