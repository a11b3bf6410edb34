"""The tools that OpenAI's models know by their type, and that the client runs.

A model here knows them as functions. Each has separate types of items for its calls and results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from trioserve.api.base.fields import mapping, named, objects, required, strings, text
from trioserve.api.openai.responses.parts import image_part

Fields = dict[str, Any]

_STRING: Fields = {"type": "string"}
_STRINGS: Fields = {"type": "array", "items": _STRING}
_COUNT: Fields = {"type": "integer", "minimum": 0}


@attrs.frozen
class ClientTool:
    """A tool of such a type."""

    description: str  # for the model
    parameters: Fields  # the schema of its arguments
    item: str  # the type of the items of its calls
    prefix: str  # of their ids
    #: Make the fields of an item from the arguments, and the arguments from an item at a path.
    write: Callable[[Mapping[str, Any]], Fields]
    read: Callable[[Mapping[str, Any], str], Fields]
    #: Makes the content of a result from its item, which stands at a path.
    read_output: Callable[[Mapping[str, Any], str], str | list[Fields]]
    name: str = ""  # of its function; by default its type

    @property
    def output_item(self) -> str:
        """The type of the items of its results."""
        return f"{self.item.replace('search_call', 'search')}_output"


def _schema(*needed: str, **properties: Fields) -> Fields:
    return {
        "type": "object",
        "properties": properties,
        "required": list(needed),
        "additionalProperties": False,
    }


def _texts(value: Any) -> list[str]:
    """Take texts that a model has written, which may be one."""
    given = value if isinstance(value, list) else [] if value is None else [value]
    return [each if isinstance(each, str) else json.dumps(each) for each in given]


def _known(fields: Mapping[str, Any], *names: str) -> Fields:
    return {name: fields[name] for name in names if fields.get(name) is not None}


# -- a command of the local shell


def _exec(arguments: Mapping[str, Any]) -> Fields:
    env = arguments.get("env")
    action = {
        "type": "exec",
        "command": _texts(arguments.get("command")),
        "env": env if isinstance(env, dict) else {},
        "timeout_ms": arguments.get("timeout_ms"),
        "user": None,
        "working_directory": arguments.get("working_directory"),
    }
    return {"action": action}


def _read_exec(item: Mapping[str, Any], path: str) -> Fields:
    action = required(item, "action", mapping, path)
    command = required(action, "command", strings, f"{path}.action")
    others = _known(action, "working_directory", "timeout_ms", "env")
    return {"command": list(command), **{name: value for name, value in others.items() if value}}


# -- commands of a shell


def _commands(arguments: Mapping[str, Any]) -> Fields:
    action = {
        "commands": _texts(arguments.get("commands")),
        "timeout_ms": arguments.get("timeout_ms"),
        "max_output_length": arguments.get("max_output_length"),
    }
    return {"action": action, "environment": {"type": "local"}}


def _read_commands(item: Mapping[str, Any], path: str) -> Fields:
    action = required(item, "action", mapping, path)
    commands = required(action, "commands", strings, f"{path}.action")
    return {"commands": list(commands), **_known(action, "timeout_ms", "max_output_length")}


def _read_streams(item: Mapping[str, Any], path: str) -> str:
    """Read what commands have written, and how each ended."""
    written = []
    for i, each in enumerate(required(item, "output", objects, path)):
        place = f"{path}.output[{i}]"
        parts = [
            named(text, each.get(name) or "", f"{place}.{name}") for name in ("stdout", "stderr")
        ]
        outcome = required(each, "outcome", mapping, place)
        end = "timed out" if outcome.get("type") == "timeout" else outcome.get("exit_code")
        written.append("\n".join([*filter(None, parts), f"[exit code: {end}]"]))
    return "\n".join(written)


# -- patches


def _operation(arguments: Mapping[str, Any]) -> Fields:
    kind = arguments.get("type")
    operation = {
        "type": kind if kind in _OPERATIONS else "update_file",
        "path": str(arguments.get("path") or ""),
    }
    if kind != "delete_file":
        operation["diff"] = str(arguments.get("diff") or "")
    return {"operation": operation}


_OPERATIONS = ("create_file", "update_file", "delete_file")


def _read_operation(item: Mapping[str, Any], path: str) -> Fields:
    operation = required(item, "operation", mapping, path)
    needed = {name: required(operation, name, text, f"{path}.operation") for name in _PLACE}
    return needed | _known(operation, "diff")


_PLACE = ("type", "path")


def _read_status(item: Mapping[str, Any], path: str) -> str:
    status = required(item, "status", text, path)
    output = item.get("output")
    return f"{status}: {output}" if output else status


# -- a computer

_WHOLE: Fields = {"type": "integer"}
_KEYS: Fields = {**_STRINGS, "description": "Keys, such as 'CTRL' and 'S', pressed together."}
_PLACED = {"x": _WHOLE, "y": _WHOLE}
_AT = ("x", "y")

#: The required fields of actions, and the schemas of all their fields, by type.
_ACTIONS: Mapping[str, tuple[Sequence[str], Fields]] = {
    "click": (
        ("button", *_AT),
        {
            "button": {"type": "string", "enum": ["left", "right", "wheel", "back", "forward"]},
            **_PLACED,
            "keys": _KEYS,
        },
    ),
    "double_click": (_AT, {**_PLACED, "keys": _KEYS}),
    "drag": (("path",), {"path": {"type": "array", "items": _schema(*_AT, **_PLACED)}}),
    "keypress": (("keys",), {"keys": _KEYS}),
    "move": (_AT, _PLACED),
    "screenshot": ((), {}),
    "scroll": (
        (*_AT, "scroll_x", "scroll_y"),
        {**_PLACED, "scroll_x": _WHOLE, "scroll_y": _WHOLE, "keys": _KEYS},
    ),
    "type": (("text",), {"text": _STRING}),
    "wait": ((), {}),
}
_ACTION: Fields = {
    "anyOf": [
        _schema("type", *needed, type={"enum": [kind]}, **more)
        for kind, (needed, more) in _ACTIONS.items()
    ]
}
_USES = "Uses a computer by its screen. Each call gives a picture of the screen after it."


def _acts(arguments: Mapping[str, Any]) -> Fields:
    given = arguments.get("actions")
    actions = [_act(each) for each in given] if isinstance(given, list) else []
    return {"actions": actions or [_act(None)], "pending_safety_checks": []}


def _act(action: Any) -> Fields:
    """Give an action as the model has written it. One that is cut off only looks."""
    if not isinstance(action, dict) or (kind := str(action.get("type"))) not in _ACTIONS:
        return {"type": "screenshot"}
    if any(name not in action for name in _ACTIONS[kind][0]):
        return {"type": "screenshot"}
    return {"keys": None, **action} if kind == "double_click" else action


def _read_acts(item: Mapping[str, Any], path: str) -> Fields:
    if item.get("actions") is not None:
        return {"actions": list(required(item, "actions", objects, path))}
    return {"action": required(item, "action", mapping, path)}


def _read_screen(item: Mapping[str, Any], path: str) -> list[Fields]:
    return [image_part(required(item, "output", mapping, path), f"{path}.output")]


# -- a search for tools


def _read_found(item: Mapping[str, Any], path: str) -> str:
    """Name the tools that were found. The model has them among its tools from then on."""
    names: list[Any] = []
    for i, tool in enumerate(required(item, "tools", objects, path)):
        inner: Sequence[Mapping[str, Any]] = [tool]
        if tool.get("type") == "namespace":
            inner = required(tool, "tools", objects, f"{path}.tools[{i}]")
        names += [each.get("name") for each in inner]
    return json.dumps({"tools": [name for name in names if isinstance(name, str)]})


_ANYTHING: Fields = {"type": "object"}

#: The tools, by their types.
CLIENT_TOOLS: Mapping[str, ClientTool] = {
    "local_shell": ClientTool(
        "Runs a command on the user's machine, and gives its output.",
        _schema(
            "command",
            command={**_STRINGS, "description": "The program and its arguments."},
            working_directory=_STRING,
            timeout_ms=_COUNT,
            env={**_ANYTHING, "additionalProperties": _STRING},
        ),
        "local_shell_call",
        "lsh",
        _exec,
        _read_exec,
        lambda item, path: required(item, "output", text, path),
    ),
    "shell": ClientTool(
        "Runs shell commands on the user's machine, and gives the output of each.",
        _schema("commands", commands=_STRINGS, timeout_ms=_COUNT, max_output_length=_COUNT),
        "shell_call",
        "sh",
        _commands,
        _read_commands,
        _read_streams,
    ),
    "apply_patch": ClientTool(
        "Creates, updates or deletes a file. A diff has lines that begin with '@@' and say where "
        "a change is, and lines that begin with a space, '+' or '-'. That of a new file has "
        "lines with '+' only.",
        _schema(
            *_PLACE,
            type={"type": "string", "enum": list(_OPERATIONS)},
            path=_STRING,
            diff={**_STRING, "description": "Not for 'delete_file'."},
        ),
        "apply_patch_call",
        "apc",
        _operation,
        _read_operation,
        _read_status,
    ),
    "computer_use_preview": ClientTool(
        _USES,
        _schema("action", action=_ACTION),
        "computer_call",
        "cu",
        lambda arguments: {"action": _act(arguments.get("action")), "pending_safety_checks": []},
        _read_acts,
        _read_screen,
        "computer",
    ),
    "computer": ClientTool(
        _USES,
        _schema("actions", actions={"type": "array", "items": _ACTION, "minItems": 1}),
        "computer_call",
        "cu",
        _acts,
        _read_acts,
        _read_screen,
    ),
    "tool_search": ClientTool(
        "Finds further tools.",
        _schema("query", query=_STRING),
        "tool_search_call",
        "tsc",
        lambda arguments: {"execution": "client", "arguments": dict(arguments)},
        lambda item, path: required(item, "arguments", mapping, path),
        _read_found,
    ),
}
