"""Messages that are answered."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import attrs

from trioserve.chat.grammar.answer import after_thinking, constrain
from trioserve.chat.messages import documents_in
from trioserve.chat.params import ChatParams, choose
from trioserve.chat.parse.parser import MessageParser, message_parser, thinking_of
from trioserve.chat.template.continuation import continued_prompt_tail
from trioserve.config import Config
from trioserve.errors import UnsupportedFieldError
from trioserve.server.concurrency import all_of
from trioserve.server.context import RequestContext
from trioserve.server.generation.completions import Completions, check_copies, copies_of
from trioserve.server.limits.cache_sharing import CacheSharing
from trioserve.server.limits.memory import Hold
from trioserve.server.limits.workers import Workers
from trioserve.server.model import LoadedModel
from trioserve.server.prompts.chats import ChatPrompts, Messages, n_chars
from trioserve.server.prompts.tokens import Tokenizer
from trioserve.server.stream import ChatCompletion, ChatStream
from trioserve.types import GenerationParams, Prompt, Thinking, ThinkingBudget


@attrs.frozen
class _Answer:
    """What the engine is to continue, and how its output is read."""

    text: str
    prompt: Prompt
    prompt_tail: str
    params: GenerationParams
    chat: ChatParams
    budget: ThinkingBudget | None


class Chats:
    """Turns chats into prompts, and outputs into messages.

    Args:
        config: what holds for chats that do not say.
        model: has the template.
        tokenizer: makes tokens of the last words of reasoning.
        workers: do the work on long text.
        prompts: renders chats.
        completions: continues prompts.
        sharing: says who may share what is made for a chat.
    """

    def __init__(
        self,
        config: Config,
        model: LoadedModel,
        tokenizer: Tokenizer,
        workers: Workers,
        prompts: ChatPrompts,
        completions: Completions,
        sharing: CacheSharing,
    ) -> None:
        self._config = config
        self._model = model
        self._tokenizer = tokenizer
        self._workers = workers
        self._prompts = prompts
        self._completions = completions
        self._sharing = sharing

    @asynccontextmanager
    async def stream(
        self,
        messages: Messages,
        params: GenerationParams,
        chat: ChatParams,
        context: RequestContext,
        *,
        n: int = 1,
    ) -> AsyncIterator[list[ChatStream]]:
        """Answer a chat `n` times, all at the same time. Otherwise like `Server.stream_chat`."""
        check_copies(n, self._model.n_slots)
        context.check_time()
        async with AsyncExitStack() as stack:
            hold = stack.enter_context(self._prompts.hold(context.client))
            answer = await self._prepare(messages, params, chat, context, hold)
            streams = []
            for copy in copies_of(answer.params, n):
                opened = self._completions.open(
                    answer.prompt,
                    copy,
                    context,
                    preserved_tokens=self._model.preserved_tokens,
                    budget=answer.budget,
                    operation="chat",
                )
                stream = await stack.enter_async_context(opened)
                streams.append(ChatStream(stream, self._parser(answer), answer.text))
            yield streams

    async def answer(
        self,
        messages: Messages,
        params: GenerationParams,
        chat: ChatParams,
        context: RequestContext,
        *,
        n: int = 1,
    ) -> list[ChatCompletion]:
        """Answer a chat `n` times, and return all at the end.

        Raises:
            TrioServeError: one of them failed; the others are cancelled.
        """
        async with self.stream(messages, params, chat, context, n=n) as streams:
            return await all_of([stream.read for stream in streams])

    async def _prepare(
        self,
        messages: Messages,
        params: GenerationParams,
        chat: ChatParams,
        context: RequestContext,
        hold: Hold,
    ) -> _Answer:
        """Render a chat, and find out what its answer may look like."""
        choice = choose(chat.tool_choice, chat.tools or ())
        template = self._model.template
        if choice.mode != "auto" and not template.takes_tools:
            raise UnsupportedFieldError(
                "'tool_choice' needs templates in Jinja, and this server runs with --no-jinja.",
                param="tool_choice",
            )
        format, can = template.format, template.capabilities
        # By text, a model whose template knows no tools would be told to call them.
        shown = can.supports_tools or choice.mode != "none"
        shown_chat = chat if shown else attrs.evolve(chat, tools=None)
        parsed = await self._prompts.parse(messages)
        if any(map(documents_in, parsed)):
            self._completions.check_room(context)  # not to read them for nothing
        marked = await self._prompts.mark(parsed, hold, deadline=context.deadline)
        if marked.media:
            self._completions.check_room(context)  # not to load media for nothing
        text = await self._prompts.render(marked.messages, shown_chat)
        prompt = await self._prompts.prompt_of(text, marked, shown_chat, hold, context.deadline)
        part = chat.continue_final_message
        tail = text[-256:] if part is None else continued_prompt_tail(marked.messages, part, format)
        chat = attrs.evolve(
            chat,
            tool_choice=choice,
            parse_tools=chat.parse_tools and choice.mode != "none",
            reasoning_format=chat.reasoning_format or self._config.reasoning_format,
        )
        if self._config.skip_chat_parsing:
            chat = attrs.evolve(chat, parse_tools=False, reasoning_format="none")
        parallel = chat.parallel_tool_calls
        if parallel is None:
            parallel = can.supports_parallel_tool_calls or not can.supports_tools
        make = partial(
            constrain,
            format,
            chat.tools or (),
            choice,
            parallel=parallel,
            prompt_tail=tail,
            answer=params.grammar,
            owner=self._sharing.owner(context.client),
        )
        grammar = await self._workers.run(lambda _: make(), n_chars(chat.tools))
        thinking = thinking_of(format, tail, may_begin=part is None)
        if grammar is not None:
            assert chat.reasoning_format is not None
            grammar = after_thinking(grammar, format, thinking, chat.reasoning_format)
            if not grammar.lazy:
                thinking = None  # all of the output is as the grammar says
        budget = await self._budget(thinking, chat)
        return _Answer(text, prompt, tail, attrs.evolve(params, grammar=grammar), chat, budget)

    def _parser(self, answer: _Answer) -> MessageParser:
        assert answer.chat.reasoning_format is not None
        return message_parser(
            self._model.template.format,
            parse_tools=answer.chat.parse_tools,
            reasoning_format=answer.chat.reasoning_format,
            tools=answer.chat.tools or (),
            prompt_tail=answer.prompt_tail,
        )

    async def _budget(self, thinking: Thinking | None, chat: ChatParams) -> ThinkingBudget | None:
        """Make the budget of an answer that may begin with reasoning; None: it needs none."""
        n_tokens = chat.reasoning_budget
        if n_tokens < 0:
            n_tokens = self._config.reasoning_budget
        if thinking is None or (n_tokens < 0 and not chat.reasoning_control):
            return None
        message = chat.reasoning_message
        if message is None:
            message = self._config.reasoning_budget_message
        texts = (message, thinking.end)
        closing = [
            await self._tokenizer.tokenize(text, add_special=False, is_fragment=True)
            for text in texts
            if text
        ]
        return ThinkingBudget(
            thinking=thinking, n_tokens=n_tokens, closing=tuple(itertools.chain(*closing))
        )
