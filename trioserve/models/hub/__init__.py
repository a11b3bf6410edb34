"""Models from the hub: what they are called, how they are downloaded, and where they are kept.

`pull`, `pull_url` and `look_up` are for Trio; `cached_models`, `find` and `remove` block. The cache
is that of huggingface_hub and llama.cpp: what one of them has downloaded, the others find.
"""

from trioserve.models.hub.cache import HubModel, cached_models, find, remove
from trioserve.models.hub.download import DownloadProgress
from trioserve.models.hub.pull import RemoteModel, look_up, place_of, pull, pull_url
from trioserve.models.hub.reference import HubReference
from trioserve.models.hub.search import Offer, Repository, offers, search, sketch

__all__ = [
    "DownloadProgress",
    "HubModel",
    "HubReference",
    "Offer",
    "RemoteModel",
    "Repository",
    "cached_models",
    "find",
    "look_up",
    "offers",
    "place_of",
    "pull",
    "pull_url",
    "remove",
    "search",
    "sketch",
]
