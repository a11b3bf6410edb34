"""`RunParams`: the limits of a run; `RunTools`: the tools that the model may call."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias

import attrs

from trioserve.chat.params import name_of
from trioserve.errors import InvalidRequestError
from trioserve.left_out import leave_out
from trioserve.server.keywords import CompletionFields, TemplateFields
from trioserve.server.runs.events import RunCall
from trioserve.tools.functions import tool_of
from trioserve.tools.registry import ToolRegistry, select
from trioserve.tools.tool import Tool, ToolCallContext

#: How to treat calls that may change something: "ask" waits for `AgentRun.approve`, "all" runs
#: them, "none" refuses them. A function returns whether to run the call.
Approval: TypeAlias = Literal["ask", "all", "none"] | Callable[[RunCall], Awaitable[bool]]

_APPROVALS = ("ask", "all", "none")


def _check_steps(_instance: Any, _attribute: attrs.Attribute[Any], value: Any) -> None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (is_number and value >= 1):
        raise InvalidRequestError.at("max_steps", "must be a whole number from 1 on.")


def _check_approve(_instance: Any, _attribute: attrs.Attribute[Any], value: Any) -> None:
    if value not in _APPROVALS and not callable(value):
        raise InvalidRequestError.at(
            "approve", f"must be one of {', '.join(_APPROVALS)}, or an async function."
        )


@attrs.frozen(kw_only=True)
class RunParams:
    """The number of answers in a run, and the limits of its tools.

    Raises:
        InvalidRequestError: a value is out of range; `param` names the field.
    """

    #: The most answers of the model; None: as configured. The calls of the last one run, too, so
    #: that a later run can continue from there.
    max_steps: int | None = attrs.field(default=None, validator=_check_steps)
    approve: Approval = attrs.field(default="ask", validator=_check_approve)
    #: The base folder for relative paths of built-in tools; None: the default of the tools.
    cwd: str | None = None
    #: The place where built-in tools run, as in `Config.tools_runtime`; None: as configured.
    runtime: str | None = None

    @property
    def place(self) -> ToolCallContext:
        """The context for calls of its tools."""
        return ToolCallContext(cwd=self.cwd, runtime=self.runtime)


class RunFields(CompletionFields, TemplateFields, total=False):
    """The fields of each answer of a run, and those of `RunParams`."""

    max_steps: int | None
    approve: Approval
    cwd: str | None
    runtime: str | None


#: A tool, a Python function, or the name of a configured tool.
AnyTool: TypeAlias = Tool | Callable[..., Any] | str

#: The most tool names in an error message.
_MAX_NAMES = 20


@attrs.frozen
class RunTools:
    """The tools that the model may call.

    Args:
        by_name: the tools that the server runs.
        of_client: the caller's tools, in OpenAI's form.
    """

    by_name: Mapping[str, Tool]
    of_client: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(cls, tools: Iterable[Tool], of_client: Sequence[Mapping[str, Any]]) -> Self:
        """Combine tools of the server and the caller.

        Raises:
            InvalidRequestError: two tools have the same name.
        """
        by_name: dict[str, Tool] = {}
        for tool in tools:
            name = tool.info.name
            if name in by_name and by_name[name] is not tool:
                raise InvalidRequestError(
                    f"Two of the tools have the name {name!r:.80}.", param="tools"
                )
            by_name[name] = tool
        for definition in of_client:
            if (name := name_of(definition)) in by_name:
                raise InvalidRequestError.at(
                    "tools", f"has {name!r:.80}, which is the name of a tool that the server runs."
                )
        return cls(by_name, tuple(of_client))

    @property
    def definitions(self) -> list[Mapping[str, Any]]:
        """All tools in OpenAI's form."""
        return [*self.of_client, *(tool.info.definition for tool in self.by_name.values())]

    def is_of_client(self, name: str) -> bool:
        """True if the caller runs this tool."""
        return any(name_of(definition) == name for definition in self.of_client)

    def listed(self) -> str:
        """List the names for the model."""
        names = [name_of(definition) for definition in self.definitions]
        more = ["…"] if len(names) > _MAX_NAMES else []
        return ", ".join([*names[:_MAX_NAMES], *more]) or "none"


#: Tokens of context below which a model is not offered all tools of the server. There, a character
#: of their definitions needs this many tokens of context: the definitions fill a tenth of it.
_SMALL = 8192
_TOKENS_PER_CHARACTER = 4


def that_fit(tools: Iterable[Tool], n_ctx: int) -> list[Tool]:
    """Choose the tools for a model: all of them, or the first that leave it room for a chat."""
    tools = list(tools)
    if n_ctx >= _SMALL:
        return tools
    room = n_ctx // _TOKENS_PER_CHARACTER
    chosen = []
    for tool in tools:
        size = len(json.dumps(tool.info.definition))
        if size <= room:
            room -= size
            chosen.append(tool)
    return chosen or tools[:1]


def tools_of(given: Sequence[AnyTool] | None, box: ToolRegistry, n_ctx: int) -> list[Tool]:
    """Find the tools that a run may use; None: those of the server, as many as fit.

    Raises:
        InvalidRequestError: a tool is missing, the server has none, or the model cannot call it.
    """
    if given is None:
        if not box.tools:
            raise InvalidRequestError(
                "This server has no tools. Start it with --tools all, or with --mcp-servers-config "
                "and a file of MCP servers.",
                param="tools",
            )
        chosen = that_fit(box.tools.values(), n_ctx)
        for name in box.tools.keys() - {tool.info.name for tool in chosen}:
            leave_out(f"the tool {name}", f"the context of {n_ctx} tokens has no room for it")
        return chosen
    tools: dict[str, Tool] = {}
    for one in given:
        if isinstance(one, str):
            tools |= select(box.tools, [one])
    others = [one for one in given if not isinstance(one, str)]
    return [*tools.values(), *(one if isinstance(one, Tool) else tool_of(one) for one in others)]
