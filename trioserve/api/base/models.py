"""`Models`: what answers requests. A handler gets the model that a request names from it."""

from __future__ import annotations

from typing import Protocol

from trioserve.api.base.caller import Caller
from trioserve.api.base.running import Responses
from trioserve.config import Config
from trioserve.server import Server


class Models(Protocol):
    """The models of an app.

    Attributes:
        config: of the app.
        responses: that are being sent.
    """

    config: Config
    responses: Responses

    def use(self, name: str | None, caller: Caller) -> Server:
        """Find the server of a model that a request is to use. It may sleep.

        Args:
            name: what the request says; None: nothing.
            caller: who asks.

        Raises:
            PermissionDeniedError: the API key may not use the model.
            ModelLoadingError: it is not there yet.
            ServerClosingError: the app is stopping.
            TrioServeError: why there is no model.
        """
