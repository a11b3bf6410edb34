"""``trioserve ps`` and ``stop``: the models that a running server has loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from trioserve.cli.address import Address
from trioserve.cli.local_server import asked, client_of, models_at, named, names_of, only
from trioserve.cli.options import Arguments
from trioserve.cli.output import Column, print_list
from trioserve.cli.signals import run_until_signal
from trioserve.config.parse import parse
from trioserve.errors import ConfigError, TrioServeError
from trioserve.remote.answers import Model, Text
from trioserve.units import bytes_text, duration_text

_FOR_GOOD = 10 * 365 * 24 * 3600.0


class _InMemory(msgspec.Struct):
    name: Text
    expires_at: Text = ""


class _Running(msgspec.Struct):
    models: list[_InMemory] | None = None


class _Done(msgspec.Struct):
    """An answer that says nothing else."""


def run(given: Arguments) -> int:
    """Run the command; see `trioserve.cli.commands`."""
    address = Address.of(given["url"], parse(given.flags, given.environ).config)
    found: list[dict[str, Any]] = []

    async def look() -> None:
        listed = await models_at(address)
        try:
            running = await asked(address, "/api/ps", _Running)
        except TrioServeError:  # a server of another kind
            running = _Running()
        found.extend(_rows(listed, running.models))

    code = run_until_signal(look)
    rows = [row for row in found if given["all"] or row["state"] != "unloaded"]
    print_list(_COLUMNS, rows, as_json=given["json"])
    return code


def stop(given: Arguments) -> int:
    """Unload a model of a running server, by Ollama's API."""
    config = parse(given.flags, given.environ).config
    address, name = Address.of(given["url"], config), given.first or config.model

    async def unload() -> None:
        models = await models_at(address)
        loaded = [one for one in models if one.state == "loaded"]
        found = only(loaded) if name is None else named(models, name)
        if found is None:
            raise ConfigError(f"{address} has no model {name}; it has {names_of(models)}")
        body = {"model": found, "keep_alive": 0, "stream": False}
        async with client_of(address) as client:
            await client.ask("/api/generate", body, form=_Done)
        print(f"{found} is unloaded; the next request loads it again")

    return run_until_signal(unload)


def _rows(listed: Sequence[Model], running: Sequence[_InMemory] | None) -> Iterator[dict[str, Any]]:
    """Make the rows of the table. `running` are models that sleep later: None if not known."""
    # A server with one model gives it no status, and does not list a sleeping one as running.
    sleeps = {one.name: one.expires_at for one in running or ()}
    for one in listed:
        alone = "sleeping" if running is not None and one.id not in sleeps else "loaded"
        yield {
            "name": one.id,
            "state": alone if one.status is None else "failed" if one.status.failed else one.state,
            "size": one.size or (one.meta and one.meta.size) or None,
            "expires_at": sleeps.get(one.id),
        }


def _sleeps(moment: str) -> str:
    """Format the time until a moment in the form of RFC 3339; empty without one."""
    try:
        seconds = (datetime.fromisoformat(moment) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):
        return ""
    return "never" if seconds > _FOR_GOOD else f"in {duration_text(max(0.0, seconds))}"


_COLUMNS = (
    Column("name"),
    Column("state"),
    Column("size", bytes_text),
    Column("expires_at", _sleeps, heading="SLEEPS"),
)
