"""Compaction: the model writes a summary, which takes the place of a conversation.

`stream_compacted` is what APIs have: the events of an answer whose conversation is compacted first.
A summary is a request like others, of low priority, for the same client and until the same
deadline: leaving the block cancels it. Its prompt is the conversation and a task, so that most of
it is in the cache. Where that does not fit, the conversation is read as text, part by part, each
with the summary of those before it: nothing is left out.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TypeAlias

import attrs

from trioserve.chat.compaction import (
    TASK,
    Compaction,
    groups_of,
    n_rules,
    open_calls,
    transcript,
    without,
)
from trioserve.chat.messages import Message, Messages
from trioserve.chat.params import ChatParams, ToolChoice
from trioserve.concurrency import Feed, alongside
from trioserve.errors import (
    ContextLengthExceededError,
    NoSummaryError,
    NothingToSummarizeError,
    raised_alone,
)
from trioserve.server.context import RequestContext
from trioserve.server.dispatch import Mailbox
from trioserve.server.stream import ChatChunk, ChatStream
from trioserve.server.text_server import TextServer
from trioserve.types import Finished, GenerationParams, Progress, Timings, TokenId

#: The most tokens of a summary; also an eighth of the context.
_MAX_SUMMARY = 4096
_SHARE = 8

#: The part of them that there must be room for after the whole conversation.
_LEAST = 4

#: The most parts in which a conversation is read that does not fit into the context.
_MAX_PARTS = 64

#: Tokens for the chat template around the task of a part.
_AROUND_TASK = 64

_TASK_OF_PART = """\
This is part {n} of {n_parts} of the text of a conversation:

<part>
{part}
</part>

{so_far}{task}"""

_SO_FAR = """\
The summary of the parts before it:

<summary>
{summary}
</summary>

Write a summary that covers both. """


@attrs.frozen(kw_only=True)
class CompactionPlan:
    """The settings of a compaction."""

    task: str = TASK  # what asks the model for the summary
    spares_users: bool = False  # see `Compaction`
    limit: int  # the most tokens of the prompt afterwards
    answers: bool = True  # whether the model then answers
    may_fail: bool = False  # continue without a summary if the model fails to write one
    #: True if the oldest messages are dropped if the prompt is still too long.
    truncates: bool = False


@attrs.frozen
class Compacting:
    """A summary is being written."""


@attrs.frozen(kw_only=True)
class Compacted:
    """A conversation was compacted."""

    compaction: Compaction | None  # what stands in its place; None: the model wrote no summary
    timings: Timings  # of the summary
    n_prompt: int  # the tokens of the prompt of what follows; if nothing does, of the summary
    is_all: bool = False  # whether nothing does


CompactedEvent: TypeAlias = Compacting | Compacted | Progress | ChatChunk | Finished


def limit_of(server: TextServer, params: GenerationParams, threshold: int | None = None) -> int:
    """The most tokens of a prompt: a threshold, or those that leave room for an answer."""
    n_ctx = server.model.n_ctx_seq
    room = n_ctx // 4 if params.max_tokens < 0 else min(params.max_tokens, n_ctx // 4)
    return n_ctx - room if threshold is None else min(threshold, n_ctx - room)


async def length_of(server: TextServer, messages: Sequence[Message], chat: ChatParams) -> float:
    """The tokens of a chat's prompt; infinite: more than the context has."""
    try:
        return len(await server.chat_prompt(Messages(messages), chat))
    except ContextLengthExceededError:
        return math.inf


# -- the summary


