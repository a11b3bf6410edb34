"""The models that a configuration names, on this machine."""

from __future__ import annotations

import attrs
import trio

from trioserve.config import Config
from trioserve.errors import ModelLoadError, UnknownModelError
from trioserve.models.fetch import fetch, is_local


def on_disk(config: Config) -> Config:
    """Put the paths of files in the place of names of the hub; nothing is downloaded.

    Raises:
        UnknownModelError: a model is not in the cache.
    """
    if is_local(config):
        return config
    try:
        return trio.run(fetch, attrs.evolve(config, offline=True))
    except ModelLoadError as error:
        named = " or ".join(filter(None, (config.model_named, config.spec_draft_hf)))
        raise UnknownModelError(
            f"The model {named} is not on this machine yet; trioserve pull downloads it."
        ) from error
