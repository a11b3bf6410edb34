"""What the reader of a run gets: events, each with a number, and the answer at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import attrs

from trioserve.chat.deltas import Message, ToolCall
from trioserve.server.stream import ChatChunk
from trioserve.tools.tool import ToolInfo
from trioserve.types import Finished, Progress, Prompt, Timings

#: Why a run has ended: the model has answered; it has given as many answers as it may, and called
#: tools in the last one, too; it has called tools that are the caller's; its answer was cut off.
EndReason: TypeAlias = Literal["answer", "max_steps", "client_tools", "length"]


@attrs.frozen
class RunCall:
    """A call of a tool that the server runs."""

    id: str
    #: The answer that it is in; the first one is 1.
    step: int
    #: What is called. If there is no such tool, only its name is known.
    tool: ToolInfo
    #: As the model has written them: JSON text, or what was to be it.
    arguments: str


@attrs.frozen
class StepStarted:
    """The model is about to give an answer. `step` counts them from 1."""

    id: int
    step: int


@attrs.frozen
class StepChunk:
    """More of the answer, or of the prompt where `return_progress` is set.

    The deltas of its calls are among it, also of those that the server runs.
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

    `preview` is a diff of what it would change, where that is known.
    """

    id: int
    call: RunCall
    preview: str | None


@attrs.frozen
class ApprovalGiven:
    """The call has been approved, or has not. `reason` says why, if somebody did."""

    id: int
    call: RunCall
    approved: bool
    reason: str


@attrs.frozen
class ToolStarted:
    """The tool runs."""

    id: int
    call: RunCall


@attrs.frozen
class ToolOutput:
    """What the tool has written since the last such event."""

    id: int
    call: RunCall
    text: str


@attrs.frozen
class ToolReturned:
    """The call has ended."""

    id: int
    call: RunCall
    #: What the model is told.
    content: str
    is_error: bool
    #: What has changed, for people.
    diff: str | None
    #: For how long the tool ran.
    seconds: float
    #: Whether `AgentRun.stop` has ended it.
    stopped: bool


@attrs.frozen(kw_only=True)
class RunAnswer:
    """A whole run."""

    #: The last answer. Of its calls it has those that the caller is to do, and no others.
    message: Message
    #: What the run has added to the chat, in OpenAI's form: the answers, and the results of calls.
    messages: tuple[Mapping[str, Any], ...]
    #: How many answers the model has given.
    steps: int
    reason: EndReason
    #: Of the last answer.
    prompt: Prompt
    finished: Finished
    #: Of all answers, added up.
    timings: Timings

    @property
    def client_calls(self) -> tuple[ToolCall, ...]:
        """The calls that the caller is to do."""
        return self.message.tool_calls


@attrs.frozen
class RunEnded:
    """The last event."""

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
