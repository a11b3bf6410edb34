"""The tools that Anthropic's models know by their type, and that the client runs.

The model is offered a function for each, and one for each member of a toolset. A call of a member
has Anthropic's names of the member and the toolset.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import attrs

from trioserve.api.base.fields import boolean, integer, mapping, optional, required

Fields: TypeAlias = dict[str, Any]

#: A function: its name, what the model reads of it, and the schema of its input.
Function: TypeAlias = tuple[str, str, Fields]

_STRING: Fields = {"type": "string"}
_WHOLE: Fields = {"type": "integer"}


def _told(schema: Fields, description: str) -> Fields:
    return {**schema, "description": description}


def _whole_numbers(count: int, description: str) -> Fields:
    numbers = {"type": "array", "items": _WHOLE, "minItems": count, "maxItems": count}
    return _told(numbers, description)


def _schema(inputs: str, kinds: Mapping[str, Fields]) -> Fields:
    """The schema of inputs and their kinds: ``text:keys repeat?:whole tab_id?``."""
    pairs = [each.partition(":") for each in inputs.split()]
    return {
        "type": "object",
        "properties": {
            (plain := name.removesuffix("?")): kinds[kind or plain] for name, _, kind in pairs
        },
        "required": [name for name, *_ in pairs if name[-1] != "?"],
    }


#: The kinds of inputs. An input whose kind is not given has that of its name.
_KINDS: Mapping[str, Fields] = {
    "string": _STRING,
    "whole": _WHOLE,
    "value": {"type": ["string", "number", "boolean"]},
    "list": {"type": "array", "items": _STRING},
    # of files and commands
    "command": _told(_STRING, "The command."),
    "restart": _told({"type": "boolean"}, "Restarts the session instead."),
    "file_text": _told(_STRING, "For 'create': the text of the file."),
    "old_str": _told(_STRING, "For 'str_replace': the text to replace."),
    "new_str": _told(_STRING, "For 'str_replace': the text in its place."),
    "insert_line": _told({**_WHOLE, "minimum": 0}, "For 'insert': the line to insert after."),
    "insert_text": _told(_STRING, "For 'insert': the text."),
    "view_range": _whole_numbers(2, "For 'view': the first and the last line."),
    # of a screen
    "scroll_direction": {"type": "string", "enum": ["up", "down", "left", "right"]},
    "clicks": _told(_WHOLE, "Clicks of the wheel."),
    "coordinate": _whole_numbers(2, "x from the left edge and y from the top edge, in pixels."),
    "region": _whole_numbers(4, "x0, y0, x1, y1: the region to capture, in pixels."),
    "keys": _told(_STRING, "A key or a combination, such as 'Return' or 'ctrl+s'."),
    "held": _told(_STRING, "Keys to hold down meanwhile, such as 'ctrl+shift'."),
    "seconds": _told(_WHOLE, "In seconds."),
    # of a browser
    "tab_id": _told(_STRING, "The id of a tab; by default the active one."),
    "url": _told(_STRING, "An address, or 'back', 'forward' or 'reload'."),
    "depth": _told(_WHOLE, "The depth of the tree; 15 by default."),
    "filter": _told(
        {"type": "string", "enum": ["all", "interactive"]},
        "Which elements; by default those that can be seen.",
    ),
    "root": _told(_STRING, "The element whose part of the tree to give."),
    "some_clicks": _told(_WHOLE, "Clicks of the wheel; 3 by default."),
    "some_seconds": _told({"type": "number"}, "In seconds, at most 30."),
}
_AT = _told(
    _schema("type:at x:whole y:whole", {**_KINDS, "at": {"enum": ["coordinate"]}}),
    "A point of the viewport, in pixels.",
)
_ELEMENT = _told(
    _schema("type:ref ref:string", {**_KINDS, "ref": {"enum": ["ref"]}}),
    "An element, by its reference in what 'read_page' or 'find' gave.",
)
_ALL_KINDS = {**_KINDS, "at": _AT, "element": _ELEMENT, "target": {"anyOf": [_AT, _ELEMENT]}}


def _table(rows: str) -> dict[str, tuple[str, Fields]]:
    """Read rows of a name, inputs and a description, which may wrap onto indented lines."""
    found = {}
    for row in re.split(r"\n(?=\w)", rows.strip()):
        signature, _, about = row.partition("|")
        name, _, inputs = signature.partition(" ")
        found[name] = " ".join(about.split()), _schema(inputs, _ALL_KINDS)
    return found


# -- files and commands

_INPUTS = (
    "command:commands path?:string file_text? old_str? new_str? insert_line? insert_text? "
    "view_range?"
)


def _editor(about: str, more_commands: str = "", more_inputs: str = "") -> tuple[str, Fields]:
    """Describe a tool that edits files by commands."""
    commands = ["view", "create", "str_replace", "insert", *more_commands.split()]
    kinds = {**_KINDS, "commands": {"type": "string", "enum": commands}}
    return about, _schema(f"{_INPUTS} {more_inputs}", kinds)


_OLD_EDITOR = _editor("Views and edits files.", "undo_edit")

#: By the beginning of the type: what the model reads of a tool, and the schema of its input.
_SINGLE: Mapping[str, tuple[str, Fields]] = {
    "bash_": (
        "Runs a command in a bash session that lasts, and gives its output.",
        _schema("command? restart?", _KINDS),
    ),
    "text_editor_202410": _OLD_EDITOR,
    "text_editor_202501": _OLD_EDITOR,
    "text_editor_": _editor("Views and edits files."),
    "memory_": _editor(
        "Views and edits files in /memories, which last from one conversation to the next.",
        "delete rename",
        "old_path?:string new_path?:string",
    ),
}

# -- a screen


#: The members of the computer toolset, which are the actions of the older tool, too.
_COMPUTER = _table("""
key text:keys repeat?:whole | Presses a key or a combination.
hold_key text:keys duration:seconds | Holds a key down for a time.
type text:string | Types a text.
cursor_position | Gives the coordinate of the cursor.
mouse_move coordinate | Moves the cursor to a coordinate, without a click.
left_mouse_down | Presses the left button, and holds it.
left_mouse_up | Releases the left button.
left_click coordinate? text?:held | Clicks at a coordinate or, without one, where the cursor is.
left_click_drag start_coordinate:coordinate coordinate text?:held
    | Drags from one coordinate to another.
