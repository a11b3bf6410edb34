"""`with_files`: the model of this machine that ``-m NAME`` means, in all commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trioserve.config.parse import flag_of, n_values, parse
from trioserve.errors import UnknownModelError
from trioserve.models.catalog import Catalog
from trioserve.models.catalog.catalog import find_named


def with_files(flags: Sequence[str], environ: Mapping[str, str]) -> Sequence[str]:
    """Add the flags of the model of this machine that the flags name as a request would. Blocks.

    What names a file or a model that can be downloaded stays as it is.

    Raises:
        UnknownModelError: there is no such model, and the name cannot be one of a file.
        AmbiguousModelError: the name may mean several.
    """
    config = parse(flags, environ).config
    name = config.model
    if name is None or name.endswith(".gguf") or Path(name).exists():
        return flags
    try:
        entry = find_named(Catalog(config, flags, environ).entries, name, ("case", "part"))
    except UnknownModelError:
        if Path(name).name == name:
            raise
        return flags
    return [*_without_model(flags), *entry.args]


def _without_model(flags: Sequence[str]) -> Iterator[str]:
    """Leave out the flag whose place those of an entry take."""
    left = [*reversed(flags)]
    while left:
        word = left.pop()
        n = n_values(word, left[-1:]) or 0
        words = [word, *(left.pop() for _ in range(n))]
        if (flag := flag_of(word)) is None or flag.field != "model":
            yield from words
