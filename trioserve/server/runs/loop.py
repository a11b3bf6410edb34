"""Runs: the model answers, what it calls is run, and it answers again, until it is done."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from trioserve.alongside import alongside
from trioserve.chat.deltas import ToolCall
from trioserve.chat.messages import Messages
from trioserve.chat.params import ChatParams, ToolChoice, choose
from trioserve.config import Config
from trioserve.errors import InvalidRequestError, UnsupportedFieldError
from trioserve.server.concurrency import deadline_scope
from trioserve.server.context import RequestContext
from trioserve.server.limits.admission import let_finish
from trioserve.server.model import LoadedModel
from trioserve.server.runs.calls import Calls, assistant_message, tool_message
from trioserve.server.runs.events import EndReason, RunAnswer, RunEnded, StepChunk, StepStarted
from trioserve.server.runs.params import RunParams, RunTools
from trioserve.server.runs.run import AgentRun
from trioserve.server.stream import ChatChunk, ChatStream
from trioserve.types import Finished, FinishReason, GenerationParams, Progress, Timings

if TYPE_CHECKING:
    from trioserve.server.server import Server

#: Characters of a token, generously: what has more of them is cut before it is tokenized.
_MAX_CHARS = 16

#: Tokens that a note takes, about.
_NOTE = 24


async def fit(text: str, n_tokens: int, server: Server) -> str:
    """Cut a text to so many tokens, with a note that says so. It is left as it is if it fits."""
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
    """Replace halves of surrogate pairs, which cannot be tokenized."""
    return text.encode("utf-8", "replace").decode()


@attrs.frozen
class Question:
    """What is asked of the model, and how."""

    messages: Messages
    params: GenerationParams
    chat: ChatParams
    context: RequestContext
    run: RunParams


class AgentLoop:
    """One run.

    Args:
        server: answers.
        question: what is asked.
        tools: what it may call.
        calls: runs what the server runs of it.
        run: what the caller holds.
    """

    def __init__(
        self, server: Server, question: Question, tools: RunTools, calls: Calls, run: AgentRun
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
        """Do all of it, and put the events into the feed, but for the last one.

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
        """Let the model answer. From the first answer on, the run is finished though the server
        drains.
        """
        messages = Messages((*self._asked.messages, *self._added))
        chat, context = self._chat(step), self._context(step)
        answering = self._server.stream_chat(messages, self._asked.params, chat, context=context)
        async with answering as stream:
            self._feed.put(StepStarted(self._feed.new_id(), step))
            if step == 1:
                self._run.began.set()
                let_finish()
            with self._run.watched(stream):
                async for event in stream:
                    await self._tell(step, event)
        assert stream.finished is not None
        self._timings = _sum(self._timings, stream.finished.timings)
        return stream

    async def _tell(self, step: int, event: ChatChunk | Progress | Finished) -> None:
        if not isinstance(event, Finished):
            await self._feed.wait_room()
            self._feed.put(StepChunk(self._feed.new_id(), step, event))

    def _chat(self, step: int) -> ChatParams:
        """How the chat is answered. A call that has to be made is made in the first answer."""
        chat = attrs.evolve(self._asked.chat, tools=self._tools.definitions)
        if step == 1:
            return chat
        choice = choose(chat.tool_choice, chat.tools or ())
        if choice.mode == "required":
            choice = ToolChoice("auto", choice.names)
        return attrs.evolve(chat, tool_choice=choice, add_generation_prompt=True)

    def _context(self, step: int) -> RequestContext:
        """Who asks. Only the first answer has waited since the request came."""
        context = self._asked.context
        return context if step == 1 else attrs.evolve(context, arrived=None)

    # -- what follows from it

    async def _go_on(self, step: int, stream: ChatStream) -> EndReason | None:
        """Run what an answer calls, and say why it was the last one, if it was."""
        message, finished = stream.message, stream.finished
        assert finished is not None
        if finished.reason is FinishReason.LIMIT:  # what it calls may be cut off
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
        """Run those calls of an answer that are the server's, and keep the results.

        The results may take half of what is free in the context, in equal parts.

        Raises:
            DeadlineExceededError: the time of the run is up.
        """
        made = stream.message.tool_calls
        calls = [call for call in made if not self._tools.is_of_client(call.name)]
        if not calls:
            return
        assert stream.finished is not None
        used = len(stream.prompt) + stream.finished.timings.predicted_n
        share = (self._server.model.n_ctx_seq - used) // 2 // len(calls)
        with deadline_scope(self._asked.context.deadline):
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
    """Refuse chats in which no tools can be run.

    Raises:
        InvalidRequestError: the answer is to continue a message, or calls are not taken out of it.
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
async def open_run(server: Server, question: Question, tools: RunTools) -> AsyncIterator[AgentRun]:
    """Have the model answer, and run what it calls, for as long as a block lasts.

    Raises:
        TrioServeError: the model cannot begin its first answer.
    """
    run = AgentRun()
    calls = Calls(run, tools, question.run, question.context, server.resources)
    loop = AgentLoop(server, question, tools, calls, run)
    with server.lifecycle.runs.hold(run):
        async with alongside(partial(_do, loop, run)):
            await run.began.wait()
            run.feed.check_begun()
            yield run


def _alone(error: Exception) -> Exception:
    """Take an exception out of the groups that it is alone in."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        (error,) = error.exceptions
    return error


async def _do(loop: AgentLoop, run: AgentRun) -> None:
    with run.scope:
        try:
            answer = await loop.run()
        except Exception as error:
            run.feed.end(_alone(error))
        else:
            run.feed.put(RunEnded(run.feed.new_id(), answer))
            run.feed.end()
    if not run.feed.is_over:
        run.feed.end(run.error)
    run.began.set()
