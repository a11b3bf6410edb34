"""`Tool`: something that a model may call, with a name, a schema of its arguments, and a result."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

import attrs

#: Who runs a tool: "server", one that is built in; "mcp", an MCP server; "function", the program.
ToolKind = Literal["server", "mcp", "function"]


def _ignore(_: str) -> None:
    pass


@attrs.frozen(kw_only=True)
class ToolInfo:
    """What a tool is, for a model and for people."""

    name: str
    description: str = ""
    #: A JSON Schema of the arguments, which are an object.
    parameters: Mapping[str, Any] = attrs.field(
        factory=lambda: {"type": "object", "properties": {}}
    )
    #: The name for people.
    display_name: str = attrs.field(default=attrs.Factory(lambda self: self.name, takes_self=True))
    kind: ToolKind = "server"
    #: The name of the MCP server that has it.
    mcp_server: str = ""
    #: Whether it may change something, so that a person is asked before.
    writes: bool = False
    #: Whether `ToolCallContext.cwd` matters to it.
    uses_cwd: bool = False
    #: Whether it tells its output while it runs.
    streams: bool = False

    @property
    def definition(self) -> dict[str, Any]:
        """The tool in OpenAI's form, as a chat names it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@attrs.frozen(kw_only=True)
class ToolCallContext:
    """How a tool is called: what is up to the client, and not to the model."""

    #: The folder that relative paths begin in; None: the tool's own.
    cwd: str | None = None
    #: Where the tool runs, as in `Config.tools_runtime`; None: as the configuration says.
    runtime: str | None = None
    #: Of what `read_file` reads: "base64", or empty for text.
    response_type: str = ""
    #: Is told the output of a tool that streams, piece by piece. It is called on the event loop.
    on_output: Callable[[str], None] = _ignore


@attrs.frozen
class ToolResult:
    """What a tool gave back.

    `answer` is a JSON object, as ``POST /tools`` answers: with ``plain_text_response``, or fields
    of its own, or ``error``. `diff` shows people what was changed, as a unified diff; the model
    does not see it.
    """

    answer: Mapping[str, Any]
    diff: str | None = None

    @classmethod
    def of_text(cls, text: str) -> Self:
        """A result that is text."""
        return cls({"plain_text_response": text})

    @classmethod
    def of_error(cls, message: str) -> Self:
        """The result of a call that has failed, in words for the model."""
        # What a model has written may have halves of surrogate pairs, which no client can read.
        return cls({"error": message.encode("utf-8", "replace").decode()})

    @property
    def is_error(self) -> bool:
        """Whether the call has failed."""
        return "error" in self.answer

    @property
    def text(self) -> str:
        """What the model is given as the content of the message with the result."""
        text = self.answer.get("plain_text_response")
        return text if isinstance(text, str) else json.dumps(self.answer, ensure_ascii=False)


class Tool(ABC):
    """Something that a model may call. May be called by several tasks at the same time."""

    @property
    @abstractmethod
    def info(self) -> ToolInfo:
        """What it is. It does not change."""

    @abstractmethod
    async def call(self, arguments: Mapping[str, Any], context: ToolCallContext) -> ToolResult:
        """Run it. When cancelled, what it has started has ended before this raises `Cancelled`.

        What the model can mend, such as the path of a file that is not there, is a result with an
        error.

        Args:
            arguments: by name; they may be anything that JSON can say.
            context: how.

        Raises:
            InvalidRequestError: an argument is missing, or has the wrong type; `param` names it.
            ToolRuntimeError: it cannot run where it is to run.
            ToolError: it has failed.
        """

    async def preview(self, arguments: Mapping[str, Any], context: ToolCallContext) -> str | None:
        """Tell people what the call would change, as a unified diff; None: that is not known.

        Changes nothing, and raises nothing for arguments that make no sense.
        """
        return None
