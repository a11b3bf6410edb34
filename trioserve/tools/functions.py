"""`tool_of`: makes a tool of a Python function."""

from __future__ import annotations

import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import msgspec
import trio

from trioserve.errors import InvalidRequestError, ToolError
from trioserve.fair_limiter import LimiterOfRun
from trioserve.tools.tool import Tool, ToolCallContext, ToolInfo, ToolResult

#: Plain functions that run at the same time, and those of one client. Others wait for them.
_threads = LimiterOfRun(48, 40)

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

#: An argument in the docstring: its name, perhaps its type, and its description.
_ARGUMENT = re.compile(r"(\w+)(?: *\([^)]*\))?: *(.*)")


def tool_of(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    description: str | None = None,
    writes: bool = False,
    abandon_on_cancel: bool = False,
) -> Tool:
    """Make a tool of a function, whose type hints and docstring tell the model about it.

    An async function runs on Trio, another one in a worker thread. What it returns is the result:
    text as it is, anything else as JSON. A parameter of the type `ToolCallContext` is not the
    model's: it gets the context of the call, whose `on_output` tells people what is going on.

    Args:
        function: any function with named parameters.
        name: the tool's; the default is the function's.
        description: what the tool does, for the model; the default is the docstring.
        writes: whether it may change something, so that a person is asked before.
        abandon_on_cancel: what becomes of a function in a thread whose call is cancelled. It cannot
            be ended. False: the cancelled call waits for it. True: it runs on without a reader.

    Raises:
        InvalidRequestError: it cannot be called by a model; `param` is "tools".
    """
    if not callable(function):
        raise _invalid(f"{function!r:.80} is no tool: it is neither a function nor the name of one")
    name = name or str(getattr(function, "__name__", ""))
    if not _NAME.fullmatch(name):
        raise _invalid(f"{name!r:.80} is no name of a tool: it has letters, digits, _ and -")
    try:
        hints = typing.get_type_hints(_called(function), include_extras=True)
    except NameError as error:
        raise _invalid(f"{name} has a type hint that is not defined: {error}") from None
    summary, described = _read_docstring(inspect.getdoc(function) or "")
    fields: list[Any] = []
    context_name = None
    for parameter in inspect.signature(function).parameters.values():
        hint = hints.get(parameter.name, Any)
        if hint is ToolCallContext:
            context_name = parameter.name
        elif parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise _invalid(f"{name} has the parameter {parameter}, which has no name to call it by")
        else:
            if about := described.get(parameter.name):
                hint = typing.Annotated[hint, msgspec.Meta(description=about)]
            fields.append(_field(parameter, hint))
    arguments = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
    info = ToolInfo(
        name=name,
        description=summary if description is None else description,
        parameters=_schema(arguments, name),
        kind="function",
        writes=writes,
        streams=context_name is not None,
    )
    return _FunctionTool(function, info, arguments, context_name, abandon_on_cancel)


def _field(parameter: inspect.Parameter, hint: Any) -> tuple[Any, ...]:
    default = parameter.default
    if default is parameter.empty:
        return parameter.name, hint
    if default is None or isinstance(default, str | int | float):
        return parameter.name, hint, default
    unset = typing.Union[hint, msgspec.UnsetType]  # noqa: UP007 - not all hints know |
    return parameter.name, unset, msgspec.UNSET


@attrs.frozen(eq=False)
class _FunctionTool(Tool):
    _function: Callable[..., Any]
    info: ToolInfo
    _arguments: type[msgspec.Struct]
    _context_name: str | None
    _abandon_on_cancel: bool

    async def call(self, arguments: Mapping[str, Any], context: ToolCallContext) -> ToolResult:
        try:
            read = msgspec.convert(dict(arguments), self._arguments, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"Wrong arguments: {error}", param="arguments") from None
        given = {name: getattr(read, name) for name in read.__struct_fields__}
        given = {name: value for name, value in given.items() if value is not msgspec.UNSET}
        awaits = is_async(self._function)
        if self._context_name is not None:
            given[self._context_name] = context if awaits else _for_thread(context)
        if awaits:
            value = await self._function(**given)
        else:
            value = await _threads().run_sync(
                lambda: self._function(**given), abandon_on_cancel=self._abandon_on_cancel
            )
        return _result_of(value)


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a call of it runs: of an object, its method; of a partial, the function."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isroutine(function) or inspect.isclass(function):
        return function
    return type(function).__call__


def is_async(function: Callable[..., Any]) -> bool:
    """A call of this function, or of an object like one, has to be awaited."""
    return any(map(inspect.iscoroutinefunction, (function, _called(function))))


def _for_thread(context: ToolCallContext) -> ToolCallContext:
    """A context whose `on_output` may be called in a worker thread."""
    tell = context.on_output
    return attrs.evolve(context, on_output=lambda text: trio.from_thread.run_sync(tell, text))


def _result_of(value: Any) -> ToolResult:
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult.of_text(value)
    try:
        builtins = msgspec.to_builtins(value, str_keys=True)
        return ToolResult.of_text(json.dumps(builtins, ensure_ascii=False))  # as models know it
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolError(f"What the tool has returned has no form in JSON: {error}") from None


def _schema(arguments: type[msgspec.Struct], name: str) -> dict[str, Any]:
    try:
        (schema,), components = msgspec.json.schema_components(
            [arguments], ref_template="#/$defs/{name}"
        )
    except (TypeError, ValueError) as error:
        raise _invalid(f"{name} has parameters that cannot be described: {error}") from None
    own = components.pop(schema["$ref"].rpartition("/")[2])
    own = {key: value for key, value in own.items() if key != "title"}
    return {**own, "$defs": components} if components else own


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into its description and the entries of its section "Args:"."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.rstrip() == "Args:"), len(lines))
    sections = [i for i in range(begin + 1, len(lines)) if lines[i][:1].strip()]
    described: dict[str, str] = {}
    section = lines[begin + 1 : sections[0] if sections else len(lines)]
    indent = min((len(line) - len(line.lstrip()) for line in section if line.strip()), default=0)
    name = ""
    for line in section:
        begins = _ARGUMENT.fullmatch(line[indent:]) if line[indent : indent + 1].strip() else None
        if begins is not None:
            name, described[begins[1]] = begins[1], begins[2]
        elif name and line.strip():
            described[name] = f"{described[name]} {line.strip()}".strip()
    return "\n".join(lines[:begin]).strip(), described


def _invalid(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{problem}.", param="tools")
