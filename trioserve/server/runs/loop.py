"""The agent loop: the model answers, the server runs its calls, until an answer has no calls."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any

import attrs
import trio

from trioserve.chat.deltas import Message, ToolCall
from trioserve.chat.messages import Messages, parse_messages
from trioserve.chat.params import ChatParams, ToolChoice, choose
from trioserve.concurrency import all_of, alongside
from trioserve.config import Config
from trioserve.errors import (
    InvalidRequestError,
    ServerClosingError,
    TrioServeError,
    UnsupportedFieldError,
    raised_alone,
)
from trioserve.fair_limiter import offload, tool_calls, working_for
from trioserve.log import get_logger
from trioserve.server.context import RequestContext
from trioserve.server.limits.memory import MemoryReservation
from trioserve.server.model import LoadedModel
from trioserve.server.observers.observer import ToolRecord, observed_tool
from trioserve.server.runs.events import (
    ApprovalGiven,
    ApprovalNeeded,
    EndReason,
    RunAnswer,
    RunCall,
    RunEnded,
    StepChunk,
    StepStarted,
    ToolCalled,
    ToolReturned,
    ToolStarted,
)
from trioserve.server.runs.params import AnyTool, RunParams, RunTools, tools_of
from trioserve.server.runs.run import AgentRun, Decision
from trioserve.server.stream import ChatStream
from trioserve.server.text_server import TextServer
from trioserve.tools.tool import Tool, ToolCallContext, ToolInfo, ToolResult
from trioserve.types import FinishReason, GenerationParams, Timings

_log = get_logger("trioserve.tools")

#: A high estimate of the characters in a token. Longer text is cut before it is tokenized.
_MAX_CHARS = 16

#: Tools of a run that run at the same time.
_MAX_PARALLEL = 8

_STOPPED = "A person has stopped this call. What it had done until then may stay."

#: Approximate tokens of the note.
_NOTE = 24


def read_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a call. Raises ValueError, with a message for the model.

    Empty text means an empty object. The message repeats nothing of the text: what it has counts as
    seen by the model.
    """
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"The arguments are not JSON: {reason}.") from None
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


async def call_tool(
    tool: Tool, arguments: Mapping[str, Any], context: ToolCallContext
) -> ToolResult:
    """Call a tool. Exceptions become error results for the model."""
    try:
        return await tool.call(arguments, context)
    except TrioServeError as error:
        return ToolResult.of_error(error.message)
    except Exception as error:
        _log.warning("a tool has failed", tool=tool.info.name, exc_info=error)
        return ToolResult.of_error(f"The tool has failed with {type(error).__name__}: {error}")


async def preview_of(
    tool: Tool, arguments: Mapping[str, Any], context: ToolCallContext
) -> str | None:
    """Say what a call would change, if the tool can; None: it cannot."""
    try:
        return await tool.preview(arguments, context)
    except Exception as error:  # ask for approval without a preview
        _log.warning("a tool has no preview", tool=tool.info.name, exc_info=error)
        return None


async def fit(text: str, n_tokens: int, server: TextServer) -> str:
    """Cut a text to a number of tokens and append a note, or return it unchanged if it fits."""
    head = text[: max(0, n_tokens) * _MAX_CHARS]
    head = head.encode("utf-8", "replace").decode()  # half of a pair cannot be tokenized
    if 4 * len(text) <= n_tokens:  # a token has at least a byte
        return head
    ids = await server.tokenize(head, add_special=False, parse_special=False)
    if len(ids) <= n_tokens and len(head) == len(text):
        return head
    n_chars = len(await server.detokenize(ids[: max(0, n_tokens - _NOTE)]))
    note = f"[cut here: all {len(text)} characters are too long for the context]"
    return f"{head[:n_chars]}\n{note}"


def inert(text: str, names: Iterable[str]) -> str:
    """Break up the names of control tokens in a text, which the model would take for the tokens."""
    for name in names:
        if len(name) > 1 and name in text:
            text = text.replace(name, f"{name[0]}\u200b{name[1:]}")
    return text


def _stands_in(text: str, content: str) -> bool:
    """True if a text occurs in another, and not as the end of a longer name."""
    at = content.find(text)
    while at > 0 and (content[at - 1].isalnum() or content[at - 1] in ".-_"):
        at = content.find(text, at + 1)
    return at >= 0


def _words(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or () if "text" in part)


@attrs.frozen
class Asked:
    """The parameters of a run and of its answers."""

    params: GenerationParams
    chat: ChatParams
    context: RequestContext
    run: RunParams


