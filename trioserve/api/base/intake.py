"""`Intake`: what an app knows of its connections and requests, whoever answers them."""

from __future__ import annotations

from collections import Counter

from quart import Quart, current_app
from trio_util import AsyncValue

from trioserve.api.sessions import Sessions
from trioserve.config import Config
from trioserve.server.limits.memory import MemoryBudget

#: Where an app has its intake: `app.extensions[NAME]`.
NAME = "trioserve"


class Intake:
    """The part of a service that connections, keys and limits need.

    Args:
        config: what to serve. May be set until the service runs.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.n_connections = 0  # that are served
        self.n_refused = 0  # connections that are being told that there are too many
        self.n_answers: Counter[tuple[str, int]] = Counter()  # by route and status
        self.n_answering = AsyncValue(0)  # requests whose responses are not sent yet
        self.streams = Sessions()  # that outlive the connections of their readers
        self._own_memory = MemoryBudget.of(config)

    @property
    def memory(self) -> MemoryBudget:
        """What requests may hold."""
        return self._own_memory


def attach(app: Quart, intake: Intake) -> None:
    """Make `intake` the one of an app."""
    app.extensions[NAME] = intake


def intake_of(app: Quart) -> Intake:
    """The intake of an app."""
    intake = app.extensions[NAME]
    assert isinstance(intake, Intake)
    return intake


def current_intake() -> Intake:
    """The intake of the app that handles the current request."""
    return intake_of(current_app)
