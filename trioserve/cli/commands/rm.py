"""``trioserve rm``: deletes models from the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trioserve.cli.units import bytes_text
from trioserve.errors import ConfigError


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command; see `trioserve.cli.commands`.

    Raises:
        TrioServeError: a model is not there, or cannot be deleted.
    """
    from trioserve.models.hub import HubReference, remove

    flags = [word for word in argv if word.startswith("-")]
    if flags or not argv:
        raise ConfigError("rm takes the names of models, as trioserve list has them")
    for name in argv:
        removed = remove(HubReference.parse(name))
        print(f"deleted {removed.name}: {bytes_text(removed.size)}")
    return 0