@attrs.define(eq=False, slots=False)
class AgentLoop:
    """The loop of one run: generate, call tools, repeat."""

    _server: TextServer  # generates the answers
    _messages: Messages  # the chat
    _asked: Asked
    _tools: RunTools  # that the model may call
    _run: AgentRun  # the caller's object
    _hold: MemoryReservation  # of the run
    _added: list[dict[str, Any]] = attrs.field(init=False, factory=list)
    _timings: Timings = attrs.field(init=False, factory=Timings)
    _places: trio.CapacityLimiter = attrs.field(
        init=False, factory=lambda: trio.CapacityLimiter(_MAX_PARALLEL)
    )

    async def execute(self) -> None:
        """Execute the run, and put its events into the feed, which ends with it."""
        with self._server.gate.inside(), self._run.scope:
            try:
                answer = await self._answered()
                self._run.put(RunEnded(self._run.new_id(), answer))
            except Exception as error:
                self._run.end(raised_alone(error))
            finally:
                self._run.end()

    async def _answered(self) -> RunAnswer:
        reason: EndReason | None = None
        step = 0
        while reason is None:
            step += 1
            with self._server.gate.inside(has_begun=step > 1):
                stream = await self._answer(step)
            reason = await self._after_answer(step, stream)
        assert stream.finished is not None
        calls = self._of_client(stream.message.tool_calls) if reason == "client_tools" else []
        return RunAnswer(
            message=attrs.evolve(stream.message, tool_calls=tuple(calls)),
            messages=tuple(self._added),
            steps=step,
            reason=reason,
            prompt=stream.prompt,
            finished=stream.finished,
            timings=self._timings,
        )

    # -- one step

    async def _answer(self, step: int) -> ChatStream:
        """Generate an answer, and put its events into the feed."""
        messages = Messages((*self._messages, *self._added))
        chat, context = self._chat(step), self._asked.context
        if step > 1:
            context = attrs.evolve(context, arrived=None)  # only the first one has waited since
        answering = self._server.stream_chats(messages, self._asked.params, chat, context=context)
        async with answering as (stream,):
            self._run.put(StepStarted(self._run.new_id(), step))
            with self._run.watched(stream):
                async for event in stream:
                    await self._run.room()
                    self._run.put(StepChunk(self._run.new_id(), step, event))
        assert stream.finished is not None
        self._timings = self._timings.plus(stream.finished.timings)
        return stream

    def _chat(self, step: int) -> ChatParams:
        """The chat's parameters. A required call applies to the first answer only."""
        chat = attrs.evolve(self._asked.chat, tools=self._tools.definitions)
        if step == 1:
            return chat
        choice = choose(chat.tool_choice, chat.tools or ())
        if choice.mode == "required":
            choice = ToolChoice("auto", choice.names)
        return attrs.evolve(chat, tool_choice=choice, add_generation_prompt=True)

    # -- what follows from it

    async def _after_answer(self, step: int, stream: ChatStream) -> EndReason | None:
        """Run the calls of an answer. Returns the reason to end, or None to continue."""
        message, finished = stream.message, stream.finished
        assert finished is not None
        if finished.reason is FinishReason.LIMIT:  # its calls may be incomplete
            self._added.append(assistant_message(message, ()))
            return "length"
        self._added.append(assistant_message(message, message.tool_calls))
        if not message.tool_calls:
            return "answer"
        await self._run_calls(step, stream)
        if self._of_client(message.tool_calls):
            return "client_tools"
        most = self._asked.run.max_steps or self._server.config.tool_max_steps
        return "max_steps" if step == most else None

    def _of_client(self, calls: Iterable[ToolCall]) -> list[ToolCall]:
        return [call for call in calls if self._tools.is_of_client(call.name)]

    async def _run_calls(self, step: int, stream: ChatStream) -> None:
        """Run an answer's calls of server tools, and keep the results.

        The results share half of the free context, in equal parts.

        Raises:
            DeadlineExceededError: the deadline of the run has passed.
        """
        made = stream.message.tool_calls
        calls = [call for call in made if not self._tools.is_of_client(call.name)]
        if not calls:
            return
        assert stream.finished is not None
        used = len(stream.prompt) + stream.finished.timings.predicted_n
        share = (self._server.model.n_ctx_seq - used) // 2 // len(calls)
        with self._asked.context.preparing():
            known = [self._announce(step, call) for call in calls]
            results = await all_of([partial(self._run_call, call, share) for call in known])
            written = zip(calls, results, strict=True)
            self._added += [tool_message(call, content) for call, content in written]

    def _announce(self, step: int, call: ToolCall) -> RunCall:
        tool = self._tools.by_name.get(call.name)
        info = ToolInfo(name=call.name) if tool is None else tool.info
        known = RunCall(call.id, step, info, call.arguments)
        self._run.put(ToolCalled(self._run.new_id(), known))
        return known

    async def _run_call(self, call: RunCall, n_tokens: int) -> str:
        """Run a call, and return its result, cut to a number of tokens for the model."""
        tool = self._tools.by_name.get(call.tool.name)
        name = "" if tool is None else call.tool.name
        record = ToolRecord(name, call.tool.kind, call_id=call.id, context=self._asked.context)
        result = ToolResult.of_error(_STOPPED)
        with observed_tool(self._server.observers, record):
            with self._run.running(call.id) as scope:
                result = await self._result(call, tool, record)
            if scope.cancelled_caught:
                record.outcome = "stopped"
        async with self._server.loaded(self._asked.context):
            text = result.text
            if call.tool.untrusted:
                names = self._server.model.control_names
                text = await offload(partial(inert, text, names), len(text) * len(names) // 64)
            content = await fit(text, n_tokens, self._server)
        self._run.put(
            ToolReturned(
                self._run.new_id(),
                call,
                content,
                is_error=result.is_error,
                diff=result.diff,
                seconds=record.seconds,
                stopped=record.outcome == "stopped",
                answer=result.answer,
            )
        )
        return content

    async def _generate(
        self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]
    ) -> tuple[str, str]:
        """Have the model answer messages of a tool, at low priority."""
        priority = min(-1, self._asked.params.priority)
        context = attrs.evolve(self._asked.context, arrived=None)
        params = await self._server.params({**fields, "priority": priority}, context=context)
        with working_for(context.client):
            asked = self._server.stream_chats(
                parse_messages(messages), params, ChatParams(), context=context
            )
            async with asked as (stream,):
                answer = await stream.read()
        return answer.message.content, self._server.model.info.name

    def _has_seen(self, text: str) -> bool:
        """True if a text occurs in a message of the user, the system or a tool."""
        said = (one for one in (*self._messages, *self._added) if one["role"] != "assistant")
        return any(_stands_in(text, _words(one.get("content"))) for one in said)

    async def _result(self, call: RunCall, tool: Tool | None, record: ToolRecord) -> ToolResult:
        """Run one call if it is valid and allowed."""
        if tool is None:
            record.outcome = "failed"
            # Without the name: a result has no words of the model, as `_has_seen` relies on it.
            return ToolResult.of_error(f"There is no such tool. There are: {self._tools.listed()}.")
        try:
            arguments = read_arguments(call.arguments)
        except ValueError as error:
            record.outcome = "failed"
            return ToolResult.of_error(str(error))
        output = partial(self._run.put_output, call)
        context = attrs.evolve(
            self._asked.run.place,
            on_output=output,
            count=self._hold.change,
            has_seen=self._has_seen,
            ask=partial(self._ask, call) if self._asked.run.approve == "ask" else None,
            generate=self._generate,
            approves_all=self._asked.run.approve == "all",
        )
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
                result = await call_tool(tool, arguments, context)
        record.outcome = "failed" if result.is_error else "finished"
        return result

    async def _decide(
        self, call: RunCall, tool: Tool, arguments: Mapping[str, Any], context: ToolCallContext
    ) -> Decision:
        """Decide whether a call may run; wait for approval if needed."""
        approve = self._asked.run.approve
        if not call.tool.writes or approve == "all":
            return Decision(True)
        if approve == "none":
            return Decision(False, "it may change something, and such calls are off")
        if approve != "ask":
            return Decision(await approve(call))
        return await self._asked_person(call, await preview_of(tool, arguments, context))

    async def _ask(self, call: RunCall, question: str) -> str | None:
        """Put a question of a tool to the person. Returns the words of a yes; None: no."""
        decision = await self._asked_person(call, question)
        return decision.reason if decision.approved else None

    async def _asked_person(self, call: RunCall, preview: str | None) -> Decision:
        self._run.put(ApprovalNeeded(self._run.new_id(), call, preview))
        timeout = self._server.config.tool_approval_timeout
        decision = await self._run.decision(call.id, timeout)
        self._run.put(ApprovalGiven(self._run.new_id(), call, decision.approved, decision.reason))
        return decision


