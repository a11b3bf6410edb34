"""The events of a run, each with a number, and the final answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import attrs

from trioserve.chat.deltas import Message, ToolCall
from trioserve.server.stream import ChatChunk
from trioserve.tools.tool import ToolInfo
from trioserve.types import Finished, Progress, Prompt, Timings

#: Why a run has ended: the model has answered; `max_steps` was reached, and the calls of the last
#: answer have run; the model has called tools of the caller; the answer was cut off.
EndReason: TypeAlias = Literal["answer", "max_steps", "client_tools", "length"]


@attrs.frozen
class RunCall:
    """A call of a tool that the server runs."""

    id: str
    #: The number of the answer with the call; the first one is 1.
    step: int
    #: The tool. If it does not exist, only its name is set.
    tool: ToolInfo
    #: The model's text, which may be invalid JSON.
    arguments: str


@attrs.frozen
class StepStarted:
    """The model starts an answer. `step` counts from 1."""

    id: int
    step: int


@attrs.frozen
class StepChunk:
    """Part of the answer, or of prompt processing if `return_progress` is set.

    Includes the deltas of all calls, also of those that the server runs.
    """

    id: int
    step: int
    chunk: ChatChunk | Progress


@attrs.frozen
class ToolCalled:
    """The model has called a tool that the server runs."""

    id: int
    call: RunCall


@attrs.frozen
class ApprovalNeeded:
    """The call waits for `AgentRun.approve` or `AgentRun.deny`.

    `preview` is a diff of the change, if known.
    """

    id: int
    call: RunCall
    preview: str | None


@attrs.frozen
class ApprovalGiven:
    """The call was approved or refused. `reason` is the text given with the decision."""

    id: int
    call: RunCall
    approved: bool
    reason: str


@attrs.frozen
class ToolStarted:
    """A tool has started."""

    id: int
    call: RunCall


@attrs.frozen
class ToolOutput:
    """Output of the tool since the last such event."""

    id: int
    call: RunCall
    text: str


@attrs.frozen
class ToolReturned:
    """A call of a tool has ended."""

    id: int
    call: RunCall
    #: The result for the model.
    content: str
    is_error: bool
    #: The change, for users.
    diff: str | None
    #: The time that the tool ran.
    seconds: float
    #: True if `AgentRun.stop` ended it.
    stopped: bool
    #: The whole result, as `ToolResult` has it.
    answer: Mapping[str, Any]


@attrs.frozen(kw_only=True)
class RunAnswer:
    """The result of a run."""

    #: The last answer. Its calls are those that the caller must run.
    message: Message
    #: The messages that the run added to the chat, in OpenAI's form: answers and tool results.
    messages: tuple[Mapping[str, Any], ...]
    #: The number of answers.
    steps: int
    reason: EndReason
    #: Of the last answer.
    prompt: Prompt
    finished: Finished
    #: Of all answers, added up.
    timings: Timings

    @property
    def counted(self) -> Timings:
        """The timings, with the numbers of tokens in the prompt of the last answer."""
        last = self.finished.timings
        return attrs.evolve(self.timings, cache_n=last.cache_n, prompt_n=last.prompt_n)

    @property
    def client_calls(self) -> tuple[ToolCall, ...]:
        """The calls that the caller must run."""
        return self.message.tool_calls


@attrs.frozen
class RunEnded:
    """The run has ended. No event follows."""

    id: int
    answer: RunAnswer


RunEvent: TypeAlias = (
    StepStarted
    | StepChunk
    | ToolCalled
    | ApprovalNeeded
    | ApprovalGiven
    | ToolStarted
    | ToolOutput
    | ToolReturned
    | RunEnded
)
