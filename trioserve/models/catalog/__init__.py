"""The models that there are to choose from: in the hub's cache, in a directory, and in presets.

`files` looks for models in a directory and says what is in their files, `presets` reads how they
are to be run, and `catalog` puts both together and finds the model that a request means.
"""

from trioserve.models.catalog.catalog import (
    Catalog,
    CatalogChanges,
    ModelEntry,
    OneModel,
    find_for,
)
from trioserve.models.catalog.files import GgufSummary, Source, describe, modalities_in
from trioserve.models.catalog.presets import environment_of_children, with_tools_of

__all__ = [
    "Catalog",
    "CatalogChanges",
    "GgufSummary",
    "ModelEntry",
    "OneModel",
    "Source",
    "describe",
    "environment_of_children",
    "find_for",
    "modalities_in",
    "with_tools_of",
]
