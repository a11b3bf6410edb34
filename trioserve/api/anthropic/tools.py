"""The tools of ``/v1/messages``, as functions that the model is offered.

Those with a schema are functions as they are; for those that Anthropic's models know, see
`client_tools`. Tools that Anthropic's servers run are left out. Blocks of a conversation may add
and remove tools; those that remain at its end are offered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from trioserve.api.anthropic.client_tools import Member, functions_of, members_of
from trioserve.api.anthropic.messages import filled
from trioserve.api.base.fields import (
    NAME,
    SCHEMA,
    STRING,
    Only,
    boolean,
    integer_in,
    json_type,
    list_schema,
    mapping,
    named,
    object_schema,
    objects,
    optional,
    or_null,
    refuse_unsupported,
    required,
    text,
)
from trioserve.api.base.web import HostedTools, domains_of, place_of
from trioserve.chat.messages import MAX_TOOLS, NOT_HOSTED, Tool, Tools, check_count
from trioserve.errors import InvalidRequestError
from trioserve.left_out import leave_out
from trioserve.tools.web.scope import Uses, WebScope

#: Fields of a tool that have no effect.
_UNSUPPORTED: Mapping[str, Only] = {
    "allowed_callers": Only(["direct"], harmless="the model itself calls all tools"),
    "defer_loading": Only(False, harmless="the model has all tools from the beginning"),
}

#: The types of tools of the web, and their fields that have no effect.
_WEB = re.compile(r"(web_search|web_fetch)_\d{8}")
_UNSUPPORTED_IN_WEB: Mapping[str, Only] = {
    **_UNSUPPORTED,
    "citations": Only({"enabled": False}, harmless="pages are not cited by their characters"),
    "response_inclusion": Only("full", harmless="the model itself calls all tools"),
    "url_sources": Only({}),
    "use_cache": Only(False, harmless="no page is cached"),
}

#: Characters of a token, roughly.
_CHARS = 4

_positive = integer_in(1, None)

_TOOL = object_schema(
    name={**NAME, "minLength": 1},
    type=or_null(NAME),
    description=or_null(STRING),
    input_schema=SCHEMA,
)


@attrs.frozen
class Offer:
    """The tools that the model may call, by the names of their functions.

    Attributes:
        functions: all of them.
        web: the tools of the web, which the server runs if it has them.
        members: those that are members of a toolset.
        changes: the blocks of the conversation that add or remove a tool.
    """

    functions: dict[str, Tool] = attrs.field(factory=dict)
    web: dict[str, WebScope] = attrs.field(factory=dict)
    members: dict[str, Member] = attrs.field(factory=dict)
    changes: list[Mapping[str, Any]] = attrs.field(factory=list)

    @property
    def tools(self) -> Tools:
        """The functions, in their order."""
        return Tools(self.functions.values())

    @property
    def hosted(self) -> HostedTools:
        """The tools of the web, as any vendor has them."""
        return HostedTools(self.web)

    def named(self, name: str) -> tuple[str, ...]:
        """The functions that a request means by a name: one, or those of a toolset."""
        if name in self.functions:
            return (name,)
        of_toolset = [each.function for each in self.members.values() if each.toolset == name]
        return tuple(of_toolset) or (name,)

    def add(self, tool: Mapping[str, Any], path: str) -> None:
        """Add a tool as a request has it. One with the name of an earlier one replaces it.

        Raises:
            InvalidRequestError: something is missing or has the wrong type; `param` names it.
        """
        if _WEB.fullmatch(str(tool.get("type"))):
            self.web[required(tool, "name", filled, path)] = _scope(tool, path)
            return
        for name, function in _functions(tool, path):
            self.functions[name] = {"type": "function", "function": {"name": name, **function}}
            self.members.pop(name, None)
        if "type" in tool:
            self.members.update((each.function, each) for each in members_of(tool, path))
        check_count(len(self.functions), MAX_TOOLS, "tools", "tools")


@json_type(properties={"tools": list_schema(_TOOL, MAX_TOOLS)}, others=("messages",))
def read_offer(body: Mapping[str, Any]) -> Offer:
    """Read ``tools``, and what the messages add to them and remove. Raises as `Offer.add`."""
    offer = Offer()
    given = () if body.get("tools") is None else named(objects, body["tools"], "tools")
    check_count(len(given), MAX_TOOLS, "tools", "tools")
    for i, tool in enumerate(given):
        offer.add(tool, f"tools[{i}]")
    removed: dict[str, Tool] = {}
    for change, path in _changes(body.get("messages")):
        offer.changes.append(change)
        check_count(len(offer.changes), MAX_TOOLS, "messages", "changes of tools")
        tool, path = required(change, "tool", mapping, path), f"{path}.tool"
        kind = required(tool, "type", text, path)
        if kind == "tool_definition":
            offer.add(required(tool, "definition", mapping, path), f"{path}.definition")
        elif kind != "tool_reference":
            leave_out(f"changes of type {kind}", NOT_HOSTED)
        elif change["type"] == "tool_removal":
            name = required(tool, "name", text, path)
            if name in offer.functions:
                removed[name] = offer.functions.pop(name)
        elif (back := removed.pop(required(tool, "name", text, path), None)) is not None:
            offer.functions.setdefault(back["function"]["name"], back)
    return offer


def _changes(messages: Any) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The blocks of a conversation that add or remove a tool, with their places."""
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, Mapping) else None
        for j, block in enumerate(content if isinstance(content, list) else ()):
            kind = block.get("type") if isinstance(block, Mapping) else None
            path = f"messages[{i}].content[{j}]"
            if kind in ("tool_addition", "tool_removal"):
                yield block, path
            elif kind == "compaction":  # of the part that it stands for
                changes = enumerate(optional(block, "tool_changes", objects, path) or ())
                yield from ((one, f"{path}.tool_changes[{k}]") for k, one in changes)


