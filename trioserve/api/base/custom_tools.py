"""Custom tools, which take one text: the model sees functions with one argument."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from trioserve.api.base.cut_json import read_arguments
from trioserve.api.base.fields import mapping, optional, required, text
from trioserve.api.base.grammars import SYNTAX
from trioserve.chat.grammar.regular import GrammarError, pattern_of
from trioserve.chat.messages import INPUT_ARGUMENT
from trioserve.chat.parse.cursor import SURROGATE
from trioserve.errors import InvalidRequestError
from trioserve.left_out import leave_out

#: Characters of all grammars of a request's custom tools that are enforced.
_MAX_GRAMMARS = 2**16


class CustomTools:
    """Makes functions of the custom tools of a request."""

    def __init__(self) -> None:
        self._n_grammar_chars = 0

    def in_chat(self, tools: Any) -> Any:
        """Replace the custom tools in a list of a chat, and leave all else to the chat."""
        if not isinstance(tools, list):
            return tools
        functions = []
        for i, tool in enumerate(tools):
            if isinstance(tool, dict) and tool.get("type") == "custom":
                custom = required(tool, "custom", mapping, f"tools[{i}]")
                function = self.function(custom, f"tools[{i}].custom")
                tool = {"type": "function", "function": {"name": custom["name"], **function}}
            functions.append(tool)
        return functions

    def function(self, tool: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Make the function of a tool, whose text may have to follow a grammar.

        Raises:
            InvalidRequestError: something is missing or of the wrong type; `param` names it.
        """
        name = required(tool, "name", text, path)
        given = optional(tool, "format", mapping, path) or {}
        description = optional(tool, "description", text, path) or ""
        argument: dict[str, Any] = {"type": "string"}
        if given.get("type", "text") != "text":
            syntax, definition = _grammar(given, f"{path}.format")
            description += f"\n\nThe input follows this grammar ({syntax}):\n{definition}"
            try:
                self._n_grammar_chars += len(definition)
                if self._n_grammar_chars > _MAX_GRAMMARS:
                    raise GrammarError(
                        f"and those before it have more than {_MAX_GRAMMARS} characters"
                    )
                argument["pattern"] = pattern_of(syntax, definition)
            except GrammarError as error:
                leave_out(f"the grammar of the custom tool {name}", f"it {error}")
        return {
            "description": description.strip(),
            "parameters": {
                "type": "object",
                "properties": {INPUT_ARGUMENT: argument},
                "required": [INPUT_ARGUMENT],
                "additionalProperties": False,
            },
        }


def _grammar(format: Mapping[str, Any], path: str) -> tuple[str, str]:
    """Read a grammar and its syntax, which a chat has in an object."""
    if format["type"] != "grammar":
        raise InvalidRequestError.at(f"{path}.type", 'must be "text" or "grammar".')
    if format.get("grammar") is not None:
        format, path = required(format, "grammar", mapping, path), f"{path}.grammar"
    return required(format, "syntax", SYNTAX, path), required(format, "definition", text, path)


def input_of(arguments: str) -> str:
    """Take the text out of complete arguments."""
    argument = TextArgument()
    return argument.feed(arguments) + argument.rest()


class TextArgument:
    """Takes a text out of arguments that are an object with it alone, while they are written."""

    def __init__(self) -> None:
        self._begun = self._ended = False
        self._left = ""  # what is not taken yet

    def feed(self, arguments: str) -> str:
        """Take more of the arguments; gives more of the text."""
        self._left += arguments
        if not self._begun and (before := _BEFORE.match(self._left)):
            self._begun = True
            self._left = self._left[before.end() :]
        if not self._begun or self._ended:
            return ""
        whole = _WHOLE.match(self._left)
        assert whole is not None
        text, self._left = whole[0], self._left[whole.end() :]
        self._ended = self._left.startswith('"')
        return _unescaped(text)

    def rest(self) -> str:
        """End the arguments, and give the rest of the text: all of them, if they have none."""
        if self._begun:
            return "" if self._ended else _unescaped(_ESCAPES.sub("", self._left))
        arguments = read_arguments(self._left)
        values = [*arguments.values()] if isinstance(arguments, dict) else []
        return values[0] if len(values) == 1 and isinstance(values[0], str) else self._left


_BEFORE = re.compile(rf'\s*\{{\s*"{INPUT_ARGUMENT}"\s*:\s*"')
#: Characters of a JSON string: not half of an escape, and not the first half of a pair of them.
_WHOLE = re.compile(
    r"""(?:[^"\\]++
    |\\["\\/bfnrt]
    |\\u(?![dD][89abAB])[0-9a-fA-F]{4}
    |\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=[^\\]|\\[^u]))
    )*""",
    re.VERBOSE,
)
#: An escape that was cut off.
_ESCAPES = re.compile(r"\\u?[0-9a-fA-F]{0,4}")


def _unescaped(text: str) -> str:
    """Read the characters of a JSON string. Half of a surrogate pair cannot be sent on."""
    if "\\" not in text:
        return text
    return SURROGATE.sub("\ufffd", json.loads(f'"{text}"', strict=False))