@attrs.define(eq=False)
class _Compactor:
    """Compacts one conversation."""

    server: TextServer
    params: GenerationParams  # of the answer
    chat: ChatParams  # likewise
    context: RequestContext
    plan: CompactionPlan
    follow: Callable[[ChatStream], object]  # called with the stream of each summary
    timings: Timings = attrs.field(init=False, factory=Timings)
    n_prompt: int = attrs.field(init=False, default=0)

    @property
    def n_summary(self) -> int:
        """The most tokens of a summary."""
        return min(_MAX_SUMMARY, max(1, self.server.model.n_ctx_seq // _SHARE))

    async def compact(self, messages: Messages) -> Compaction:
        """Compact a conversation.

        Raises:
            NothingToSummarizeError: it has no messages but rules.
            NoSummaryError: the model wrote none.
            ContextLengthExceededError: it has too many parts of the size of the context.
            TrioServeError: a request failed.
        """
        n = n_rules(messages)
        rules, said = messages[:n], messages[n:]
        calls = open_calls(said)
        summed = without(said, calls)
        if not summed:
            raise NothingToSummarizeError("There is nothing to summarize.", param="messages")
        chat = self._chat_of_summary()
        asked = [*rules, *summed, {"role": "user", "content": self.plan.task}]
        room = self.server.model.n_ctx_seq - await length_of(self.server, asked, chat)
        if room >= max(1, self.n_summary // _LEAST):  # clients ask when little is left
            summary = await self._ask(asked, chat, min(self.n_summary, int(room)))
        else:
            summary = await self._read(transcript(summed), chat)
        kept = await self._kept(rules, said, calls)
        return Compaction(summary=summary, kept=kept, spares_users=self.plan.spares_users)

    def _chat_of_summary(self) -> ChatParams:
        """The chat of a summary: as that of the answer, so that the prompts begin alike.

        The budget ends the reasoning: a variable would change the beginning of some prompts. Where
        reasoning has a channel, the variable forbids it, and changes nothing else.
        """
        chat, kwargs = self.chat, self.chat.template_kwargs
        if self.server.model.template.format.channels is not None:
            kwargs = {**kwargs, "enable_thinking": False}
        return attrs.evolve(
            chat,
            tool_choice=ToolChoice("none" if chat.tools else "auto"),
            add_generation_prompt=True,
            continue_final_message=None,
            template_kwargs=kwargs,
            reasoning_format="deepseek",  # which keeps it out of the text
            reasoning_budget=0,
            reasoning_message=None,
            parse_tools=False,
        )

    async def _ask(self, messages: Sequence[Message], chat: ChatParams, most: int) -> str:
        given = {
            "max_tokens": most,
            "priority": min(-1, self.params.priority),
            "lora": self.params.lora,
            "cache_salt": self.params.cache_salt,
        }
        params = await self.server.params(given, context=self.context)
        context = attrs.evolve(self.context, arrived=None)
        asked = self.server.stream_chats(Messages(messages), params, chat, context=context)
        async with asked as (stream,):
            self.follow(stream)
            answer = await stream.read()
        self.timings = self.timings.plus(answer.finished.timings)
        self.n_prompt += len(answer.prompt)
        summary = answer.message.content
        if (thinking := self.server.model.template.format.thinking) is not None:
            summary = summary.rpartition(thinking.end)[2]  # it may still think aloud
        if not (summary := summary.strip()):
            raise NoSummaryError("The model wrote no summary of the conversation.")
        return summary

    async def _read(self, text: str, chat: ChatParams) -> str:
        """Read a conversation in parts, each with the summary of those before it."""
        chat = attrs.evolve(chat, tools=None, tool_choice="auto")
        fill = partial(_TASK_OF_PART.format, task=self.plan.task)
        task = fill(n=0, n_parts=0, part="", so_far=_SO_FAR.format(summary=""))
        n_around = 2 * self.n_summary + len(await self._tokens(task)) + _AROUND_TASK
        parts = await self._parts(text, max(1, self.server.model.n_ctx_seq - n_around))
        summary = ""
        for n, part in enumerate(parts, 1):
            so_far = _SO_FAR.format(summary=summary) if summary else ""
            task = fill(n=n, n_parts=len(parts), part=part, so_far=so_far)
            summary = await self._ask([{"role": "user", "content": task}], chat, self.n_summary)
        return summary

    async def _parts(self, text: str, size: int) -> list[str]:
        """Divide a text into parts of at most `size` tokens, between lines where possible."""
        waiting, parts = [text], list[str]()
        while waiting:
            text = waiting.pop()
            n_tokens = math.inf
            if len(text) <= 16 * size:  # more would be tokenized for nothing
                n_tokens = len(await self._tokens(text))
            if n_tokens <= size or len(text) < 2:
                parts.append(text)
                continue
            if len(parts) + len(waiting) >= _MAX_PARTS:
                n_ctx = self.server.model.n_ctx_seq
                raise ContextLengthExceededError(_MAX_PARTS * size, n_ctx, at_least=True)
            middle = len(text) // 2
            cut = text.rfind("\n", middle // 2, middle) + 1 or middle
            waiting += [text[cut:], text[:cut]]
        return parts

    async def _tokens(self, text: str) -> Sequence[TokenId]:
        return await self.server.tokenize(text, add_special=False, parse_special=False)

    # -- what is kept

    async def _kept(
        self, rules: Sequence[Message], said: Sequence[Message], calls: Sequence[Message]
    ) -> Messages:
        """Choose what is kept: the last turns that fit, and all open calls."""
        groups = groups_of(said)
        if self.plan.spares_users:
            first = len(groups)
            while first and groups[first - 1][0]["role"] == "assistant":
                first -= 1
            groups = groups[first:]
        n_first = await length_of(
            self.server, [*rules, {"role": "user", "content": ""}], self._chat_of_summary()
        )
        n_ctx = self.server.model.n_ctx_seq
        room = (self.plan.limit - n_first - self.n_summary) / 2
        room = min(n_ctx / 4, max(n_ctx / 16, room))
        first = len(groups)
        while first:
            room -= await self._size_of(groups[first - 1], room)
            is_continued = self.chat.continue_final_message is not None and first == len(groups)
            if room < 0 and not is_continued:
                break
            first -= 1
        tail = [message for group in groups[first:] for message in group]
        there = {id(call) for message in tail for call in message.get("tool_calls", ())}
        cut = [one for one in calls if id(one["tool_calls"][0]) not in there]
        return Messages([*cut, *tail])

    async def _size_of(self, group: Sequence[Message], most: float) -> float:
        """About how many tokens messages have; infinite if more than `most`."""
        text = transcript(group)
        contents = (one["content"] for one in group if not isinstance(one["content"], str))
        n_media = sum(part["type"] != "text" for content in contents for part in content)
        n_tokens: float = n_media * _PER_FILE
        if n_tokens > most or len(text) > 16 * max(most, 0):
            return math.inf
        return n_tokens + len(await self._tokens(text))


#: About how many tokens an image or another file has.
_PER_FILE = 256


# -- answers


async def open_fitting(
    enter: Callable[[AbstractAsyncContextManager[list[ChatStream]]], Awaitable[list[ChatStream]]],
    server: TextServer,
    messages: Messages,
    params: GenerationParams,
    chat: ChatParams,
    context: RequestContext,
    *,
    truncates: bool,
) -> ChatStream:
    """Open the answer to a chat. With `truncates`, the oldest messages of one that does not fit go.

    `enter` enters the block of the answer. Raises as `TextServer.stream_chats`.
    """
    try:
        (stream,) = await enter(server.stream_chats(messages, params, chat, context=context))
    except ContextLengthExceededError:
        if not truncates:
            raise
        fewer = await truncated(server, messages, params, chat)
        (stream,) = await enter(server.stream_chats(fewer, params, chat, context=context))
    return stream


async def truncated(
    server: TextServer, messages: Messages, params: GenerationParams, chat: ChatParams
) -> Messages:
    """Drop the oldest messages, so that a prompt leaves room for an answer.

    The rules at the beginning stay, and so does the last group of messages: a call is dropped with
    its result.
    """
    n = n_rules(messages)
    groups, limit = groups_of(messages[n:]), limit_of(server, params)

    def rest(first: int) -> Messages:
        return Messages([*messages[:n], *(one for group in groups[first:] for one in group)])

    low, high = 0, max(len(groups) - 1, 0)  # the first group that stays is in between
    while low < high:
        middle = (low + high) // 2
        if await length_of(server, rest(middle), chat) <= limit:
            high = middle
        else:
            low = middle + 1
    return rest(low)


class CompactedChat(Feed[CompactedEvent]):
    """The events of an answer whose conversation is compacted first. The last is `Finished`.

    Raises:
        TrioServeError: from the iteration, when the summary or the answer fails.
    """

    def __init__(self) -> None:
        super().__init__(size=1)
        #: The stream that runs now, of the summary or the answer, and its mailbox.
        self.streams: list[ChatStream] = []
        self.mailboxes: list[Mailbox] = []

    def follow(self, stream: ChatStream) -> None:
        """Note the stream that runs from now on."""
        self.streams[:], self.mailboxes[:] = [stream], [stream.mailbox]


@asynccontextmanager
async def stream_compacted(
    server: TextServer,
    messages: Messages,
    params: GenerationParams,
    chat: ChatParams,
    plan: CompactionPlan,
    context: RequestContext,
) -> AsyncIterator[CompactedChat]:
    """Compact a chat and answer it during a block. Leaving the block cancels both."""
    feed = CompactedChat()
    compactor = _Compactor(server, params, chat, context, plan, feed.follow)

    async def execute() -> None:
        try:
            with server.gate.inside(), context.preparing():
                await _answer(feed, compactor, messages)
        except Exception as error:
            feed.end(raised_alone(error))
        finally:
            feed.end()

    with server.gate.open(partial(feed.end, now=True)):
        async with alongside(execute):
            yield feed


async def _answer(feed: CompactedChat, compactor: _Compactor, messages: Messages) -> None:
    server, plan = compactor.server, compactor.plan
    feed.put(Compacting())
    compaction: Compaction | None = None
    try:
        compaction = await compactor.compact(messages)
    except NothingToSummarizeError:
        if not plan.answers:
            raise
    except NoSummaryError:
        if not plan.may_fail:
            raise
    if compaction is not None:
        stays = [messages[i] for i in compaction.stays(messages)]
        messages = Messages([*stays, *compaction.messages()])
    told = Compacted(
        compaction=compaction, timings=compactor.timings, n_prompt=compactor.n_prompt, is_all=True
    )
    if not plan.answers:
        feed.put(told)
        (stream,) = feed.streams
        assert stream.finished is not None
        feed.put(attrs.evolve(stream.finished, timings=told.timings))
        return
    async with AsyncExitStack() as stack:
        with server.gate.inside(has_begun=True):
            stream = await open_fitting(
                stack.enter_async_context,
                server,
                messages,
                compactor.params,
                compactor.chat,
                attrs.evolve(compactor.context, arrived=None),
                truncates=plan.truncates,
            )
        feed.follow(stream)
        feed.put(attrs.evolve(told, n_prompt=len(stream.prompt), is_all=False))
        event: CompactedEvent | None = None
        while not isinstance(event, Finished):
            event = await stream.next_event()
            await feed.room()
            feed.put(event)
