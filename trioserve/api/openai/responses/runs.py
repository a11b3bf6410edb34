"""Responses for which the server runs tools.

Their calls are items as OpenAI's own servers have them for tools of MCP servers. What happens in
a run is told in events of our own, too, with the fields that they have in the chunks of a chat.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from trioserve.api.base import writers
from trioserve.api.base.chat_request import ChatRequest
from trioserve.api.openai.responses.events import ResponseBuilder, ResponseEvents
from trioserve.api.openai.responses.items import Event, Item, MadeCallItem
from trioserve.api.openai.responses.request import ResponsesRequest
from trioserve.api.openai.responses.tokens import TokensOfText
from trioserve.api.openai.run_events import counted, event_fields
from trioserve.chat.deltas import Delta, ToolCallStart
from trioserve.engine.backend import Vocab
from trioserve.server.runs.events import (
    EndReason,
    RunEnded,
    RunEvent,
    StepChunk,
    StepStarted,
    ToolCalled,
    ToolReturned,
)
from trioserve.server.stream import ChatChunk
from trioserve.types import GenerationParams

#: The label of tools that are those of no MCP server.
_OWN = "trioserve"

#: Why a response is incomplete, by why its run has ended.
_CUT: Mapping[EndReason, str] = {"length": "max_output_tokens", "max_steps": "max_steps"}


class RunBuilder(ResponseBuilder):
    """Turns the events of a run into those of a response, and keeps the response as it is.

    Args:
        model: the name that the response gives.
        request: what was asked for.
        chat: the same, as a chat.
        params: how it is answered.
        vocab: what the tokens stand for.
        labels: the MCP servers that have the tools, by the names of these; empty: none has.
    """

    def __init__(
        self,
        model: str,
        request: ResponsesRequest,
        chat: ChatRequest,
        params: GenerationParams,
        vocab: Vocab,
        labels: Mapping[str, str],
    ) -> None:
        super().__init__(model, request, chat, params, 0, vocab)
        self._vocab = vocab
        self._of_client = frozenset(chat.tool_names)
        self._labels = labels
        self._calls: dict[str, MadeCallItem] = {}  # without a result, by their ids
        self._step = _new_step()

    def take(self, event: RunEvent) -> list[Event]:
        """Take the next event."""
        if isinstance(event, StepChunk):
            return self.add(event.chunk) if isinstance(event.chunk, ChatChunk) else []
        fields = event_fields(event)
        told = {**fields, "type": f"response.trioserve_{fields['type']}"}
        return [told, *self._follow(event)]

    def _follow(self, event: RunEvent) -> list[Event]:
        """What the events of the API say of something that happens."""
        match event:
            case StepStarted(step=step) if step > 1:
                events = self._close("completed")
                self._tokens = TokensOfText(self._vocab.pieces)
                self._step = _new_step()
                return events
            case ToolCalled():
                return self._close("completed")
            case ToolReturned():
                item = self._calls.pop(event.call.id)
                item.take(event.content, is_error=event.is_error)
                return self._close_item(item, "failed" if event.is_error else "completed")
            case RunEnded(answer=answer):
                return self._end(_CUT.get(answer.reason), counted(answer), len(answer.prompt))
        return []

    def _item_for(self, delta: Delta, index: int) -> Item:
        if not isinstance(delta, ToolCallStart) or delta.name in self._of_client:
            return super()._item_for(delta, index)
        item = MadeCallItem(index, delta, self._labels.get(delta.name) or _OWN)
        self._calls[delta.id] = item
        return item

    def _close(self, status: str) -> list[Event]:
        """Close the last item. Calls stay open until they have a result, unless none will come."""
        events: list[Event] = []
        if self._items and isinstance(last := self._items[-1], MadeCallItem):
            events += [] if last.is_called else last.called()
        else:
            events += super()._close(status)
        if status == "incomplete":
            for item in self._calls.values():
                events += self._close_item(item, status)
            self._calls = {}
        return events


def _new_step() -> str:
    """Name a step. The name comes back with the items, and tells them from those of others."""
    return f"step_{secrets.token_hex(8)}"


class RunResponseEvents:
    """Writes the stream of a response for which the server runs tools."""

    def __init__(self, builder: RunBuilder, chat: ChatRequest) -> None:
        self._builder = builder
        self._events = ResponseEvents(builder, chat, 0)
        self.fail = self._events.fail

    def encode(self, index: int, event: RunEvent) -> bytes:
        """Write an event."""
        if isinstance(event, StepChunk):
            return self._events.encode(index, event.chunk)
        if isinstance(event, StepStarted):
            self._events.begin_prompt(0)
        events = [*self._builder.begin(), *self._builder.take(event)]
        if isinstance(event, RunEnded):
            events[-1] = {**events[-1], "timings": writers.timings(event.answer.timings)}
        return self._events.write(events)

    def end(self) -> bytes:
        """Nothing follows the last event."""
        return b""