right_click coordinate? text?:held
    | Clicks the right button at a coordinate or, without one, where the cursor is.
middle_click coordinate? text?:held
    | Clicks the middle button at a coordinate or, without one, where the cursor is.
double_click coordinate? text?:held
    | Clicks twice at a coordinate or, without one, where the cursor is.
triple_click coordinate? text?:held
    | Clicks three times at a coordinate or, without one, where the cursor is.
scroll coordinate? scroll_direction scroll_amount:clicks text?:held
    | Scrolls at a coordinate or, without one, where the cursor is.
wait duration:seconds | Waits.
screenshot | Takes a picture of the screen.
zoom region | Takes an enlarged picture of a region.
""")

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
    schema = {
        "action": {"type": "string", "enum": list(actions)},
        **inputs,
        "text": _told(_STRING, "What 'type' types; for other actions, keys."),
    }
    return "\n".join(about), {"type": "object", "properties": schema, "required": ["action"]}


# -- a browser


_BROWSER = _table("""
navigate url tab_id? | Opens an address, or goes back or forward, or loads the page again.
list_tabs | Lists the tabs with their ids, titles and addresses.
new_tab | Opens an empty tab, and gives its id.
switch_tab tab_id:string | Makes a tab the active one.
close_tab tab_id:string | Closes a tab.
read_page depth? filter? ref?:root tab_id?
    | Gives the tree of the page, with references to its elements.
get_page_text tab_id? | Gives the text of the page.
read_console tab_id? | Gives what is new on the console.
read_network tab_id? | Gives the requests that are new.
find query:string tab_id? | Finds elements by a description, and gives references to them.
form_input target:element value tab_id?
    | Sets the value of an element of a form; a checkbox takes true or false.
file_upload target:element paths?:list document_ids?:list tab_id?
    | Sets the files of an element, by their paths or by ids of documents.
scroll_to target:element tab_id? | Scrolls an element into view.
screenshot tab_id? | Takes a picture of the viewport.
zoom region tab_id? | Takes an enlarged picture of a region.
left_click target modifiers?:held tab_id? | Clicks at a point or an element.
right_click target modifiers?:held tab_id? | Clicks the right button at a point or an element.
middle_click target modifiers?:held tab_id? | Clicks the middle button at a point or an element.
double_click target modifiers?:held tab_id? | Clicks twice at a point or an element.
triple_click target modifiers?:held tab_id? | Clicks three times at a point or an element.
hover target tab_id? | Moves the cursor to a point or an element.
left_click_drag from:at target:at tab_id? | Drags from one point to another.
left_mouse_down target:at tab_id? | Presses the left button, and holds it.
left_mouse_up target:at tab_id? | Releases the left button.
mouse_move target:at tab_id? | Moves the cursor to a point.
scroll target:at scroll_direction scroll_amount?:some_clicks tab_id? | Scrolls at a point.
type text:string tab_id? | Types a text.
key text:keys repeat?:whole tab_id? | Presses keys, one after another where there are spaces.
hold_key text:keys duration:some_seconds tab_id? | Holds a key down for a time.
wait duration:some_seconds tab_id? | Waits.
javascript_exec text:string tab_id?
    | Evaluates JavaScript in the page, and gives the value of its last expression.
""")

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
    """The members of a toolset that its entry does not switch off; empty for any other tool."""
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
