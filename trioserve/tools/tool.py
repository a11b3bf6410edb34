"""`Tool`: something that a model may call, with a name, a schema of its arguments, and a result."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

import attrs
import msgspec

from trioserve.errors import InvalidRequestError

_T = TypeVar("_T")

#: Keywords that models have no use for.
_NOISE = frozenset({"title", "default"})

#: msgspec's error for text in the place of a list or an object.
_WANTS_JSON = re.compile("Expected `(array|object)`, got `str`")

#: The place of a tool: "server", a built-in one; "mcp", an MCP server; "function", the program.
ToolKind = Literal["server", "mcp", "function"]


def about(text: str, **limits: Any) -> msgspec.Meta:
    """Describe an argument for models, as in ``Annotated[str, about("Path of the file")]``."""
    return msgspec.Meta(description=text, **limits)


def schema_of(type_: type[msgspec.Struct]) -> dict[str, Any]:
    """The JSON Schema of an object with the fields of a struct; without references."""
    (schema,), parts = msgspec.json.schema_components([type_], ref_template="{name}")
    inlined: dict[str, Any] = _inline(schema, parts)
    return inlined


def _inline(schema: Any, parts: Mapping[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inline(one, parts) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        struct = _inline(parts[schema["$ref"]], parts)
        del struct["description"]  # the docstring, which is not for models
        return struct
    kept = {key: value for key, value in schema.items() if key not in _NOISE}
    return {key: _inline(value, parts) for key, value in kept.items()}


def read_arguments(type_: type[_T], arguments: Mapping[str, Any]) -> _T:
    """Make a struct of arguments as models write them: a number may be text, and null is nothing.

    A list or an object may be text, too: its JSON, as Claude Desktop is known to send it.

    Raises:
        InvalidRequestError: one is missing or has the wrong type; `param` names it.
    """
    given = {key: value for key, value in arguments.items() if value is not None}
    try:
        return msgspec.convert(given, type_, strict=False)
    except msgspec.ValidationError as error:
        message, param = str(error), _param_of(str(error))
        if param is not None and _WANTS_JSON.match(message):
            value = _unquoted(given.get(param))
            if value is not None:
                return read_arguments(type_, {**given, param: value})
        raise InvalidRequestError(message, param=param) from None
    except UnicodeEncodeError as error:  # of text in the place of something else
        text = _written(error.object)
        param = next((key for key, value in given.items() if text in _written(value)), None)
        raise InvalidRequestError(f"{param} has half of a surrogate pair", param=param) from None


def _unquoted(value: Any) -> Any:
    """The list or the object whose JSON a text is; None: no such JSON."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _param_of(message: str) -> str | None:
    """The argument that a message of msgspec is about, such as ``edits[0].old_text``."""
    path = re.search(r"- at `\$\.?([^`]*)`$", message)
    missing = re.search(r"required field `([^`]*)`", message)
    names = [found[1].replace("...", "0") for found in (path, missing) if found and found[1]]
    return ".".join(names) or None


@attrs.frozen(kw_only=True)
class ToolInfo:
    """The description of a tool, for a model and for people."""

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
    #: It may change something, so that a person is asked before.
    writes: bool = False
    #: `ToolCallContext.cwd` matters to it.
    uses_cwd: bool = False
    #: It reports its output while it runs.
    streams: bool = False
    #: True if its results are from strangers: names of control tokens in them are broken up.
    untrusted: bool = False

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
    """The context of a call, which the client sets and not the model."""

    #: The folder that relative paths begin in; None: the tool's own.
    cwd: str | None = None
    #: The place where the tool runs, as in `Config.tools_runtime`; None: as configured.
    runtime: str | None = None
    #: The encoding of `read_file`: "base64", or empty for text.
    response_type: str = ""
    #: Receives the output of a tool that streams, piece by piece, on the event loop.
    on_output: Callable[[str], None] = lambda _: None
    #: Counts the bytes that a call holds, more or fewer. An exception ends the call.
    count: Callable[[int], object] = lambda _: None
    #: Asks the person who approves calls; returns the words of a yes. None: no person does.
    ask: Callable[[str], Awaitable[str | None]] | None = None
    #: True if all calls may run without a person's approval.
    approves_all: bool = False
    #: Has the model answer messages, with fields of `GenerationParams`; returns the text and the
    #: name of the model. None: no model made the call.
    generate: (
        Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], Awaitable[tuple[str, str]]]
        | None
    ) = None
    #: Tells if a text occurs in the conversation, outside the messages of the model.
    has_seen: Callable[[str], bool] = lambda _: True


@attrs.frozen
class ToolResult:
    """The result of a call.

    `answer` is a JSON object, as ``POST /tools`` answers: with ``plain_text_response``, fields of
    the tool, or ``error``. `diff` shows the user what was changed, as a unified diff; the model
    does not see it.
    """

    answer: Mapping[str, Any]
    diff: str | None = None

    @classmethod
    def of_text(cls, text: str) -> Self:
        return cls({"plain_text_response": text})

    @classmethod
    def of_error(cls, message: str) -> Self:
        """The result of a call that has failed, in words for the model."""
        # Text of a model may have halves of surrogate pairs, which no client can read.
        return cls({"error": message.encode("utf-8", "replace").decode()})

    @property
    def is_error(self) -> bool:
        return "error" in self.answer

    @property
    def text(self) -> str:
        """The content of the message with the result for the model."""
        text = self.answer.get("plain_text_response")
        return text if isinstance(text, str) else json.dumps(self.answer, ensure_ascii=False)


class Tool(ABC):
    """Something that a model may call. May be called by several tasks at the same time."""

    #: Its description, which does not change.
    info: ToolInfo

    @abstractmethod
    async def call(self, arguments: Mapping[str, Any], context: ToolCallContext) -> ToolResult:
        """Run it. When cancelled, its work has ended before this raises `Cancelled`.

        What the model can correct, such as a wrong path, is a result with an error.

        Args:
            arguments: by name; they may be anything that JSON can say.
            context: how.

        Raises:
            InvalidRequestError: an argument is missing, or has the wrong type; `param` names it.
            ToolRuntimeError: it cannot run in its runtime.
            ToolError: it has failed.
        """

    async def preview(self, arguments: Mapping[str, Any], context: ToolCallContext) -> str | None:
        """Show the user what the call would change, as a unified diff; None: not known.

        Changes nothing, and raises nothing for invalid arguments.
        """
        return None


class ToolSource:
    """A source of tools. Its `tools` and `abilities` may change."""

    @property
    def tools(self) -> Mapping[str, Tool]:
        raise NotImplementedError

    def abilities(self) -> Sequence[str]:
        """Sentences for the log about what a server with these tools may do."""
        return ()

    async def listed(self) -> None:
        """Wait until the tools are there. Those that need too long come later."""

    def check(self, context: ToolCallContext) -> None:
        """Look whether tools that depend on the context can be called so. Raises as a call."""
