"""Records that outlive a connection: stored responses, conversations, files and batches, and usage.

The server that clients talk to stores them, with one model as with many.
"""

from __future__ import annotations

from trioserve.api.stored import (
    batches,
    chats,
    conversations,
    files,
    responses,
    usage,
)
from trioserve.api.stored.chats import stored as stored_chats
from trioserve.api.stored.files import read_uploads
from trioserve.api.stored.responses import stored
from trioserve.api.stored.runs import settle

__all__ = ["ROUTES", "read_uploads", "settle", "stored", "stored_chats"]

ROUTES = (
    *batches.routes,
    *chats.routes,
    *conversations.routes,
    *files.routes,
    *responses.routes,
    *usage.routes,
)
