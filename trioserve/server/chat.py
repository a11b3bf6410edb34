"""`Chats`: messages that are answered."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import trio

from trioserve.chat.grammar.answer import constrain
from trioserve.chat.grammar.thinking import after_thinking, thinking_of
from trioserve.chat.parse.parser import MessageParser
from trioserve.chat.template.continuation import (
    ContinueFinalMessage,
    continued_prompt_tail,
    render_continued,
)
from trioserve.chat.tool_choice import ToolChoice, choose
from trioserve.errors import ServerClosingError
from trioserve.server.core import SHORT_TEXT
from trioserve.server.stream import ChatChunk, ChatCompletion, ChatStream
from trioserve.server.text import Texts
from trioserve.types import (
    CancelReason,
    GenerationParams,
    Thinking,
    ThinkingBudget,
    TokenId,
    TokenProbs,
)


class Chats(Texts):
    """Answers chats."""

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: ContinueFinalMessage | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a chat with the model's template.

        Args:
            messages: the chat, in OpenAI's form.
            tools: functions that the model may call, in OpenAI's form.
            add_generation_prompt: whether the prompt ends with the head of an answer.
            continue_final_message: the part of the last message that is left open; then the prompt
                ends with it.
            template_kwargs: variables for the template, beside those of the configuration.

        Raises:
            TemplateError: the template refuses the messages.
            InvalidRequestError: a message is malformed.
        """
        self._check_open()
        render = (
            partial(self.template.render, add_generation_prompt=add_generation_prompt)
            if continue_final_message is None
            else partial(
                render_continued, self.template, self.template.format, part=continue_final_message
            )
        )
        variables = {**self._template_variables, **(template_kwargs or {})}
        work = partial(render, messages, tools=tools, kwargs=variables)
        return await self._work(work, _n_chars([messages, tools]))

    async def tokenize_rendered(self, text: str) -> tuple[TokenId, ...]:
        """Turn what `render` made into the token ids that a chat begins with.

        Raises:
            InvalidRequestError: the text cannot be encoded.
        """
        bos = self.info.bos_token
        # Templates write BOS themselves; the tokenizer must not add a second one.
        return await self.tokenize(text, add_special=not (bos and text.startswith(bos)))

    @asynccontextmanager
    async def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: GenerationParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | ToolChoice = "auto",
        parallel_tool_calls: bool | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: ContinueFinalMessage | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        reasoning_format: str | None = None,
        reasoning_budget: int = -1,
        reasoning_message: str | None = None,
        reasoning_control: bool = False,
        parse_tools: bool = True,
        on_cancel: CancelReason = CancelReason.CALLER,
        timeout: float | None = None,
        client: str = "",
        **settings: Any,
    ) -> AsyncIterator[ChatStream]:
        """Answer a chat, token by token. Like `stream`, with `ChatChunk` in place of `Chunk`.

        Args:
            messages: the chat, in OpenAI's form: ``[{"role": "user", "content": "Hi"}]``.
            options: how to answer; `settings` change single fields by name.
            tools: functions that the model may call, in OpenAI's form.
            tool_choice: "auto", "none", "required", or the name of the function to call.
            parallel_tool_calls: whether an answer may have several calls. By default it may
                where the template shows several.
            add_generation_prompt: whether the prompt ends with the head of an answer.
            continue_final_message: the part of the last message, which is the assistant's, that the
                model continues: "content", "reasoning_content" or "auto"; the answer is the rest.
            template_kwargs: variables for the template, such as ``enable_thinking``.
            reasoning_format: where reasoning goes, as in llama-server.
            reasoning_budget: most tokens of reasoning; 0: it ends at once.
            reasoning_message: the last words of reasoning whose budget is used up. What is not
                said of reasoning, or is -1, is as the server's configuration says.
            reasoning_control: whether `end_reasoning` may end it.
            parse_tools: whether tool calls are taken out of the text.
            on_cancel: what the log gives as the reason when the block is cancelled.
            timeout: seconds from now after which the request is cancelled, wherever it is.
            client: whose request it is. In the queue, clients take turns.

        Raises:
            QueueFullError: too many requests wait already.
            DeadlineExceededError: from the iteration, when `timeout` has passed.
            TemplateError: the template refuses the messages.
            InvalidRequestError: the messages or an option are wrong.
            ServerClosingError: the server drains, or is closed.
        """
        self.check_generates()
        arrived = trio.current_time()
        choice = choose(tool_choice, tools or ())
        format, can = self.template.format, self.template.capabilities
        text = await self.render(
            messages,
            # By text, the model would be told to call them.
            tools=tools if can.supports_tools or choice.mode != "none" else None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )
        prompt = await self.tokenize_rendered(text)
        tail = (
            text[-256:]
            if continue_final_message is None
            else continued_prompt_tail(messages, continue_final_message, format)
        )
        if reasoning_format is None:
            reasoning_format = self.config.reasoning_format
        if self.config.skip_chat_parsing:
            parse_tools, reasoning_format = False, "none"
        parser = MessageParser(
            format,
            parse_tools=parse_tools and choice.mode != "none",
            reasoning_format=reasoning_format,
            tools=tools or (),
            prompt_tail=tail,
        )
        if parallel_tool_calls is None:
            parallel_tool_calls = can.supports_parallel_tool_calls or not can.supports_tools
        options = self.options(settings, options)
        make = partial(
            constrain,
            format,
            tools or (),
            choice,
            parallel=parallel_tool_calls,
            prompt_tail=tail,
            answer=options.grammar,
        )
        grammar = await self._work(make, _n_chars(tools))
        thinking = thinking_of(format, tail, may_begin=continue_final_message is None)
        if grammar is not None:
            grammar = after_thinking(grammar, format, thinking, reasoning_format)
            if not grammar.lazy:
                thinking = None  # all of the output is as the grammar says
        budget = await self._budget(
            thinking, reasoning_budget, reasoning_message, can_end=reasoning_control
        )
        if timeout is not None:
            timeout -= trio.current_time() - arrived
        async with self.stream(
            prompt,
            attrs.evolve(options, grammar=grammar),
            preserved_tokens=self._preserved_tokens,
            budget=budget,
            on_cancel=on_cancel,
            timeout=timeout,
            client=client,
        ) as stream:
            yield ChatStream(stream, parser, text)

    async def _budget(
        self, thinking: Thinking | None, n_tokens: int, message: str | None, *, can_end: bool
    ) -> ThinkingBudget | None:
        """Make the budget of an answer that may begin with reasoning; None: it needs none."""
        if n_tokens < 0:
            n_tokens = self.config.reasoning_budget
        if thinking is None or (n_tokens < 0 and not can_end):
            return None
        if message is None:
            message = self.config.reasoning_budget_message
        texts = (message, thinking.end)
        closing = [await self.tokenize(text, add_special=False) for text in texts if text]
        return ThinkingBudget(
            thinking=thinking, n_tokens=n_tokens, closing=tuple(itertools.chain(*closing))
        )

    async def end_reasoning(self, stream: ChatStream) -> bool:
        """Have an answer end its reasoning now, if it is in it. May be cancelled.

        Returns whether it could: the answer still runs, the model can think, and
        `reasoning_control` or a budget was set.

        Raises:
            ServerClosingError: the server is closed.
        """
        if not self.ready:
            raise ServerClosingError
        return await self.dispatcher.call(partial(self._engine.end_thinking, stream.task_id))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: GenerationParams | None = None,
        **settings: Any,
    ) -> ChatCompletion:
        """Answer a chat, and return the message at the end. Arguments: those of `stream_chat`.

        Raises:
            TrioServeError: as `stream_chat`, and when the request fails.
        """
        tokens: list[TokenId] = []
        probs: list[TokenProbs] = []
        async with self.stream_chat(messages, options, **settings) as stream:
            async for event in stream:
                if isinstance(event, ChatChunk):
                    tokens += event.tokens
                    probs += event.probs
        assert stream.finished is not None
        return ChatCompletion(
            message=stream.message,
            tokens=tuple(tokens),
            probs=tuple(probs),
            prompt=stream.prompt,
            prompt_text=stream.prompt_text,
            finished=stream.finished,
        )


def _n_chars(value: Any) -> int:
    """Add up the text in a JSON value; stops counting when it is no longer short."""
    total = 0
    values = [value]
    while values and total <= SHORT_TEXT:
        value = values.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, Sequence):
            values += value
        total += 8  # whatever it is, it takes some time to render
    return total
