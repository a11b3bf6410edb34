"""The tools of ``/v1/responses``, as functions that the model is offered.

A function of a namespace is offered by its name alone, unless another tool has that. A custom tool
takes one text, as a function with one argument. Of the tools that OpenAI's servers run, there are
those of the web, if the configuration has them; the others are left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from trioserve.api.base.custom_tools import CustomTools
from trioserve.api.base.fields import mapping, objects, one_of, optional, required, text
from trioserve.api.base.web import HostedTools, domains_of, place_of
from trioserve.api.openai.responses.client_tools import CLIENT_TOOLS
from trioserve.chat.messages import MAX_TOOLS, NOT_HOSTED, check_count
from trioserve.errors import UnsupportedFieldError
from trioserve.left_out import leave_out
from trioserve.tools.web.scope import N_RESULTS, Uses, WebScope
from trioserve.tools.web.tools import FETCH, SEARCH

#: Fields that each function in an answer has, also if the request leaves them out.
_OF_FUNCTION: dict[str, Any] = {"description": None, "parameters": None, "strict": False}


@attrs.frozen
class OfferedTool:
    """A tool that the model may call."""

    kind: str  # its type in the request
    name: str  # in the request; of a tool known by its type, that of its function
    place: str  # in the request
    function: dict[str, Any]  # for the model, without the name
    namespace: str | None = None


class Offer:
    """The tools of a request, by the names that the model calls them by.

    Args:
        tools: each with its place in the request. One with the name of an earlier one replaces it.

    Raises:
        InvalidRequestError: something is missing or of the wrong type; `param` names it.
    """

    def __init__(self, tools: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        self._left_out: set[str] = set()
        self._web: tuple[str, Mapping[str, Any]] | None = None
        self._custom = CustomTools()
        self.given: list[Mapping[str, Any]] = []  # without those that are left out
        by_key: dict[tuple[str | None, str], OfferedTool] = {}
        for place, tool in tools:
            read = list(self._read(tool, place))
            if read:
                is_function = tool["type"] == "function"
                self.given.append({**_OF_FUNCTION, **tool} if is_function else tool)
            by_key |= {(each.namespace, each.name): each for each in read}
            check_count(len(by_key), MAX_TOOLS, "tools", "tools")
        names = Counter(name for _, name in by_key)
        self._names = {
            (namespace, name): f"{namespace}__{name}"
            if namespace is not None and names[name] > 1
            else name
            for namespace, name in by_key
        }
        self.tools = {self._names[key]: tool for key, tool in by_key.items()}

    # -- what the chat gets

    def web(self, max_calls: int | None) -> HostedTools:
        """The tools of the web, if it offers them. `max_calls` limits the calls of all of them.

        Raises:
            InvalidRequestError: one of their fields has the wrong type; `param` names it.
        """
        if self._web is None:
            return HostedTools()
        place, tool = self._web
        filters = optional(tool, "filters", mapping, place) or {}
        scope = WebScope(
            **place_of(tool, place),
            allowed=domains_of(filters, "allowed_domains", f"{place}.filters"),
            blocked=domains_of(filters, "blocked_domains", f"{place}.filters"),
            n_results=_N_RESULTS[optional(tool, "search_context_size", _SIZE, place) or "medium"],
            uses=Uses(max_calls),
        )
        names = [SEARCH, *([] if FETCH in self.tools else [FETCH])]
        return HostedTools(dict.fromkeys(names, scope), [tool])

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The tools as functions of a chat."""
        return [
            {"type": "function", "function": {"name": name, **tool.function}}
            for name, tool in self.tools.items()
        ]

    @property
    def places(self) -> list[str]:
        """The place of each in the request."""
        return [tool.place for tool in self.tools.values()]

    def name_of(self, namespace: str | None, name: str) -> str:
        """The name that the model writes to call a tool, now or earlier in the chat."""
        return self._names.get((namespace, name), name)

    def chosen(self, choice: Mapping[str, Any], path: str) -> dict[str, Any] | None:
        """Convert what a choice names to the form of a chat; None: it is left out.

        Raises:
            UnsupportedFieldError: no tool has such a type.
        """
        kind = required(choice, "type", text, path)
        if kind in ("function", "custom"):
            name = required(choice, "name", text, path)
            namespace = choice.get("namespace")
            if namespace is None and (None, name) not in self._names:
                found = [space for space, other in self._names if other == name]
                namespace = found[0] if len(found) == 1 else None
            return {"type": "function", "function": {"name": self.name_of(namespace, name)}}
        if self._web is not None and _WEB.fullmatch(kind):
            return {"type": "function", "function": {"name": SEARCH}}
        name = "computer" if kind.startswith("computer_use") else kind
        if (None, name) in self._names:
            return {"type": "function", "function": {"name": name}}
        if kind in self._left_out:
            return None
        raise UnsupportedFieldError.at(
            f"{path}.type", f"is {kind!r:.80}, and 'tools' has none of this type."
        )

    # -- reading

    def _read(
        self, tool: Mapping[str, Any], place: str, namespace: str | None = None
    ) -> Iterator[OfferedTool]:
        kind = required(tool, "type", text, place)
        if kind == "namespace" and namespace is None:
            space = required(tool, "name", text, place)
            for i, inner in enumerate(required(tool, "tools", objects, place)):
                yield from self._read(inner, f"{place}.tools[{i}]", space)
            return
        if _WEB.fullmatch(kind) and tool.get("external_web_access") is not False:
            self._web = (place, tool)
            return
        if kind == "function":
            name, function = required(tool, "name", text, place), _function(tool)
        elif kind == "custom":
            name = required(tool, "name", text, place)
            function = self._custom.function(tool, place)
        elif kind in CLIENT_TOOLS and not _is_hosted(tool):
            name, function = CLIENT_TOOLS[kind].name or kind, _of_client(tool, kind, place)
        else:
            self._left_out.add(kind)
            leave_out(f"tools of type {kind}", NOT_HOSTED)
            return
        yield OfferedTool(kind, name, place, function, namespace)


#: The types of the tool that searches the web.
_WEB = re.compile(r"web_search(_preview)?(_\d{4}_\d{2}_\d{2})?")

#: The number of results of a search, by ``search_context_size``.
_N_RESULTS = {"low": 3, "medium": N_RESULTS, "high": 10}
_SIZE = one_of(*_N_RESULTS)


def _is_hosted(tool: Mapping[str, Any]) -> bool:
    """True if a tool that clients can run is to run on the server."""
    environment = tool.get("environment")
    if isinstance(environment, Mapping) and environment.get("type") != "local":
        return True
    return tool["type"] == "tool_search" and tool.get("execution") != "client"


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Make what the model sees. It need not see that a function is not `strict`."""
    told = {name: tool[name] for name in ("description", "parameters") if name in tool}
    return told | ({"strict": True} if tool.get("strict") is True else {})


def _of_client(tool: Mapping[str, Any], kind: str, place: str) -> dict[str, Any]:
    known = CLIENT_TOOLS[kind]
    description = optional(tool, "description", text, place)
    parameters = optional(tool, "parameters", mapping, place)
    return {
        "description": known.description if description is None else description,
        "parameters": known.parameters if parameters is None else parameters,
    }