def check_chat(chat: ChatParams, config: Config, model: LoadedModel) -> None:
    """Check that a chat allows tools to run.

    Raises:
        InvalidRequestError: the answer continues a message, or calls are not parsed.
        UnsupportedFieldError: the server shows no tools to the model.
    """
    if chat.continue_final_message is not None:
        raise InvalidRequestError(
            "A message of the assistant cannot be continued where the server runs tools.",
            param="continue_final_message",
        )
    if not chat.parse_tools:
        raise InvalidRequestError.at("parse_tools", "cannot be false where the server runs tools.")
    if config.skip_chat_parsing:
        raise UnsupportedFieldError(
            "Tools cannot be run: this server runs with --skip-chat-parsing.", param="tools"
        )
    if not model.template.takes_tools:
        raise UnsupportedFieldError(
            "Tools need templates in Jinja, and this server runs with --no-jinja.", param="tools"
        )


@asynccontextmanager
async def open_run(
    server: TextServer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[AnyTool] | None,
    asked: Asked,
) -> AsyncIterator[AgentRun]:
    """Execute a run during a block. See `Server.stream_run`."""
    check_chat(asked.chat, server.config, server.model)
    available = tools_of(tools, server.tools, server.model.n_ctx_seq)
    chosen = RunTools.of(available, asked.chat.tools or ())
    server.tools.check(asked.run.place)
    context, run, loading = asked.context, AgentRun(), trio.CancelScope()

    def end(error: TrioServeError) -> None:
        loading.cancel()
        run.cancel(error)

    with server.memory.hold(context.client) as hold, server.gate.open(end):
        with context.preparing(), loading:
            loaded = await server.read_media(messages, hold, context)
        if loading.cancelled_caught:
            raise ServerClosingError
        loop = AgentLoop(server, loaded, asked, chosen, run, hold)
        async with alongside(loop.execute):
            await run.wait()
            run.check()
            yield run
