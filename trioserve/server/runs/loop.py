"""The agent loop: the model answers, the server runs its calls, until an answer has no calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from trioserve.chat.deltas import ToolCall
from trioserve.chat.messages import Messages
from trioserve.chat.params import ChatParams, ToolChoice, choose
from trioserve.concurrency import Gate, alongside
from trioserve.config import Config
from trioserve.errors import InvalidRequestError, UnsupportedFieldError, raised_alone
from trioserve.server.context import RequestContext
from trioserve.server.model import LoadedModel
from trioserve.server.runs.calls import Calls, assistant_message, tool_message
from trioserve.server.runs.events import EndReason, RunAnswer, RunEnded, StepChunk, StepStarted
from trioserve.server.runs.params import RunParams, RunTools
from trioserve.server.runs.run import AgentRun
from trioserve.server.stream import ChatStream
from trioserve.types import FinishReason, GenerationParams, Timings

if TYPE_CHECKING:
    from trioserve.server.core import ServerCore

#: A high estimate of the characters in a token. Longer text is cut before it is tokenized.
_MAX_CHARS = 16

#: Approximate tokens of the note.
_NOTE = 24


async def fit(text: str, n_tokens: int, server: ServerCore) -> str:
    """Cut a text to a number of tokens and append a note, or return it unchanged if it fits."""
    head = _as_unicode(text[: max(0, n_tokens) * _MAX_CHARS])
    if 4 * len(text) <= n_tokens:  # a token has at least a byte
        return head
    ids = await server.tokenize(head, add_special=False, parse_special=False)
    if len(ids) <= n_tokens and len(head) == len(text):
        return head
    n_chars = len(server.detokenize(ids[: max(0, n_tokens - _NOTE)]))
    note = f"[cut here: all {len(text)} characters are too long for the context]"
    return f"{head[:n_chars]}\n{note}"


def _as_unicode(text: str) -> str:
    """Replace unpaired surrogates, which cannot be tokenized."""
    return text.encode("utf-8", "replace").decode()


@attrs.frozen
class Question:
    """The messages and parameters of a run."""

    messages: Messages
    params: GenerationParams
    chat: ChatParams
    context: RequestContext
    run: RunParams


class AgentLoop:
    """The loop of one run: generate, call tools, repeat.

    Args:
        server: generates the answers.
        question: the messages and parameters.
        tools: the tools that the model may call.
        calls: runs the server's tools.
        run: the caller's object.
    """

    def __init__(
        self, server: ServerCore, question: Question, tools: RunTools, calls: Calls, run: AgentRun
    ) -> None:
        self._server = server
        self._asked = question
        self._max_steps = question.run.max_steps or server.config.tool_max_steps
        self._tools = tools
        self._calls = calls
        self._run = run
        self._feed = run.feed
        self._added: list[dict[str, Any]] = []
        self._timings = Timings()

    async def run(self) -> RunAnswer:
        """Execute the run, and put all events except the last one into the feed.

        Raises:
            TrioServeError: the model cannot answer.
        """
        reason: EndReason | None = None
        step = 0
        while reason is None:
            step += 1
            stream = await self._answer(step)
            reason = await self._go_on(step, stream)
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
        """Open the stream of an answer. After the first answer, the run continues while the
        server drains.
        """
        messages = Messages((*self._asked.messages, *self._added))
        chat, context = self._chat(step), self._context(step)
        answering = self._server.stream_chats(messages, self._asked.params, chat, context=context)
        async with answering as (stream,):
            self._feed.put(StepStarted(self._feed.new_id(), step))
            with self._run.watched(stream):
                async for event in stream:
                    await self._feed.room()
                    self._feed.put(StepChunk(self._feed.new_id(), step, event))
        assert stream.finished is not None
        self._timings = _sum(self._timings, stream.finished.timings)
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

    def _context(self, step: int) -> RequestContext:
        """The context of an answer. Only the first one has waited since the request arrived."""
        context = self._asked.context
        return context if step == 1 else attrs.evolve(context, arrived=None, has_begun=True)

    # -- what follows from it

    async def _go_on(self, step: int, stream: ChatStream) -> EndReason | None:
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
        return "max_steps" if step == self._max_steps else None

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
            results = await self._calls.run(step, calls, partial(self._fit, share))
            written = zip(calls, results, strict=True)
            self._added += [tool_message(call, content) for call, content in written]

    async def _fit(self, n_tokens: int, text: str) -> str:
        async with self._server.awake(self._asked.context):
            return await fit(text, n_tokens, self._server)


def _sum(one: Timings, other: Timings) -> Timings:
    names = attrs.fields_dict(Timings)
    return Timings(**{name: getattr(one, name) + getattr(other, name) for name in names})


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
        raise InvalidRequestError(
            "'parse_tools' cannot be false where the server runs tools.", param="parse_tools"
        )
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
    server: ServerCore, question: Question, tools: RunTools
) -> AsyncIterator[AgentRun]:
    """Execute a run during a block.

    Raises:
        TrioServeError: the model cannot begin its first answer.
    """
    run = AgentRun()
    calls = Calls(run, tools, question.run, question.context, server.resources)
    loop = AgentLoop(server, question, tools, calls, run)
    gate = server.lifecycle.gate
    with gate.open(run.cancel, has_begun=True):  # `stream_run` has checked that
        async with alongside(partial(_do, loop, run, gate)):
            await run.feed.wait()
            run.feed.check()
            yield run


async def _do(loop: AgentLoop, run: AgentRun, gate: Gate) -> None:
    with gate.inside(), run.scope:
        try:
            answer = await loop.run()
            run.feed.put(RunEnded(run.feed.new_id(), answer))
        except Exception as error:
            run.feed.end(raised_alone(error))
        finally:
            run.feed.end()
