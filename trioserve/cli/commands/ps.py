"""``trioserve ps``: the models that a running server has loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from trioserve.cli.address import Address, take_value
from trioserve.cli.commands import bytes_text, duration_text, table, take
from trioserve.cli.local_server import asked, models_at
from trioserve.cli.signals import run_until_signal
from trioserve.config.parse import parse
from trioserve.errors import TrioServeError
from trioserve.remote.answers import Model, Text

_FOR_GOOD = 10 * 365 * 24 * 3600.0
_HEADINGS = ("NAME", "STATE", "SIZE", "SLEEPS")


class _InMemory(msgspec.Struct):
    name: Text
    expires_at: Text = ""


class _Running(msgspec.Struct):
    models: list[_InMemory] | None = None


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command; see `trioserve.cli.commands`.

    Raises:
        ConfigError: a flag or a variable is invalid.
        TrioServeError: no server answers, or the answer is invalid.
    """
    words, switches = take(argv, "--all")
    url, flags = take_value("--url", words)
    address = Address.of(url, parse(flags, environ).config)
    found: list[tuple[str, str, str, str]] = []

    async def look() -> None:
        listed = await models_at(address)
        try:
            running = await asked(address, "/api/ps", _Running)
        except TrioServeError:  # a server of another kind
            running = _Running()
        found.extend(_rows(listed, running.models))

    code = run_until_signal(look)
    rows = [row for row in found if "--all" in switches or row[1] != "unloaded"]
    print(table([_HEADINGS, *rows]), end="")
    return code


def _rows(
    listed: Sequence[Model], running: Sequence[_InMemory] | None
) -> Iterator[tuple[str, str, str, str]]:
    """Make the rows of the table. `running` are models that sleep later: None if not known."""
    # A server with one model gives it no status, and does not list a sleeping one as running.
    sleeps = {one.name: one.expires_at for one in running or ()}
    for one in listed:
        alone = "sleeping" if running is not None and one.id not in sleeps else "loaded"
        state = alone if one.status is None else "failed" if one.status.failed else one.state
        size = one.size or (one.meta and one.meta.size)
        yield (
            one.id,
            state,
            bytes_text(size) if size else "",
            _sleeps(sleeps.get(one.id, "")),
        )


def _sleeps(moment: str) -> str:
    """Format the time until a moment in the form of RFC 3339; empty without one."""
    try:
        seconds = (datetime.fromisoformat(moment) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):
        return ""
    return "never" if seconds > _FOR_GOOD else f"in {duration_text(max(0.0, seconds))}"
