"""The tools of the web that clients ask of a vendor's servers: this server runs its own for them.

A vendor reads its tools into `HostedTools`. Where the configuration has such tools, the answer is a
run with them, whose calls the vendor writes in its own form. Otherwise they are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from trioserve.api.base import limits
from trioserve.api.base.chat_request import ChatRequest
from trioserve.api.base.fields import mapping, optional, strings, text
from trioserve.chat.params import ChatParams, ToolChoice
from trioserve.errors import InvalidRequestError, UnsupportedFieldError
from trioserve.left_out import leave_out
from trioserve.server.model_server import ModelServer
from trioserve.server.runs.events import ToolReturned
from trioserve.tools.tool import Tool
from trioserve.tools.web.scope import Domain, WebScope, read_domains
from trioserve.tools.web.tools import WebTool

#: Why such a tool is left out.
NO_WEB = "this server does not use the web: start it with --web-search or --web-fetch"

#: Characters of a text that a citation repeats.
_MAX_CITED = 150

#: A type with a `tool_choice`.
_Choosing = TypeVar("_Choosing", ChatRequest, ChatParams)


@attrs.frozen
class HostedTools:
    """The tools of the web in a request, by the names that a model calls them by."""

    scopes: Mapping[str, WebScope] = attrs.field(factory=dict)
    given: Sequence[Mapping[str, Any]] = ()  # as the request has them

    def offered(self, server: ModelServer) -> list[Tool]:
        """The tools that a server has for them. If it has none, that is logged."""
        found = {
            name: tool.within(scope)
            for name, scope in self.scopes.items()
            if isinstance(tool := server.tools.tools.get(name), WebTool)
        }
        if self.scopes and not found:
            leave_out(f"the tools {', '.join(self.scopes)}", NO_WEB)
        return list(found.values())

    def left_out_of(self, request: _Choosing) -> _Choosing:
        """Take these tools from the choice of a request whose server has none of them.

        Raises:
            UnsupportedFieldError: the choice names no other tool.
        """
        choice = request.tool_choice
        if not self.scopes or not isinstance(choice, ToolChoice) or choice.names is None:
            return request
        left = tuple(name for name in choice.names if name not in self.scopes)
        if not left:
            raise UnsupportedFieldError.at(
                "tool_choice", f"names {choice.names[0]!r:.80}, and {NO_WEB}."
            )
        return attrs.evolve(request, tool_choice=attrs.evolve(choice, names=left))


#: Those of most requests.
NO_TOOLS = HostedTools()


# -- their fields


def domains_of(tool: Mapping[str, Any], name: str, path: str) -> tuple[Domain, ...]:
    """Read a list of domains. Raises InvalidRequestError."""
    return read_domains(optional(tool, name, strings, path) or (), f"{path}.{name}")


def place_of(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Read ``user_location``, as fields of a `WebScope`. Raises InvalidRequestError."""
    where = optional(tool, "user_location", mapping, path) or {}
    path = f"{path}.user_location"
    parts = {
        name: optional(where, name, text, path) or ""
        for name in ("city", "region", "country", "timezone")
    }
    for name, part in parts.items():
        if len(part) > limits.MAX_NAME or not part.isprintable():
            raise InvalidRequestError.at(
                f"{path}.{name}", "is too long, or has control characters."
            )
    country = parts["country"]
    words = [parts["city"], parts["region"], country]
    zone = f" (time zone {parts['timezone']})" if parts["timezone"] else ""
    place = ", ".join(filter(None, words)) + zone
    return {
        "place": place.strip(),
        "country": country if re.fullmatch("[A-Za-z]{2}", country) else "",
    }


# -- what they have found


@attrs.frozen
class Source:
    """A page that a search has found."""

    url: str
    title: str
    excerpt: str


class Sources:
    """The pages that the searches of an answer have found."""

    def __init__(self) -> None:
        self._by_url: dict[str, Source] = {}

    def add(self, event: ToolReturned) -> list[Source]:
        """Add what a call has found."""
        found = [
            Source(each["url"], each["title"], each["content"][:_MAX_CITED])
            for each in event.answer.get("results", ())
        ]
        self._by_url |= {each.url: each for each in found}
        return found

    def cited(self, written: str) -> Iterator[tuple[int, int, Source]]:
        """Find where a text names one of them: as a Markdown link, or by its address.

        Gives the first character, the one after the last, and the source.
        """
        if not self._by_url:
            return
        for match in _ADDRESSES.finditer(written):
            url = match["linked"] or match["bare"].rstrip(".,;:!?'\"*_")
            if (source := self._by_url.get(url)) is not None:
                end = match.end() if match["linked"] else match.start() + len(url)
                yield match.start(), end, source


_ADDRESSES = re.compile(
    r"\[[^\[\]\n]{0,300}\]\((?P<linked>https?://[^\s()]{1,2000}(?:\([^\s()]{0,200}\)[^\s()]{0,200})?)\)"
    r"|(?P<bare>https?://[^\s<>()\[\]|]{1,2000})"
)
