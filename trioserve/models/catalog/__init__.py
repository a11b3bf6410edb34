"""The models that there are to choose from: in the hub's cache, in a directory, and in presets.

`files` looks for models in a directory, `presets` reads how they are to be run, and `catalog` puts
both together. `names` finds the model that a request means, and `summary` says what is in a file.
"""

from trioserve.models.catalog.catalog import BUNDLED_NAME, Catalog, OneModel
from trioserve.models.catalog.entry import CatalogChanges, ModelEntry, Source
from trioserve.models.catalog.options import environment_of_children
from trioserve.models.catalog.summary import GgufSummary, describe, modalities_in

__all__ = [
    "BUNDLED_NAME",
    "Catalog",
    "CatalogChanges",
    "GgufSummary",
    "ModelEntry",
    "OneModel",
    "Source",
    "describe",
    "environment_of_children",
    "modalities_in",
]
