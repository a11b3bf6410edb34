"""Models that follow a script and call tools, and tools that tests can look into."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import trio

from tests.support.scripts import answering
from trioserve import Tool, ToolCallContext, ToolInfo, ToolResult
from trioserve.testing import ScriptedBackend


def calls(*pairs: tuple[str, Any]) -> str:
    """The bundled model's text for calls of tools. Arguments that are text stay as they are."""
    return "".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": '
        f"{arguments if isinstance(arguments, str) else json.dumps(arguments)}}}\n</tool_call>\n"
        for name, arguments in pairs
    )


def weather_call(city: str) -> str:
    """The text for a call that asks for the weather of a city."""
    return calls(("weather", {"city": city})).rstrip()


#: Answers in each shape that a message can have, by a prompt for it.
ANSWERS = {
    "text": "Hello you",
    "nothing": "",
    "thinking": "<think>\nLet me see.\n</think>\n\nIt rains.",
    "only thinking": "<think>\nLet me see.",
    "a call": weather_call("Paris"),
    "calls": f"<think>\nTwo.\n</think>\n\nWell.\n{weather_call('Paris')}\n{weather_call('Rome')}",
    "text after a call": f"Well.\n{weather_call('Paris')}\nThere.",
}


def saying(answers: Iterable[str], **settings: Any) -> tuple[ScriptedBackend, list[str]]:
    """A backend that gives one answer after the other, and the list of the prompts it has had."""
    prompts: list[str] = []
    left = iter(answers)

    def script(prompt: str) -> str:
        prompts.append(prompt)
        return next(left)

    return answering(script, **settings), prompts


async def _no_work(arguments: Mapping[str, Any], context: ToolCallContext) -> str:
    await trio.lowlevel.checkpoint()
    return "done"


@attrs.define(eq=False)
class FakeTool(Tool):
    """A tool that notes its calls, and does what a function does."""

    name: str = "work"
    work: Callable[[Mapping[str, Any], ToolCallContext], Any] = _no_work
    writes: bool = False
    diff: str | None = None
    description: str = "Does things."
    #: The arguments and the context of each call, as it begins.
    begun: list[tuple[Mapping[str, Any], ToolCallContext]] = attrs.field(factory=list)
    #: The number that run now.
    n_running: int = 0
    most_running: int = 0

    @property
    def info(self) -> ToolInfo:
        return ToolInfo(name=self.name, description=self.description, writes=self.writes)

    async def call(self, arguments: Mapping[str, Any], context: ToolCallContext) -> ToolResult:
        self.begun.append((arguments, context))
        self.n_running += 1
        self.most_running = max(self.most_running, self.n_running)
        try:
            result = await self.work(arguments, context)
        finally:
            self.n_running -= 1
        return result if isinstance(result, ToolResult) else ToolResult.of_text(result)

    async def preview(self, arguments: Mapping[str, Any], context: ToolCallContext) -> str | None:
        return self.diff


async def forever(arguments: Mapping[str, Any], context: ToolCallContext) -> str:
    """Work that never ends."""
    await trio.sleep_forever()
    raise AssertionError
