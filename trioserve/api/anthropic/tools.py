"""Anthropic's tools, as functions of a chat: those with a schema, and those that its models know.

The client runs `bash`, the text editor and the memory, whose schemas are known by their types.
Tools that Anthropic's servers run are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trioserve.api.anthropic.messages import filled
from trioserve.api.base.fields import (
    NAME,
    SCHEMA,
    STRING,
    Only,
    boolean,
    json_type,
    list_schema,
    mapping,
    named,
    object_schema,
    objects,
    or_null,
    refuse_unsupported,
    required,
    text,
)
from trioserve.chat.messages import MAX_TOOLS, NOT_HOSTED, Tools
from trioserve.left_out import leave_out

#: Fields of a tool that have no effect.
_UNSUPPORTED: Mapping[str, Only] = {
    "allowed_callers": Only(["direct"], harmless="the model itself calls all tools"),
    "defer_loading": Only(False, harmless="the model has all tools from the beginning"),
}

# -- tools whose schemas are known

_LINE = {"type": "integer", "minimum": 0}
_RANGE = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}


def _commands(*commands: str, **more: Any) -> dict[str, Any]:
    """The schema of a tool that edits files by commands."""
    properties = {
        "command": {"type": "string", "enum": list(commands)},
        "path": STRING,
        "file_text": {**STRING, "description": "For 'create': the text of the file."},
        "old_str": {**STRING, "description": "For 'str_replace': the text to replace."},
        "new_str": {**STRING, "description": "For 'str_replace': the text in its place."},
        "insert_line": {**_LINE, "description": "For 'insert': the line to insert after."},
        "insert_text": {**STRING, "description": "For 'insert': the text."},
        "view_range": {**_RANGE, "description": "For 'view': the first and the last line."},
        **more,
    }
    return {"type": "object", "properties": properties, "required": ["command"]}


_EDITOR = ("view", "create", "str_replace", "insert")
_PATHS = {"old_path": STRING, "new_path": STRING}

#: By the beginning of the type: what the model reads of a tool, and the schema of its input.
_KNOWN: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bash_": (
        "Runs a command in a bash session that lasts, and gives its output.",
        {
            "type": "object",
            "properties": {
                "command": {**STRING, "description": "The command."},
                "restart": {"type": "boolean", "description": "Restarts the session instead."},
            },
        },
    ),
    "text_editor_202410": ("Views and edits files.", _commands(*_EDITOR, "undo_edit")),
    "text_editor_202501": ("Views and edits files.", _commands(*_EDITOR, "undo_edit")),
    "text_editor_": ("Views and edits files.", _commands(*_EDITOR)),
    "memory_": (
        "Views and edits files in /memories, which last from one conversation to the next.",
        _commands(*_EDITOR, "delete", "rename", **_PATHS),
    ),
}

# -- reading

_TOOL = object_schema(
    "name",
    name={**NAME, "minLength": 1},
    type=or_null(NAME),
    description=or_null(STRING),
    input_schema=SCHEMA,
)


@json_type(list_schema(_TOOL, MAX_TOOLS))
def read_tools(value: Any) -> Tools:
    """Read ``tools``.

    Raises:
        MismatchError: it is no list of objects.
        InvalidRequestError: something is missing or has the wrong type; `param` names it.
    """
    read = (_tool(tool, f"tools[{i}]") for i, tool in enumerate(objects(value)))
    return Tools(tool for tool in read if tool is not None)


def _tool(tool: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    kind = tool.get("type") or "custom"
    known = next((_KNOWN[head] for head in _KNOWN if str(kind).startswith(head)), None)
    if kind != "custom" and known is None:
        leave_out(f"tools of type {kind}", NOT_HOSTED)
        return None
    refuse_unsupported(tool, _UNSUPPORTED, f"{path}.")
    function: dict[str, Any] = {"name": required(tool, "name", filled, path)}
    if known is not None:
        function["description"], function["parameters"] = known
    else:
        function["description"] = _description(tool, path)
        function["parameters"] = required(tool, "input_schema", mapping, path)
    if tool.get("strict") is not None:
        function["strict"] = named(boolean, tool["strict"], f"{path}.strict")
    return {"type": "function", "function": function}


def _description(tool: Mapping[str, Any], path: str) -> str:
    """Read the description, and write the examples of input below it."""
    given = tool.get("description")
    description = "" if given is None else named(text, given, f"{path}.description")
    examples = tool.get("input_examples")
    if examples is None:
        return description
    lines = map(json.dumps, named(objects, examples, f"{path}.input_examples"))
    return "\n".join([description, *(f"Example of input: {line}" for line in lines)]).strip()
