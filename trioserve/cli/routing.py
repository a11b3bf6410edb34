"""One model or many: what a command line asks for, and the fleet that a router serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from trioserve.config import Config

if TYPE_CHECKING:
    from trioserve.router.fleet import Fleet


def fleet_of(
    config: Config, argv: Sequence[str], environ: Mapping[str, str]
) -> Callable[[], Fleet] | None:
    """Find the models that there are to choose from, unless one is named. Blocks.

    Args:
        config: what the command line and the variables say.
        argv: the command line, whose flags go to all models.
        environ: the variables.

    Returns:
        what makes their fleet; None where there is one model to serve.

    Raises:
        ConfigError: the models cannot be listed.
    """
    if config.model_named is not None:
        return None
    from trioserve.models.catalog import Catalog, Source

    catalog = Catalog.of(config, argv, environ)
    is_asked_for = config.models_dir is not None or config.models_preset is not None
    if not is_asked_for and all(one.source is Source.BUNDLED for one in catalog.entries.values()):
        return None

    def make() -> Fleet:
        from trioserve.router.fleet import Fleet

        return Fleet(
            catalog,
            max_models=config.models_max,
            max_memory=config.models_memory * 2**20,
            drain_timeout=config.drain_timeout,
        )

    return make
