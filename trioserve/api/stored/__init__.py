"""What outlives a connection: stored responses, conversations, files and batches, and usage.

The server that clients talk to stores them, with one model as with many.
"""

from __future__ import annotations

from trioserve.api.stored import batches, conversations, files, responses, usage
from trioserve.api.stored.responses import stored
from trioserve.api.stored.runs import settle

__all__ = ["ROUTES", "settle", "stored"]

ROUTES = (
    *batches.routes,
    *conversations.routes,
    *files.routes,
    *responses.routes,
    *usage.routes,
)