def _functions(tool: Mapping[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The functions of a tool, by their names."""
    kind = optional(tool, "type", text, path) or "custom"
    strict = optional(tool, "strict", boolean, path)
    more = {} if strict is None else {"strict": strict}
    refuse_unsupported(tool, _UNSUPPORTED, f"{path}.")
    if kind == "custom":
        name, about = required(tool, "name", filled, path), _description(tool, path)
        parameters = required(tool, "input_schema", mapping, path)
        yield name, {"description": about, "parameters": parameters, **more}
    elif (known := functions_of(tool, path)) is None:
        leave_out(f"tools of type {kind}", NOT_HOSTED)
    else:
        for name, description, parameters in known:
            told = {"description": description, "parameters": parameters}
            yield name or required(tool, "name", filled, path), {**told, **more}


def _scope(tool: Mapping[str, Any], path: str) -> WebScope:
    """Read what a tool of the web may do. Raises InvalidRequestError."""
    refuse_unsupported(tool, _UNSUPPORTED_IN_WEB, f"{path}.")
    allowed = domains_of(tool, "allowed_domains", path)
    blocked = domains_of(tool, "blocked_domains", path)
    if allowed and blocked:
        raise InvalidRequestError.at(
            f"{path}.allowed_domains", "and 'blocked_domains' exclude each other."
        )
    n_tokens = optional(tool, "max_content_tokens", _positive, path)
    return WebScope(
        **place_of(tool, path),
        allowed=allowed,
        blocked=blocked,
        uses=Uses(optional(tool, "max_uses", _positive, path)),
        max_chars=None if n_tokens is None else _CHARS * n_tokens,
    )


def _description(tool: Mapping[str, Any], path: str) -> str:
    """Read the description, and write the examples of input below it."""
    description = optional(tool, "description", text, path) or ""
    examples = optional(tool, "input_examples", objects, path) or ()
    lines = [f"Example of input: {json.dumps(one)}" for one in examples]
    return "\n".join([description, *lines]).strip() if lines else description
