"""The tools that Anthropic's models know by their type, and that the client runs.

The model is offered a function for each, and one for each member of a toolset. A call of a member
has Anthropic's names of the member and the toolset.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import attrs

from trioserve.api.base.fields import boolean, integer, mapping, optional, required

Fields: TypeAlias = dict[str, Any]

_STRING: Fields = {"type": "string"}

#: A function: its name, what the model reads of it, and the schema of its input.
Function: TypeAlias = tuple[str, str, Fields]


def _told(schema: Fields, description: str) -> Fields:
    return {**schema, "description": description}


def _schema(*needed: str, **properties: Fields) -> Fields:
    return {"type": "object", "properties": properties, "required": list(needed)}


_WHOLE = {"type": "integer"}
_LINE = {**_WHOLE, "minimum": 0}


def _whole_numbers(count: int, description: str) -> Fields:
    return _told(
        {"type": "array", "items": _WHOLE, "minItems": count, "maxItems": count}, description
    )


# -- files and commands


def _commands(*commands: str, **more: Fields) -> Fields:
    """The schema of a tool that edits files by commands."""
    return _schema(
        "command",
        command={"type": "string", "enum": list(commands)},
        path=_STRING,
        file_text=_told(_STRING, "For 'create': the text of the file."),
        old_str=_told(_STRING, "For 'str_replace': the text to replace."),
        new_str=_told(_STRING, "For 'str_replace': the text in its place."),
        insert_line=_told(_LINE, "For 'insert': the line to insert after."),
        insert_text=_told(_STRING, "For 'insert': the text."),
        view_range=_whole_numbers(2, "For 'view': the first and the last line."),
        **more,
    )


_EDITOR = ("view", "create", "str_replace", "insert")
_OLD_EDITOR = ("Views and edits files.", _commands(*_EDITOR, "undo_edit"))

#: By the beginning of the type: what the model reads of a tool, and the schema of its input.
_SINGLE: Mapping[str, tuple[str, Fields]] = {
    "bash_": (
        "Runs a command in a bash session that lasts, and gives its output.",
        _schema(
            command=_told(_STRING, "The command."),
            restart=_told({"type": "boolean"}, "Restarts the session instead."),
        ),
    ),
    "text_editor_202410": _OLD_EDITOR,
    "text_editor_202501": _OLD_EDITOR,
    "text_editor_": ("Views and edits files.", _commands(*_EDITOR)),
    "memory_": (
        "Views and edits files in /memories, which last from one conversation to the next.",
        _commands(*_EDITOR, "delete", "rename", old_path=_STRING, new_path=_STRING),
    ),
}

# -- a screen

_SIDE = {"type": "string", "enum": ["up", "down", "left", "right"]}
_POINT = _whole_numbers(2, "x from the left edge and y from the top edge, in pixels.")
_REGION = _whole_numbers(4, "x0, y0, x1, y1: the region to capture, in pixels.")
_KEYS = _told(_STRING, "A key or a combination, such as 'Return' or 'ctrl+s'.")
_HELD = _told(_STRING, "Keys to hold down meanwhile, such as 'ctrl+shift'.")
_SECONDS = {"type": "integer", "description": "In seconds."}


def _click(what: str) -> tuple[str, Fields]:
    about = f"{what} at a coordinate or, without one, where the cursor is."
    return about, _schema(coordinate=_POINT, text=_HELD)


#: The members of the computer toolset, which are the actions of the older tool, too.
_COMPUTER: Mapping[str, tuple[str, Fields]] = {
    "key": ("Presses a key or a combination.", _schema("text", text=_KEYS, repeat=_WHOLE)),
    "hold_key": (
        "Holds a key down for a time.",
        _schema("text", "duration", text=_KEYS, duration=_SECONDS),
    ),
    "type": ("Types a text.", _schema("text", text=_STRING)),
    "cursor_position": ("Gives the coordinate of the cursor.", _schema()),
    "mouse_move": (
        "Moves the cursor to a coordinate, without a click.",
        _schema("coordinate", coordinate=_POINT),
    ),
    "left_mouse_down": ("Presses the left button, and holds it.", _schema()),
    "left_mouse_up": ("Releases the left button.", _schema()),
    "left_click": _click("Clicks"),
    "left_click_drag": (
        "Drags from one coordinate to another.",
        _schema(
            "start_coordinate",
            "coordinate",
            start_coordinate=_POINT,
            coordinate=_POINT,
            text=_HELD,
        ),
    ),
    "right_click": _click("Clicks the right button"),
    "middle_click": _click("Clicks the middle button"),
    "double_click": _click("Clicks twice"),
    "triple_click": _click("Clicks three times"),
    "scroll": (
        "Scrolls at a coordinate or, without one, where the cursor is.",
        _schema(
            "scroll_direction",
            "scroll_amount",
            coordinate=_POINT,
            scroll_direction=_SIDE,
            scroll_amount=_told(_WHOLE, "Clicks of the wheel."),
            text=_HELD,
        ),
    ),
    "wait": ("Waits.", _schema("duration", duration=_SECONDS)),
    "screenshot": ("Takes a picture of the screen.", _schema()),
    "zoom": ("Takes an enlarged picture of a region.", _schema("region", region=_REGION)),
}

#: Actions that came with the second version of the older tool.
_NEWER = ("left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait", "triple_click")

#: Of the inputs, those that only members have.
_OF_MEMBERS = ("repeat",)


def _screen(tool: Mapping[str, Any], path: str) -> tuple[str, Fields]:
    """Describe the older tool, which has the members as actions."""
    left_out: Collection[str] = _NEWER if tool["type"] == "computer_20241022" else ()
    if not optional(tool, "enable_zoom", boolean, path):
        left_out = (*left_out, "zoom")
    actions = {name: each for name, each in _COMPUTER.items() if name not in left_out}
    inputs = {
        name: schema
        for _, each in actions.values()
        for name, schema in each["properties"].items()
        if name not in _OF_MEMBERS
    }
    size = [required(tool, f"display_{side}_px", integer, path) for side in ("width", "height")]
    about = [
        f"Uses a computer by its screen of {size[0]} by {size[1]} pixels. The actions:",
        *(f"- {name}: {description}" for name, (description, _) in actions.items()),
    ]
    action = {"type": "string", "enum": list(actions)}
    inputs |= {"text": _told(_STRING, "What 'type' types; for other actions, keys.")}
    return "\n".join(about), _schema("action", action=action, **inputs)


# -- a browser

_TAB = _told(_STRING, "The id of a tab; by default the active one.")
_AT = {
    **_schema("type", "x", "y", type={"enum": ["coordinate"]}, x=_WHOLE, y=_WHOLE),
    "description": "A point of the viewport, in pixels.",
}
_ELEMENT = {
    **_schema("type", "ref", type={"enum": ["ref"]}, ref=_STRING),
    "description": "An element, by its reference in what 'read_page' or 'find' gave.",
}
_TARGET = {"anyOf": [_AT, _ELEMENT]}
_LIST = {"type": "array", "items": _STRING}


def _in_tab(about: str, *needed: str, **inputs: Fields) -> tuple[str, Fields]:
    return about, _schema(*needed, **inputs, tab_id=_TAB)


def _press(what: str) -> tuple[str, Fields]:
    about = f"{what} at a point or an element."
    return _in_tab(about, "target", target=_TARGET, modifiers=_HELD)


_BROWSER: Mapping[str, tuple[str, Fields]] = {
    "navigate": _in_tab(
        "Opens an address, or goes back or forward, or loads the page again.",
        "url",
        url=_told(_STRING, "An address, or 'back', 'forward' or 'reload'."),
    ),
    "list_tabs": ("Lists the tabs with their ids, titles and addresses.", _schema()),
    "new_tab": ("Opens an empty tab, and gives its id.", _schema()),
    "switch_tab": ("Makes a tab the active one.", _schema("tab_id", tab_id=_STRING)),
    "close_tab": ("Closes a tab.", _schema("tab_id", tab_id=_STRING)),
    "read_page": _in_tab(
        "Gives the tree of the page, with references to its elements.",
        depth=_told(_WHOLE, "The depth of the tree; 15 by default."),
        filter=_told(
            {"type": "string", "enum": ["all", "interactive"]},
            "Which elements; by default those that can be seen.",
        ),
        ref=_told(_STRING, "The element whose part of the tree to give."),
    ),
    "get_page_text": _in_tab("Gives the text of the page."),
    "read_console": _in_tab("Gives what is new on the console."),
    "read_network": _in_tab("Gives the requests that are new."),
    "find": _in_tab(
        "Finds elements by a description, and gives references to them.", "query", query=_STRING
    ),
    "form_input": _in_tab(
        "Sets the value of an element of a form; a checkbox takes true or false.",
        "target",
        "value",
        target=_ELEMENT,
        value={"type": ["string", "number", "boolean"]},
    ),
    "file_upload": _in_tab(
        "Sets the files of an element, by their paths or by ids of documents.",
        "target",
        target=_ELEMENT,
        paths=_LIST,
        document_ids=_LIST,
    ),
    "scroll_to": _in_tab("Scrolls an element into view.", "target", target=_ELEMENT),
    "screenshot": _in_tab("Takes a picture of the viewport."),
    "zoom": _in_tab("Takes an enlarged picture of a region.", "region", region=_REGION),
    "left_click": _press("Clicks"),
    "right_click": _press("Clicks the right button"),
    "middle_click": _press("Clicks the middle button"),
    "double_click": _press("Clicks twice"),
    "triple_click": _press("Clicks three times"),
    "hover": _in_tab("Moves the cursor to a point or an element.", "target", target=_TARGET),
    "left_click_drag": _in_tab(
        "Drags from one point to another.", "from", "target", **{"from": _AT}, target=_AT
    ),
    "left_mouse_down": _in_tab("Presses the left button, and holds it.", "target", target=_AT),
    "left_mouse_up": _in_tab("Releases the left button.", "target", target=_AT),
    "mouse_move": _in_tab("Moves the cursor to a point.", "target", target=_AT),
    "scroll": _in_tab(
        "Scrolls at a point.",
        "target",
        "scroll_direction",
        target=_AT,
        scroll_direction=_SIDE,
        scroll_amount=_told(_WHOLE, "Clicks of the wheel; 3 by default."),
    ),
    "type": _in_tab("Types a text.", "text", text=_STRING),
    "key": _in_tab(
        "Presses keys, one after another where there are spaces.", "text", text=_KEYS, repeat=_WHOLE
    ),
    "hold_key": _in_tab(
        "Holds a key down for a time.",
        "text",
        "duration",
        text=_KEYS,
        duration=_told({"type": "number"}, "In seconds, at most 30."),
    ),
    "wait": _in_tab(
        "Waits.", "duration", duration=_told({"type": "number"}, "In seconds, at most 30.")
    ),
    "javascript_exec": _in_tab(
        "Evaluates JavaScript in the page, and gives the value of its last expression.",
        "text",
        text=_STRING,
    ),
}

#: The toolsets, by their names.
_TOOLSETS = {"computer": _COMPUTER, "browser": _BROWSER}


@attrs.frozen
class Member:
    """A member of a toolset, by the names that calls of it have."""

    toolset: str
    name: str

    @property
    def function(self) -> str:
        """The name of its function."""
        return f"{self.toolset}_{self.name}"


def functions_of(tool: Mapping[str, Any], path: str) -> list[Function] | None:
    """The functions of a tool whose type is known; None: it is not.

    The name is empty where the request gives it. `members_of` names those of a toolset.

    Raises:
        InvalidRequestError: something is missing or of the wrong type; `param` names it.
    """
    kind = str(tool["type"])
    if members := members_of(tool, path):
        toolset = _TOOLSETS[members[0].toolset]
        return [(each.function, *toolset[each.name]) for each in members]
    if kind.startswith("computer_"):
        return [("", *_screen(tool, path))]
    return next(([("", *_SINGLE[head])] for head in _SINGLE if kind.startswith(head)), None)


def members_of(tool: Mapping[str, Any], path: str) -> list[Member]:
    """The members of a toolset that its entry does not switch off; empty: it is no toolset."""
    name, is_toolset, _ = str(tool["type"]).partition("_toolset_")
    if not is_toolset or name not in _TOOLSETS:
        return []
    configs = optional(tool, "configs", mapping, path) or {}
    return [
        Member(name, each)
        for each in _TOOLSETS[name]
        if (of_member := optional(configs, each, mapping, f"{path}.configs")) is None
        or optional(of_member, "enabled", boolean, f"{path}.configs.{each}") is not False
    ]
