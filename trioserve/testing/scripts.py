"""Scripts for `trioserve.testing.ScriptedBackend`: a model that calls tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

#: A call of a tool: its name and arguments.
Call = tuple[str, Mapping[str, Any]]


def write_hermes(calls: Sequence[Call]) -> str:
    """Write calls as the bundled model, Qwen 3 and Hermes do."""
    objects = ({"name": name, "arguments": dict(arguments)} for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{json.dumps(one)}\n</tool_call>" for one in objects)


@attrs.frozen(kw_only=True)
class ToolScript:
    """A script that calls tools in steps, and then answers.

    The number of results in the prompt tells the step, so that several chats may run at the same
    time, and a request may be repeated. A prompt without tools gets `aside`: agents also ask for
    the title of a chat.

    Attributes:
        steps: the calls, one after the other.
        answer: follows the result of the last one.
        aside: the answer to a prompt without tools.
        write: writes calls in the model's format.
        tools_mark: is in prompts with tools, and in no other.
        result_mark: precedes each result in the prompt.
    """

    steps: Sequence[Call]
    answer: str = "All done."
    aside: str = "A chat"
    write: Callable[[Sequence[Call]], str] = write_hermes
    tools_mark: str = "<tools>"
    result_mark: str = "<tool_response>"

    def __call__(self, prompt: str) -> str:
        if self.tools_mark not in prompt:
            return self.aside
        n_results = prompt.count(self.result_mark)
        if n_results >= len(self.steps):
            return self.answer
        return self.write([self.steps[n_results]])
