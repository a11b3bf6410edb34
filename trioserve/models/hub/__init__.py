"""Models from the hub: what they are called, how they are downloaded, and where they are kept.

`pull` and `look_up` are for Trio; `cached_models`, `find` and `remove` block. The cache is that of
huggingface_hub and llama.cpp: what one of them has downloaded, the others find.
"""

from trioserve.models.hub.cache import HubModel, cached_models, find, remove
from trioserve.models.hub.download import Progress
from trioserve.models.hub.pull import RemoteModel, look_up, pull
from trioserve.models.hub.reference import HubReference

__all__ = [
    "HubModel",
    "HubReference",
    "Progress",
    "RemoteModel",
    "cached_models",
    "find",
    "look_up",
    "pull",
    "remove",
]
