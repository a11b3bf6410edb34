"""``trioserve list``: the models in the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from trioserve.cli.units import bytes_text
from trioserve.errors import ConfigError


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command; see `trioserve.cli.commands`.

    Raises:
        ConfigError: something follows the name of the command.
    """
    if argv:
        raise ConfigError(f"list takes no flags and no names, such as {argv[0]!r}")
    print(text(), end="")
    return 0


def text() -> str:
    """A line for each model: its name, its size, and when it was downloaded."""
    from trioserve.models.hub import cached_models

    rows = [("NAME", "SIZE", "DOWNLOADED")]
    for model in cached_models():
        downloaded = datetime.fromtimestamp(model.files[0].stat().st_mtime)
        rows.append((model.name, bytes_text(model.size), f"{downloaded:%Y-%m-%d %H:%M}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(
        f"{name:<{widths[0]}}  {size:>{widths[1]}}  {downloaded}\n"
        for name, size, downloaded in rows
    )
