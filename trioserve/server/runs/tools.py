"""`RunTools`: the tools of a run, by name: those that the server runs, and those of the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeAlias

import attrs

from trioserve.chat.tool_choice import name_of
from trioserve.errors import InvalidRequestError
from trioserve.tools.functions import tool_of
from trioserve.tools.registry import ToolRegistry
from trioserve.tools.tool import Tool

#: A tool, a Python function, or the name of a tool that the configuration has.
AnyTool: TypeAlias = Tool | Callable[..., Any] | str

#: Names of tools that an error lists.
_MAX_NAMES = 20


@attrs.frozen
class RunTools:
    """What the model may call.

    Args:
        by_name: what the server runs.
        of_client: in OpenAI's form, what the caller does.
    """

    by_name: Mapping[str, Tool]
    of_client: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(cls, tools: Iterable[Tool], of_client: Sequence[Mapping[str, Any]]) -> Self:
        """Put tools together.

        Raises:
            InvalidRequestError: two of them have the same name.
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
                raise InvalidRequestError(
                    f"'tools' has {name!r:.80}, which is the name of a tool that the server runs.",
                    param="tools",
                )
        return cls(by_name, tuple(of_client))

    @property
    def definitions(self) -> list[Mapping[str, Any]]:
        """All of them in OpenAI's form."""
        return [*self.of_client, *(tool.info.definition for tool in self.by_name.values())]

    def is_of_client(self, name: str) -> bool:
        """Whether the caller does calls of this tool."""
        return any(name_of(definition) == name for definition in self.of_client)

    def listed(self) -> str:
        """Name them, for the model."""
        names = [name_of(definition) for definition in self.definitions]
        more = ["…"] if len(names) > _MAX_NAMES else []
        return ", ".join([*names[:_MAX_NAMES], *more]) or "none"


def tools_of(given: Sequence[AnyTool] | None, box: ToolRegistry) -> list[Tool]:
    """Find the tools that a run may use; None: all that the server has.

    Raises:
        InvalidRequestError: there is no such tool, or there are none; or a model cannot call it.
    """
    if given is None:
        if not box.tools:
            raise InvalidRequestError(
                "This server has no tools: --tools and --mcp-servers-config say which it has.",
                param="tools",
            )
        return list(box.tools.values())
    tools: dict[str, Tool] = {}
    for one in given:
        if isinstance(one, str):
            tools |= box.select([one])
    others = [one for one in given if not isinstance(one, str)]
    return [*tools.values(), *(one if isinstance(one, Tool) else tool_of(one) for one in others)]
