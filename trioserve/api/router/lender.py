"""`Lender`: an app whose models are in other processes, and answer over frames."""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.api.base.routes import Responder, Route
from trioserve.api.service import AppState
from trioserve.config import Config
from trioserve.model_process.connection import Connection
from trioserve.model_process.server import ChildServer
from trioserve.models.catalog import with_tools_of
from trioserve.server.observers.observer import Observer
from trioserve.tools.registry import ToolRegistry


class Lender(AppState):
    """Answers with models in other processes, and with one set of tools for all of them."""

    def __init__(self, config: Config, observers: Sequence[Observer]) -> None:
        super().__init__(config)
        self._observers = observers
        self._tools: ToolRegistry | None = None
        self._made: dict[Connection, ChildServer] = {}

    def answer_of(self, route: Route) -> Responder:
        return route.answered_by(self)

    def server_of(self, line: Connection, config: Config) -> ChildServer:
        """The server at the end of a line, with the tools of this process."""
        if (known := self._made.get(line)) is not None:
            return known
        assert self._tools is not None
        self._made = {each: made for each, made in self._made.items() if not each.has_ended}
        made = self._made[line] = ChildServer(
            line,
            with_tools_of(config, self.config),
            tools=self._tools,
            memory=self.memory,
            observers=self._observers,
        )
        return made

    @property
    def tools(self) -> ToolRegistry:
        """The tools, which run in this process for all models. Raises as `_there`."""
        tools = self._there(self._tools)
        self.gate.check()
        return tools

    @property
    def observers(self) -> Sequence[Observer]:
        return self._observers

    def _forget(self) -> None:
        self._tools = None
