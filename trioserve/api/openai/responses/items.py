"""The items of a response: reasoning, messages and calls, each written while it grows.

An item tells of itself in events: that it begins, each piece that it gets, and that it is done.
Events are dicts with a ``type``, as OpenAI's SDK knows them.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping
from typing import Any, ClassVar

from trioserve.api.base.custom_tools import TextArgument
from trioserve.api.base.cut_json import read_arguments
from trioserve.api.base.web import Sources
from trioserve.api.openai.responses.client_tools import CLIENT_TOOLS
from trioserve.api.openai.responses.input import MCP_CALL, STEP, WEB_CALL
from trioserve.api.openai.responses.request import RESULTS, SOURCES
from trioserve.api.openai.responses.tools import OfferedTool
from trioserve.chat.compaction import Compaction
from trioserve.chat.deltas import ToolCallStart
from trioserve.server.runs.events import ToolReturned
from trioserve.tools.web.tools import FETCH

# -- items


Event = dict[str, Any]


def new_id(prefix: str) -> str:
    """Make the id of a response or an item of one."""
    return f"{prefix}_{secrets.token_hex(16)}"


class Item(ABC):
    """An item of the output. `index` is its place there, and `step` names the step it is from."""

    type: str
    event: ClassVar[str] = ""  # what its events are called; empty: pieces have none
    place: ClassVar[Mapping[str, int]] = {}  # where the pieces belong

    step: str | None = None  # there is only one

    def __init__(self, index: int, id: str) -> None:
        self.index, self.id = index, id
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    @abstractmethod
    def fields(self, status: str) -> dict[str, Any]:
        """The fields of its type: "in_progress", "completed" or "incomplete"."""

    def opened(self) -> list[Event]:
        """Return the event that opens the item."""
        return [self._item_event("added", "in_progress")]

    def grown(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        """Add a piece, and tell of it. Its tokens have a place in messages alone."""
        self._texts.append(text)
        if not self.event:
            return []
        return [self._event(f"{self.event}.delta", **self.place, delta=text)]

    def closed(self, status: str) -> list[Event]:
        """Tell that it ends, and how."""
        return [self._item_event("done", status)]

    def as_json(self, status: str) -> dict[str, Any]:
        """Write the item with the name of its step, where there are several."""
        step = {} if self.step is None else {STEP: self.step}
        fields = self.fields(status)
        return {"id": self.id, "type": self.type, **fields, "status": status, **step}

    def _item_event(self, kind: str, status: str) -> Event:
        return {
            "type": f"response.output_item.{kind}",
            "output_index": self.index,
            "item": self.as_json(status),
        }

    def _event(self, kind: str, **fields: Any) -> Event:
        place = {"item_id": self.id, "output_index": self.index}
        return {"type": f"response.{kind}", **place, **fields}


class _TextItem(Item):
    """An item with one part of text in its content."""

    place: ClassVar[Mapping[str, int]] = {"content_index": 0}

    @abstractmethod
    def _part(self) -> dict[str, Any]: ...

    def _content(self, status: str) -> list[dict[str, Any]]:
        return [] if status == "in_progress" else [self._part()]

    def opened(self) -> list[Event]:
        return [
            self._item_event("added", "in_progress"),
            self._event("content_part.added", content_index=0, part=self._part()),
        ]

    def closed(self, status: str) -> list[Event]:
        part = self._part()
        text = {name: value for name, value in part.items() if name in ("text", "logprobs")}
        return [
            self._event(f"{self.event}.done", content_index=0, **text),
            self._event("content_part.done", content_index=0, part=part),
            self._item_event("done", status),
        ]


class ReasoningItem(_TextItem):
    """The reasoning of a response."""

    type, event = "reasoning", "reasoning_text"

    def __init__(self, index: int) -> None:
        super().__init__(index, new_id("rs"))

    def fields(self, status: str) -> dict[str, Any]:
        return {"summary": [], "content": self._content(status), "encrypted_content": ""}

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}


class MessageItem(_TextItem):
    """The answer of a response."""

    type, event = "message", "output_text"

    def __init__(self, index: int, sources: Sources) -> None:
        super().__init__(index, new_id("msg"))
        self._logprobs: list[dict[str, Any]] = []
        self._sources = sources

    def grown(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        self._logprobs += logprobs
        return [{**event, "logprobs": logprobs} for event in super().grown(text, logprobs)]

    def fields(self, status: str) -> dict[str, Any]:
        return {"role": "assistant", "content": self._content(status)}

    def _part(self) -> dict[str, Any]:
        known = {"annotations": self._annotations(), "logprobs": self._logprobs}
        return {"type": "output_text", **known, "text": self.text}

    def _annotations(self) -> list[dict[str, Any]]:
        return [
            {
                "type": "url_citation",
                "start_index": start,
                "end_index": end,
                "url": source.url,
                "title": source.title,
            }
            for start, end, source in self._sources.cited(self.text)
        ]

    def closed(self, status: str) -> list[Event]:
        told = [
            self._event(
                "output_text.annotation.added", content_index=0, annotation_index=i, annotation=each
            )
            for i, each in enumerate(self._annotations())
        ]
        return told + super().closed(status)


class CompactionItem(Item):
    """A compaction of the conversation before it; empty if the model wrote no summary."""

    type = "compaction"

    def __init__(self, index: int) -> None:
        super().__init__(index, new_id("cmp"))

    def opened(self) -> list[Event]:
        return [*super().opened(), self._event("compaction.compacting")]

    def take(self, compaction: Compaction | None) -> None:
        """Set what it holds."""
        self._texts = [] if compaction is None else [compaction.written()]

    def fields(self, status: str) -> dict[str, Any]:
        return {"encrypted_content": self.text}


class CallItem(Item):
    """A function that the model wants called; `tool` is it, as the request offers it."""

    type, event = "function_call", "function_call_arguments"
    argument: ClassVar[str] = "arguments"  # the field with what it is called with

    def __init__(
        self, index: int, start: ToolCallStart, tool: OfferedTool | None, prefix: str = "fc"
    ) -> None:
        super().__init__(index, f"{prefix}_{start.id}")
        self._start = start
        self._name = start.name if tool is None else tool.name
        space = None if tool is None else tool.namespace
        self._namespace = {} if space is None else {"namespace": space}

    def closed(self, status: str) -> list[Event]:
        done = self._event("function_call_arguments.done", name=self._name, arguments=self.text)
        return [done, *super().closed(status)]

    def fields(self, status: str) -> dict[str, Any]:
        called = {"call_id": self._start.id, "name": self._name}
        return {**called, **self._namespace, self.argument: self.text}


class CustomCallItem(CallItem):
    """A custom tool that the model wants called, with a text."""

    type, event, argument = "custom_tool_call", "custom_tool_call_input", "input"

    def __init__(self, index: int, start: ToolCallStart, tool: OfferedTool) -> None:
        super().__init__(index, start, tool, "ctc")
        self._argument = TextArgument()

    def grown(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        more = self._argument.feed(text)
        return super().grown(more, logprobs) if more else []

    def closed(self, status: str) -> list[Event]:
        rest = self._argument.rest()
        events = super().grown(rest, []) if rest else []
        done = self._event("custom_tool_call_input.done", input=self.text)
        return [*events, done, self._item_event("done", status)]


class ClientCallItem(CallItem):
    """A call of one of `CLIENT_TOOLS`. Its events are sent when it is complete."""

    event = ""

    def __init__(self, index: int, start: ToolCallStart, tool: OfferedTool) -> None:
        self._known = CLIENT_TOOLS[tool.kind]
        self.type = self._known.item
        super().__init__(index, start, tool, self._known.prefix)

    def opened(self) -> list[Event]:
        return []

    def closed(self, status: str) -> list[Event]:
        return [self._item_event("added", "in_progress"), self._item_event("done", status)]

    def fields(self, status: str) -> dict[str, Any]:
        arguments = read_arguments(self.text)
        known = self._known.write(arguments if isinstance(arguments, dict) else {})
        return {"call_id": self._start.id, **known}


def call_item(index: int, start: ToolCallStart, tool: OfferedTool | None) -> CallItem:
    """Make the item of a call of a tool; None: the request offers none of the name."""
    if tool is None or tool.kind == "function":
        return CallItem(index, start, tool)
    return (CustomCallItem if tool.kind == "custom" else ClientCallItem)(index, start, tool)


class MadeCallItem(Item):
    """A tool that the server runs, in OpenAI's form for those of MCP servers.

    It is open until it has a result: the model may write other calls before.
    """

    type, event = "mcp_call", "mcp_call_arguments"
    ends: ClassVar[Container[str]] = ("completed", "failed")  # the statuses that have events

    def __init__(self, index: int, start: ToolCallStart, server_label: str) -> None:
        super().__init__(index, f"{MCP_CALL}{start.id}")
        self._start, self._label = start, server_label
        self._output: str | None = None
        self._error: dict[str, Any] | None = None
        self.is_called = False  # its arguments are complete

    def opened(self) -> list[Event]:
        return [*super().opened(), self._event(f"{self.type}.in_progress")]

    def called(self) -> list[Event]:
        """Tell that the arguments are complete."""
        self.is_called = True
        return [self._event("mcp_call_arguments.done", arguments=self.text)]

    def take(self, returned: ToolReturned) -> None:
        """Store the result of the call."""
        if returned.is_error:
            self._error = {"type": "mcp_tool_execution_error", "content": returned.content}
        else:
            self._output = returned.content

    def closed(self, status: str) -> list[Event]:
        """Tell that it was "completed", has "failed", or is "incomplete" and was not made."""
        made = [] if status not in self.ends else [self._event(f"{self.type}.{status}")]
        return [*made, *super().closed(status)]

    def fields(self, status: str) -> dict[str, Any]:
        called = {"server_label": self._label, "name": self._start.name, "arguments": self.text}
        result = {"output": self._output, "error": self._error}
        return {**called, "approval_request_id": None, **result}


class WebCallItem(MadeCallItem):
    """A call of a tool of the web. Its `output` is what the model reads, for when it comes back.

    `include` says what more its client wants to see.
    """

    type, event, ends = "web_search_call", "", ("completed",)

    def __init__(self, index: int, start: ToolCallStart, include: Container[str]) -> None:
        super().__init__(index, start, "")
        self.id = f"{WEB_CALL}{start.id}"
        self._include = include
        self._found: list[dict[str, Any]] = []

    def called(self) -> list[Event]:
        self.is_called = True
        return [self._event(f"{self.type}.searching")]

    def take(self, returned: ToolReturned) -> None:
        self._output = returned.content
        self._found = list(returned.answer.get("results", ()))

    def fields(self, status: str) -> dict[str, Any]:
        read = read_arguments(self.text) if self.is_called else {}
        written = {name: value for name, value in read.items() if isinstance(value, str)}
        fields: dict[str, Any] = {"action": self._action(written)}
        if RESULTS in self._include:
            fields["results"] = [
                {"type": "text_result", "url": each["url"], "title": each["title"],
                 "snippet": each["content"]}
                for each in self._found
            ]  # fmt: skip
        return fields | ({} if self._output is None else {"output": self._output})

    def _action(self, arguments: Mapping[str, str]) -> dict[str, Any]:
        if self._start.name == FETCH:
            url, words = arguments.get("url", ""), arguments.get("find")
            if words:
                return {"type": "find_in_page", "url": url, "pattern": words}
            return {"type": "open_page", "url": url}
        query = arguments.get("query", "")
        action: dict[str, Any] = {"type": "search", "query": query, "queries": [query]}
        if SOURCES in self._include:
            action["sources"] = [{"type": "url", "url": each["url"]} for each in self._found]
        return action
