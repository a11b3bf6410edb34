"""Tools of the Responses API that are no functions: those that coding agents send."""

from __future__ import annotations

from typing import Any

#: The grammar of patches, in Lark, in the shape in which coding agents send it.
PATCHES = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""

APPLY_PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Use the `apply_patch` tool to edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": PATCHES},
}

PATCH = '*** Begin Patch\n*** Update File: a.py\n@@ def f():\n-    "é"\n+    "\\n😀"\n*** End Patch'


def namespace(name: str, *functions: str) -> dict[str, Any]:
    return {
        "type": "namespace",
        "name": name,
        "description": f"Tools of {name}.",
        "tools": [
            {
                "type": "function",
                "name": function,
                "description": "Does it.",
                "strict": False,
                "parameters": {
                    "type": "object",
                    "properties": {"a": {"type": "string"}},
                    "required": ["a"],
                    "additionalProperties": False,
                },
            }
            for function in functions
        ],
    }
