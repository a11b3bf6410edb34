"""`Server`, made of parts: a loaded model that answers requests on a Trio event loop.

`server` has the class and its life, `parts` what it is made of. `requests` opens and closes a
request, `completions`, `chats` and `embedder` say what requests do; `dispatch` and `stream` bring
their events from the engine's thread.
"""

from __future__ import annotations

from trioserve.server.context import RequestContext
from trioserve.server.server import Server

__all__ = ["RequestContext", "Server"]
