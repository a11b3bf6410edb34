"""The messages that a run adds to a chat."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import attrs
import trio

from trioserve.chat.deltas import Message, ToolCall
from trioserve.concurrency import all_of
from trioserve.errors import TrioServeError
from trioserve.fair_limiter import tool_calls
from trioserve.log import get_logger
from trioserve.server.context import RequestContext
from trioserve.server.generation.requests import ServerResources
from trioserve.server.observers.observer import ToolRecord, observed_tool
from trioserve.server.runs.events import (
    ApprovalGiven,
    ApprovalNeeded,
    RunCall,
    ToolCalled,
    ToolReturned,
    ToolStarted,
)
from trioserve.server.runs.params import RunParams, RunTools
from trioserve.server.runs.run import AgentRun, Decision
from trioserve.tools.tool import Tool, ToolCallContext, ToolInfo, ToolResult

_MAX_QUOTED = 200


def read_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a call. Raises ValueError, with a message for the model.

    Empty text means an empty object.
    """
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        quoted = text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}…"
        raise ValueError(f"The arguments are not JSON: {reason}. They were: {quoted}") from None
    if not isinstance(value, dict):
        raise ValueError("The arguments must be a JSON object.")
    return value


def assistant_message(message: Message, calls: Iterable[ToolCall]) -> dict[str, Any]:
    """Build the message of an answer of the model, with some of its calls, for the next prompt.

    Templates accept only JSON objects as arguments. The result of a call quotes invalid arguments.
    """
    written: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning_content:
        written["reasoning_content"] = message.reasoning_content
    if listed := [_in_openai_form(each) for each in calls]:
        written["tool_calls"] = listed
    return written


def _in_openai_form(call: ToolCall) -> dict[str, Any]:
    try:
        read_arguments(call.arguments)
        arguments = call.arguments or "{}"
    except ValueError:
        arguments = "{}"
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def tool_message(call: ToolCall, content: str) -> dict[str, Any]:
    """Build the message with the result of a call."""
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}


_log = get_logger("trioserve.tools")

#: Tools of a run that run at the same time.
_MAX_PARALLEL = 8

_STOPPED = "A person has stopped this call. What it had done until then may stay."


@attrs.define(eq=False, slots=False)
class Calls:
    """Runs the tool calls of a run, concurrently within a step."""

    _run: AgentRun  # has the event feed and the decisions about calls
    _tools: RunTools  # the available tools
    _params: RunParams  # the limits of the tools
    _context: RequestContext  # the client and the deadline
    _resources: ServerResources  # the server's resources
    _places: trio.CapacityLimiter = attrs.field(
        init=False, factory=lambda: trio.CapacityLimiter(_MAX_PARALLEL)
    )

    async def run(
        self, step: int, calls: Sequence[ToolCall], fit: Callable[[str], Awaitable[str]]
    ) -> list[str]:
        """Run calls, and return the results for the model.

        Args:
            step: the number of the answer with the calls.
            calls: the calls from the model.
            fit: shortens results that are too long for the model.
        """
        known = [self._announce(step, call) for call in calls]
        return await all_of([partial(self._run_one, call, fit) for call in known])

    def _announce(self, step: int, call: ToolCall) -> RunCall:
        tool = self._tools.by_name.get(call.name)
        info = ToolInfo(name=call.name) if tool is None else tool.info
        known = RunCall(call.id, step, info, call.arguments)
        self._run.put(ToolCalled(self._run.new_id(), known))
        return known

    async def _run_one(self, call: RunCall, fit: Callable[[str], Awaitable[str]]) -> str:
        tool = self._tools.by_name.get(call.tool.name)
        name = "" if tool is None else call.tool.name
        record = ToolRecord(name, call.tool.kind, call_id=call.id, context=self._context)
        result = ToolResult.of_error(_STOPPED)
        with observed_tool(self._resources.observers, record):
            with self._run.running(call.id) as scope:
                result = await self._result(call, tool, record)
            if scope.cancelled_caught:
                record.outcome = "stopped"
        content = await fit(result.text)
        self._run.put(
            ToolReturned(
                self._run.new_id(),
                call,
                content,
                is_error=result.is_error,
                diff=result.diff,
                seconds=record.seconds,
                stopped=record.outcome == "stopped",
            )
        )
        return content

    async def _result(self, call: RunCall, tool: Tool | None, record: ToolRecord) -> ToolResult:
        """Run one call if it is valid and allowed."""
        if tool is None:
            record.outcome = "failed"
            return ToolResult.of_error(
                f"There is no tool {call.tool.name!r:.80}. There are: {self._tools.listed()}."
            )
        try:
            arguments = read_arguments(call.arguments)
        except ValueError as error:
            record.outcome = "failed"
            return ToolResult.of_error(str(error))
        output = partial(self._run.put_output, call)
        context = attrs.evolve(self._params.place, on_output=output)
        decision = await self._decide(call, tool, arguments, context)
        if not decision.approved:
            record.outcome = "denied"
            because = f": {decision.reason}" if decision.reason else ""
            return ToolResult.of_error(f"This call was not allowed{because}.")
        # Commands and files take what other clients need. What else tools wait for is not here.
        shares = call.tool.kind == "server"
        async with self._places, tool_calls().place() if shares else nullcontext():
            self._run.put(ToolStarted(self._run.new_id(), call))
            with record.timed():
                result = await _call(tool, arguments, context)
        record.outcome = "failed" if result.is_error else "finished"
        return result

    async def _decide(
        self, call: RunCall, tool: Tool, arguments: Mapping[str, Any], context: ToolCallContext
    ) -> Decision:
        """Decide whether a call may run; wait for approval if needed."""
        approve = self._params.approve
        if not call.tool.writes or approve == "all":
            return Decision(True)
        if approve == "none":
            return Decision(False, "it may change something, and such calls are off")
        if approve != "ask":
            return Decision(await approve(call))
        preview = await _preview(tool, arguments, context)
        self._run.put(ApprovalNeeded(self._run.new_id(), call, preview))
        timeout = self._resources.config.tool_approval_timeout
        decision = await self._run.decision(call.id, timeout)
        self._run.put(ApprovalGiven(self._run.new_id(), call, decision.approved, decision.reason))
        return decision


async def _call(tool: Tool, arguments: Mapping[str, Any], context: ToolCallContext) -> ToolResult:
    """Call a tool. Exceptions become error results for the model."""
    try:
        return await tool.call(arguments, context)
    except TrioServeError as error:
        return ToolResult.of_error(error.message)
    except Exception as error:
        _log.warning("a tool has failed", tool=tool.info.name, exc_info=error)
        return ToolResult.of_error(f"The tool has failed with {type(error).__name__}: {error}")


async def _preview(
    tool: Tool, arguments: Mapping[str, Any], context: ToolCallContext
) -> str | None:
    try:
        return await tool.preview(arguments, context)
    except Exception as error:  # ask for approval without a preview
        _log.warning("a tool has no preview", tool=tool.info.name, exc_info=error)
        return None
