"""`Listing`: the tools that an MCP server lists, as far as they can be used and fit a budget.

A schema is converted to structs whose fields have the types of its keywords. That takes as long
as reading it, while a validator of schemas can take hours. `$schema` has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, Union

import attrs
import msgspec
from msgspec import UNSET, Meta, UnsetType

from trioserve.tools.mcp.messages import MAX_ID, count_values

#: The most tools of a server, which is also the most of a chat.
MAX_TOOLS = 1024

#: Bytes of one tool as JSON. A model reads them all, in each chat that has the tool.
MAX_TOOL = 2**16

#: Levels of its schema: the body of a request, which may have the tool, is allowed a few more.
_MAX_DEPTH = 100

#: Bytes and values of all tools of a server: they are kept, and `GET /tools` sends them.
MAX_BYTES = 2 * 2**20
MAX_VALUES = 50_000

#: Bytes of tools after which no further page is read.
_MAX_READ = 16 * 2**20


@attrs.frozen(kw_only=True)
class ListedTool:
    """A tool as a server describes it."""

    name: str
    description: str = ""
    #: For people; empty: none.
    title: str = ""
    reads_only: bool = False
    #: A JSON Schema of the arguments.
    parameters: Mapping[str, Any] = attrs.field(factory=lambda: {"type": "object"})


class Listing:
    """Collects the tools of all pages of a list."""

    def __init__(self) -> None:
        self.tools: list[ListedTool] = []
        #: Why other tools are not among them, each with its name.
        self.problems: list[tuple[str, str]] = []
        self._n_bytes = self._n_values = 0
        self._n_read = 0  # bytes, also of tools that are skipped

    @property
    def is_full(self) -> bool:
        """A further page makes no difference."""
        n_listed = len(self.tools) + len(self.problems)
        return (
            n_listed >= MAX_TOOLS
            or self._n_bytes >= MAX_BYTES
            or self._n_values >= MAX_VALUES
            or self._n_read >= _MAX_READ
        )

    def add(self, page: object) -> None:
        """Add the tools of a page, for a worker thread. One that is invalid is skipped alone."""
        for described in page if isinstance(page, list) else ():
            if self.is_full:
                return
            try:
                self._add(described)
            except (ValueError, RecursionError, msgspec.MsgspecError) as error:
                name = described.get("name") if isinstance(described, dict) else None
                problem = "its description is nested too deeply"
                if not isinstance(error, RecursionError):
                    problem = str(error)[:200]
                self.problems.append((str(name)[:MAX_ID], problem))

    def _add(self, described: object) -> None:
        read = msgspec.convert(described, _Tool)
        if read.execution is not None and read.execution.task_support == "required":
            raise ValueError("it only runs as a task")
        annotations = read.annotations or _Annotations()
        tool = ListedTool(
            name=read.name,
            description=read.description or "",
            title=read.title or annotations.title or "",
            reads_only=annotations.read_only_hint is True,
            parameters=_parameters(read.input_schema),
        )
        # Only this is kept of a tool, and so only this counts.
        data = msgspec.json.encode([tool.name, tool.description, tool.title, tool.parameters])
        n_values = count_values(data)
        self._n_read += len(data)
        if len(data) > MAX_TOOL:
            raise ValueError(f"it has more than {MAX_TOOL:,} bytes")
        self._n_bytes += len(data)
        self._n_values += n_values
        if self._n_bytes > MAX_BYTES or self._n_values > MAX_VALUES:
            raise ValueError(
                f"the server's tools together have more than {MAX_BYTES:,} bytes, "
                f"or more than {MAX_VALUES:,} values"
            )
        self.tools.append(tool)


def _parameters(schema: object) -> Mapping[str, Any]:
    """The schema of the arguments. One that does not describe an object allows anything."""
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        return {"type": "object"}
    if _is_too_deep(schema):
        raise RecursionError
    msgspec.convert(schema, _Schema)
    kept = {key: value for key, value in schema.items() if key != "$schema"}
    return {**kept, "type": "object"}


def _is_too_deep(schema: object) -> bool:
    level = [schema]
    for _ in range(_MAX_DEPTH):
        containers = [one for one in level if isinstance(one, list | dict)]
        if not containers:
            return False
        level = [
            inner
            for one in containers
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return True


class _Annotations(msgspec.Struct, rename="camel"):
    title: str | None = None
    read_only_hint: bool | None = None


class _Execution(msgspec.Struct, rename="camel"):
    task_support: str | None = None


class _Tool(msgspec.Struct, rename="camel"):
    name: Annotated[str, Meta(max_length=MAX_ID)]
    description: str | None = None
    title: str | None = None
    annotations: _Annotations | None = None
    execution: _Execution | None = None
    input_schema: Any = None


_Type = Literal["array", "boolean", "integer", "null", "number", "object", "string"]
_Types: TypeAlias = _Type | Annotated[list[_Type], Meta(min_length=1)]
_Count = Annotated[float, Meta(ge=0)]
# `|` cannot join the name of a class that comes later.
_AnySchema: TypeAlias = Union["_Schema", bool]
_Named: TypeAlias = dict[str, _AnySchema]
_Several: TypeAlias = Annotated[list[_AnySchema], Meta(min_length=1)]


class _Schema(msgspec.Struct, rename="camel"):
    """The keywords of JSON Schema whose values have a type."""

    type: _Types | UnsetType = UNSET
    title: str = ""
    description: str = ""
    ref: str = msgspec.field(default="", name="$ref")
    defs: _Named = msgspec.field(default_factory=dict, name="$defs")
    definitions: _Named = {}
    properties: _Named = {}
    pattern_properties: _Named = {}
    dependent_schemas: _Named = {}
    dependencies: dict[str, _AnySchema | list[str]] = {}
    dependent_required: dict[str, list[str]] = {}
    property_names: _AnySchema | UnsetType = UNSET
    additional_properties: _AnySchema | UnsetType = UNSET
    unevaluated_properties: _AnySchema | UnsetType = UNSET
    required: list[str] = []
    items: _AnySchema | list[_AnySchema] | UnsetType = UNSET
    prefix_items: _Several | UnsetType = UNSET
    additional_items: _AnySchema | UnsetType = UNSET
    unevaluated_items: _AnySchema | UnsetType = UNSET
    contains: _AnySchema | UnsetType = UNSET
    all_of: _Several | UnsetType = UNSET
    any_of: _Several | UnsetType = UNSET
    one_of: _Several | UnsetType = UNSET
    not_: _AnySchema | UnsetType = msgspec.field(default=UNSET, name="not")
    if_: _AnySchema | UnsetType = msgspec.field(default=UNSET, name="if")
    then: _AnySchema | UnsetType = UNSET
    else_: _AnySchema | UnsetType = msgspec.field(default=UNSET, name="else")
    enum: list[Any] | UnsetType = UNSET
    pattern: str = ""
    format: str = ""
    minimum: float | UnsetType = UNSET
    maximum: float | UnsetType = UNSET
    exclusive_minimum: float | bool | UnsetType = UNSET
    exclusive_maximum: float | bool | UnsetType = UNSET
    multiple_of: Annotated[float, Meta(gt=0)] | UnsetType = UNSET
    min_length: _Count | UnsetType = UNSET
    max_length: _Count | UnsetType = UNSET
    min_items: _Count | UnsetType = UNSET
    max_items: _Count | UnsetType = UNSET
    min_contains: _Count | UnsetType = UNSET
    max_contains: _Count | UnsetType = UNSET
    min_properties: _Count | UnsetType = UNSET
    max_properties: _Count | UnsetType = UNSET
    unique_items: bool = False
