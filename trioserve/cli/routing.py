"""One model or many: what a command line asks for, and the fleet that a router serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from trioserve.config import Config

if TYPE_CHECKING:
    from trioserve.models.catalog import Catalog
    from trioserve.router.fleet import Fleet


def fleet_of(
    config: Config, argv: Sequence[str], environ: Mapping[str, str], *, watched: bool = False
) -> Callable[[], Fleet] | None:
    """Find the models that there are to choose from, unless one is named. Blocks.

    A model that other machines compute has a fleet, too, of itself: its process may end or hang
    with any of them, and must be watched.

    Args:
        config: what the command line and the variables say.
        argv: the command line, whose flags go to all models.
        environ: the variables.
        watched: whether another program watches this process, and starts it again.

    Returns:
        what makes their fleet; None where there is one model to serve.

    Raises:
        ConfigError: the models cannot be listed, or there cannot be other machines here.
    """
    catalog = _catalog_of(config, argv, environ, watched=watched)
    if catalog is None:
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


def _catalog_of(
    config: Config, argv: Sequence[str], environ: Mapping[str, str], *, watched: bool
) -> Catalog | None:
    is_asked_for = config.models_dir is not None or config.models_preset is not None
    if config.rpc and not watched:
        from trioserve.llama.rpc import library

        library.check()
    if config.model_named is None:
        from trioserve.models.catalog import Catalog, Source

        catalog = Catalog.of(config, argv, environ)
        found = catalog.entries.values()
        if is_asked_for or any(one.source is not Source.BUNDLED for one in found):
            return catalog
    if not config.rpc or watched:
        return None
    from trioserve.models.catalog import OneModel

    return OneModel(config, argv, environ)
