"""``trioserve ps``: the models that a running server has loaded."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

from trioserve.cli.address import Address, take_value
from trioserve.cli.commands import bytes_text, duration_text, table, take
from trioserve.config.parse import parse
from trioserve.errors import UnavailableError

_FOR_GOOD = 10 * 365 * 24 * 3600.0
_HEADINGS = ("NAME", "STATE", "SIZE", "SLEEPS")


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command; see `trioserve.cli.commands`.

    Raises:
        ConfigError: a flag or a variable is invalid.
        UnavailableError: no server answers, or the answer is invalid.
    """
    words, switches = take(argv, "--all")
    url, flags = take_value("--url", words)
    config = parse(flags, environ).config
    found = _models(Address.of(url, config), next(iter(config.api_keys), None))
    rows = [row for row in found if "--all" in switches or row[1] != "unloaded"]
    print(table([_HEADINGS, *rows]), end="")
    return 0


def get(address: Address, path: str, api_key: str | None) -> tuple[int, Any]:
    """Send a request; returns the status and the JSON body, or None if the body is not JSON.

    Raises:
        UnavailableError: the server does not answer.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with closing(address.connect()) as connection:
            connection.request("GET", f"{address.prefix}{path}", headers=headers)
            response = connection.getresponse()
            body = response.read()
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UnavailableError(
            f"no server answers at {address}: {why}. Start one with `trioserve serve`, or name its "
            "address with --url."
        ) from error
    try:
        return response.status, json.loads(body)
    except ValueError:
        return response.status, None


def _models(address: Address, api_key: str | None) -> Iterator[tuple[str, str, str, str]]:
    """Get the server's models and the times at which loaded ones sleep; yields table rows.

    Raises:
        UnavailableError: the server does not answer, or the answer is invalid.
    """
    status, listed = get(address, "/models", api_key)
    _, running = get(address, "/api/ps", api_key)
    try:
        if status != http.HTTPStatus.OK:
            raise UnavailableError(f"{address} says: {listed['error']['message']}")
        found = [dict(one) for one in listed["data"]]
        # A server with one model gives it no status, and does not list a sleeping one as running.
        tells = bool(running) and "models" in running
        sleeps = {one["name"]: str(one["expires_at"]) for one in (running or {}).get("models", ())}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnavailableError(
            f"what answers at {address} does not list models: status {status}."
        ) from error
    for one in found:
        name = str(one.get("id", ""))
        alone = "sleeping" if tells and name not in sleeps else "loaded"
        state = one.get("status") or {"value": alone}
        size = one.get("size") or (one.get("meta") or {}).get("size")
        yield (
            name,
            "failed" if state.get("failed") else str(state.get("value", "")),
            bytes_text(size) if isinstance(size, int) and size else "",
            _sleeps(sleeps.get(name, "")),
        )


def _sleeps(moment: str) -> str:
    """Format the time until a moment in the form of RFC 3339; empty without one."""
    try:
        seconds = (datetime.fromisoformat(moment) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):
        return ""
    return "never" if seconds > _FOR_GOOD else f"in {duration_text(max(0.0, seconds))}"
