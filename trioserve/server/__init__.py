"""`Server`: a loaded model that answers requests on a Trio event loop.

`server` has the class, `models` has `Models`, several servers in one program, and `context` what
holds for each call. A request goes through `prompts` (and `media`), then `limits`, then
`generation`; `dispatch` and `stream` bring its events from the engine's thread, and `observers` are
told of it. `lifecycle` loads the model, watches over it, puts it to sleep and wakes it.
"""

from __future__ import annotations

from trioserve.server.context import RequestContext
from trioserve.server.lifecycle.sleep import ServerState
from trioserve.server.models import Models
from trioserve.server.server import Server

__all__ = ["Models", "RequestContext", "Server", "ServerState"]
