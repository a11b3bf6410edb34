"""``trioserve mcp``: an MCP server on standard input and output that offers models."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import structlog
import trio

from trioserve.cli.address import Address, take_url
from trioserve.config import Config, logs
from trioserve.config.parse import parse
from trioserve.errors import ConfigError, TrioServeError, first_error
from trioserve.models import gguf, resolve
from trioserve.models.catalog import Catalog, OneModel
from trioserve.models.fetch import is_local

if TYPE_CHECKING:
    from trioserve.mcp_server.models import ModelSource

_log = structlog.stdlib.get_logger("trioserve.mcp")


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command; see `trioserve.cli.commands`.

    Raises:
        ConfigError: a flag or a variable is invalid, or the package `mcp` is not installed.
        ModelLoadError: the model's file does not exist, or is not a model.
        TrioServeError: models cannot be served here, or the client has sent invalid data.
    """
    try:
        from trioserve.mcp_server.models import models_of_server
        from trioserve.mcp_server.stdio import taken
    except ImportError as error:
        raise ConfigError(
            f"mcp: {error.name} is not installed; pip install 'trioserve[mcp]'"
        ) from None
    url, words = take_url(argv)
    parsed = parse(words, environ)
    logs.configure(parsed.config)
    for note in parsed.notes:
        _log.warning(note)
    if url is None:
        models = _own(parsed.config, words, environ)
    else:
        address, api_key = Address.of(url, parsed.config), next(iter(parsed.config.api_keys), None)
        models = models_of_server(address.url, socket_path=address.socket_path, api_key=api_key)
    failure: BaseException | None = None
    with taken() as (stdin, stdout):
        try:
            trio.run(_serve, models, stdin, stdout)
        except* TrioServeError as group:
            failure = group
    if failure is not None:
        raise first_error(failure)
    return 0


def _own(
    config: Config, words: Sequence[str], environ: Mapping[str, str]
) -> AbstractAsyncContextManager[ModelSource]:
    from trioserve.mcp_server.models import models_of_catalog

    if config.model_named is None and not config.rpc:
        catalog = Catalog.of(config, words, environ)
    else:
        if is_local(config):
            with gguf.read(resolve(config.model)):  # report a bad file now, not at the first call
                pass
        catalog = OneModel(config, words, environ, load_on_startup=False)
    return models_of_catalog(
        catalog, max_models=config.models_max, max_memory=config.models_memory * 2**20
    )


async def _serve(models: AbstractAsyncContextManager[ModelSource], stdin: int, stdout: int) -> None:
    """Serve until the input ends, or a signal comes."""
    from trioserve.mcp_server.serving import mcp_server
    from trioserve.mcp_server.stdio import connected

    async with trio.open_nursery() as nursery:
        await nursery.start(_until_signal, nursery.cancel_scope)
        async with models as opened, connected(stdin, stdout) as (heard, said):
            server = mcp_server(opened)
            await server.run(heard, said, server.create_initialization_options())
        nursery.cancel_scope.cancel()


async def _until_signal(scope: trio.CancelScope, *, task_status: trio.TaskStatus[None]) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        await anext(signals)
    scope.cancel()
