"""Servers that a command uses: the models of one that runs, and one that it starts itself."""

from __future__ import annotations

import math
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import attrs
import msgspec
import trio

from trioserve.children.launch import Spawner
from trioserve.children.reports import Failed, Loading, Ready, Report
from trioserve.cli.address import Address
from trioserve.cli.named import with_files
from trioserve.cli.output import RED, note
from trioserve.cli.progress import DownloadReport, ProgressReport
from trioserve.concurrency import alongside, deadline_scope
from trioserve.config import Config
from trioserve.config.parse import parse
from trioserve.errors import ConfigError, ModelLoadError, UnavailableError, UnknownModelError
from trioserve.models import BUNDLED, BUNDLED_NAME
from trioserve.models.catalog import ModelEntry, Source
from trioserve.models.catalog.catalog import find_named
from trioserve.models.fetch import fetch
from trioserve.remote.answers import Count, Model, Models
from trioserve.remote.client import ServerClient, connected_to
from trioserve.router.child import HealthCheck, ModelChild

T = TypeVar("T")

#: The names of the bundled model, alone and beside others.
_BUNDLED = (BUNDLED.name, BUNDLED_NAME)

#: Seconds for a server that was started here to end.
_GRACE = 10.0

#: Bytes and seconds for what a server tells of itself.
MAX_BYTES = 2**24
_PATIENCE = 30.0

#: Models that a message names.
_MAX_NAMES = 50


class _Modalities(msgspec.Struct):
    vision: bool = False


class _Defaults(msgspec.Struct):
    n_ctx: Count


class Props(msgspec.Struct):
    """The properties of a server."""

    default_generation_settings: _Defaults
    searches_web: bool = False
    modalities: _Modalities = msgspec.field(default_factory=_Modalities)
    is_toy: bool = False


def client_of(address: Address, n_kept: int = 4) -> AbstractAsyncContextManager[ServerClient]:
    """Give a client of the server at an address; see `connected_to`."""
    path, key = address.socket_path, address.api_key
    return connected_to(address.url, socket_path=path, api_key=key, n_kept=n_kept)


async def asked(address: Address, path: str, form: type[T]) -> T:
    """Ask a server about itself.

    Raises:
        TrioServeError: it does not answer as expected, or not in time.
    """
    late = f"The server at {address} has not answered after {_PATIENCE:g} seconds."
    with deadline_scope(trio.current_time() + _PATIENCE, late):
        async with client_of(address) as client:
            return await client.ask(path, form=form, most=MAX_BYTES)


async def props_of(client: ServerClient, model: str) -> Props:
    """Ask for the properties of a model, which a router loads for that."""
    return await client.ask(f"/props?model={quote(model)}", form=Props, most=MAX_BYTES)


async def models_at(address: Address) -> Sequence[Model]:
    """List the models of a server. Raises as `asked`."""
    return (await asked(address, "/v1/models", Models)).data


def only(models: Sequence[Model]) -> str:
    """The model of a server, if it has only one beside the bundled one, or has loaded only one.

    Raises:
        ConfigError: there are several.
        UnavailableError: it has no model.
    """
    if not models:
        raise UnavailableError("the server has no models")
    loaded = [one for one in models if one.state in ("loaded", "sleeping")]
    others = [one for one in models if one.id not in _BUNDLED]
    for some in (models, loaded, others):
        if len(some) == 1:
            return some[0].id
    raise ConfigError(f"name the model with --model; the server has {names_of(models)}")


def names_of(models: Sequence[Model]) -> str:
    """The names of models, for a sentence: the first ones of many."""
    names = [one.id for one in models[:_MAX_NAMES]]
    return ", ".join(names) + (", …" if len(models) > _MAX_NAMES else "")


def named(models: Sequence[Model], name: str) -> str | None:
    """The model of that name, or of that file; as in a request, a part of the name is enough.

    Raises:
        AmbiguousModelError: the name may mean several.
    """
    path = Path(name)
    is_file = path.suffix == ".gguf" or path.exists()
    names = {name, path.name, path.stem} if path.suffix == ".gguf" else {name}
    for one in models:
        if not names.isdisjoint({one.id, *one.aliases}):
            return one.id
    if is_file:
        return None
    entry = partial(ModelEntry, source=Source.PRESET, args=(), path=None)
    entries = {one.id: entry(name=one.id, aliases=tuple(one.aliases)) for one in models}
    try:
        return find_named(entries, name, ("case", "part")).name
    except UnknownModelError:
        return None


@asynccontextmanager
async def server_at(
    url: str | None, flags: Sequence[str], config: Config, environ: Mapping[str, str]
) -> AsyncIterator[Address]:
    """Give the server at a URL, or without one that of `started`."""
    if url is not None:
        yield Address.of(url, config)
        return
    async with started(flags, config, environ) as address:
        yield address


@asynccontextmanager
async def started(
    flags: Sequence[str], config: Config, environ: Mapping[str, str]
) -> AsyncIterator[Address]:
    """Run a server on a free port of this machine for the length of a block.

    `config` is what the flags mean.

    Raises:
        ConfigError: the command has no key for it.
        ModelLoadError: it does not start.
        UnknownModelError, AmbiguousModelError: see `with_files`.
    """
    if config.keys_file is not None and not config.api_keys:
        raise ConfigError("keys_file: this command starts a server that would refuse it; give it a "
                          "key with --api-key, too")  # fmt: skip
    flags = await trio.to_thread.run_sync(with_files, flags, environ)
    with DownloadReport(sys.stderr) as downloads:
        await fetch(parse(flags, environ).config, downloads)
    address = attrs.evolve(Address.of(None, config), host="127.0.0.1", port=_free_port())
    argv = [*flags, "--host", address.host, "--port", str(address.port)]
    name = config.model_named or "bundled"
    entry = ModelEntry(name=name, source=Source.PRESET, args=tuple(flags), path=None)
    child = ModelChild(name, 0, entry=entry, watch=HealthCheck(interval=math.inf))
    decided = trio.Event()
    with ProgressReport(sys.stderr) as progress:

        def told(report: Report | None) -> None:
            match report:
                case None if not child.ended.is_set():
                    return  # soon it has
                case Ready() | Failed() | None:
                    decided.set()
                case Loading(share) if not decided.is_set():
                    progress.tell(f"Loading {child.name}", share)

        async with alongside(partial(child.run, Spawner(environ), argv, told)):
            await decided.wait()
            progress.end()
            if child.message is not None or child.ended.is_set():
                raise ModelLoadError(child.last_words())
            try:
                yield address
            finally:
                await _end(child)


async def _end(child: ModelChild) -> None:
    """End a server and wait for its end, in a shield. Print a line if it had ended before."""
    if child.ended.is_set():
        note(child.last_words(), RED)
    child.stop(_GRACE)
    with trio.CancelScope(shield=True):
        await child.ended.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
