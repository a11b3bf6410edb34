"""`Server`, made of parts: a loaded model that answers requests on a Trio event loop.

`server` has the class, `life` how it begins, sleeps, wakes and ends, and `parts` what it is made of
while its model is loaded. `several` has `Models`, several servers in one program. `requests` opens
and closes a request, `completions`, `chats` and `embedder` say what requests do; `dispatch` and
`stream` bring their events from the engine's thread.
"""

from __future__ import annotations

from trioserve.server.context import RequestContext
from trioserve.server.keeper import ServerState
from trioserve.server.server import Server
from trioserve.server.several import Models

__all__ = ["Models", "RequestContext", "Server", "ServerState"]
